"""A loss that is no number is found, wherever it is and however many good ones follow."""

import logging

import pytest
import torch

from twinhull.train.finite import Finite

BAD = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("bad", BAD)
def test_a_number_that_is_not_finite_is_kept_in_mind(bad: float):
    finite = Finite(stop=True)
    finite.take(bad)
    finite.take(1.0)
    assert finite.is_bad()
    assert finite.is_bad()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_tensor_that_is_not_finite_is_kept_in_mind(bad: float, dtype: torch.dtype):
    finite = Finite(stop=True)
    for value in (1.0, bad, 2.0):
        finite.take(torch.tensor(value, dtype=dtype))
    assert finite.is_bad()
    finite.take(torch.tensor(1.0))
    assert finite.is_bad()


def test_one_among_thousands_is_found_without_keeping_them():
    finite = Finite(stop=True)
    for number in range(3000):
        finite.take(torch.tensor([float("nan") if number == 5 else 1.0]))
    assert finite.is_bad()


def test_finite_losses_are_good_however_large():
    finite = Finite(stop=True)
    for value in (0.0, -1e30, 3e38, 7):
        finite.take(value)
        finite.take(torch.tensor(float(value)))
    assert not finite.is_bad()


def test_ignored_as_asked_it_is_said_once(caplog: pytest.LogCaptureFixture):
    finite = Finite(stop=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            finite.take(torch.tensor(float("nan")))
            assert not finite.is_bad()
    assert [record.message for record in caplog.records] == [
        "the loss is not finite, and training goes on as asked"
    ]
