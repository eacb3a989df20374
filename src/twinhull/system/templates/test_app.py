"""The functions are plain, so plain pytest tests them: no broker, no gateway, no launcher."""

from pathlib import Path

import numpy as np
import pytest

from app import Minutes, Order, estimate, fit, usual


def test_a_batch_is_answered_in_its_order() -> None:
    model = Minutes(weight=np.array([[3.0, 4.0, 1.5]]), bias=np.array([12.0]))
    assert estimate([Order(km=2), Order(km=2, rush=True)], model=model) == [18.0, 25.0]


def test_the_rule_of_thumb_knows_the_rush() -> None:
    assert usual(km=5, rush=True) > usual(km=5)


def test_training_learns_how_long_a_delivery_takes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from twinhull.train.run import Run

    run = Run.alone(directory=tmp_path)
    fit(run)
    model = run.latest(Minutes)
    assert model is not None
    assert model.of([Order(km=4), Order(km=4, rush=True)]) == pytest.approx([24, 34], abs=1)
