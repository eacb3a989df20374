"""Lines of JSON: one for each step, whole, bounded, and never in the way of training."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from twinhull.train import metrics
from twinhull.train.metrics import Metrics


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_is_a_line_with_its_generation_and_numbers(tmp_path: Path):
    path = tmp_path / "metrics" / "fit.jsonl"
    kept = Metrics(path, generation=3)
    for step in (1, 2):
        kept.stepped({"step": step, "step_s": 0.5, "loss": torch.tensor(step / 4), "hits": np.float32(2)})
    kept.flush()
    found = lines(path)
    assert [line.pop("t") > 0 for line in found] == [True, True]
    assert found == [
        {"generation": 3, "step": 1, "step_s": 0.5, "loss": 0.25, "hits": 2.0},
        {"generation": 3, "step": 2, "step_s": 0.5, "loss": 0.5, "hits": 2.0},
    ]


def test_steps_done_again_follow_with_a_higher_generation(tmp_path: Path):
    for generation in (1, 2):
        again = Metrics(tmp_path / "fit.jsonl", generation)
        again.stepped({"step": 7, "loss": 1.0 / generation})
        again.flush()
    assert [(line["step"], line["generation"]) for line in lines(tmp_path / "fit.jsonl")] == [(7, 1), (7, 2)]


def test_what_is_not_finite_is_null(tmp_path: Path):
    kept = Metrics(tmp_path / "fit.jsonl", 1)
    kept.stepped({"step": 1, "loss": math.nan, "norm": torch.tensor(math.inf)})
    kept.flush()
    [line] = lines(tmp_path / "fit.jsonl")
    assert line["loss"] is line["norm"] is None


def test_tensors_of_any_kind_are_read_together(tmp_path: Path):
    kept = Metrics(tmp_path / "fit.jsonl", 1)
    weight = torch.ones(1, requires_grad=True)
    kept.stepped(
        {"step": 1, "loss": weight * 2, "count": torch.tensor(3), "half": torch.tensor([[0.5]]).bfloat16()}
    )
    kept.flush()
    [line] = lines(tmp_path / "fit.jsonl")
    assert (line["loss"], line["count"], line["half"]) == (2.0, 3.0, 0.5)


def test_steps_are_kept_in_memory_and_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics, "EVERY_S", 1e9)
    kept = Metrics(tmp_path / "fit.jsonl", 1)
    kept.stepped({"step": 1})
    assert not (tmp_path / "fit.jsonl").exists()
    monkeypatch.setattr(metrics, "EVERY_S", 0.0)
    kept.stepped({"step": 2})
    assert [line["step"] for line in lines(tmp_path / "fit.jsonl")] == [1, 2]


def test_many_short_steps_are_written_before_they_take_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(metrics, "EVERY_S", 1e9)
    kept = Metrics(tmp_path / "fit.jsonl", 1)
    for step in range(5000):
        kept.stepped({"step": step})
    assert len(lines(tmp_path / "fit.jsonl")) == 4096


def test_a_full_file_is_kept_once_and_a_new_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics, "MOST_BYTES", 1000)
    kept = Metrics(tmp_path / "fit.v2.jsonl", 1)
    for step in range(100):
        kept.stepped({"step": step})
        kept.flush()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit.v2.1.jsonl", "fit.v2.jsonl"]
    steps = [line["step"] for name in ("fit.v2.1.jsonl", "fit.v2.jsonl") for line in lines(tmp_path / name)]
    assert steps == list(range(steps[0], 100))
    assert (tmp_path / "fit.v2.1.jsonl").stat().st_size < 1100


NO_ROOM = """
import logging, resource, signal, sys
from pathlib import Path
from twinhull.train.metrics import Metrics

logging.basicConfig(format="%(message)s")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # the kernel writes a part, then refuses
kept = Metrics(Path(sys.argv[1]), 1)
for step in range(50):
    kept.stepped({"step": step})
    kept.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
kept.stepped({"step": 50})
kept.flush()
"""


@pytest.mark.live
def test_without_room_whole_lines_stay_and_it_is_said_once(tmp_path: Path):
    path = tmp_path / "fit.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", NO_ROOM, str(path)], check=True, capture_output=True, text=True
    )
    found = [line["step"] for line in lines(path)]
    assert found == [*range(len(found) - 1), 50]
    assert 5 < len(found) < 50
    assert done.stderr == "metrics of steps are lost\n"


def test_without_a_path_nothing_is_kept(tmp_path: Path):
    kept = Metrics(None, 1)
    kept.stepped({"step": 1})
    kept.flush()
    assert not list(tmp_path.iterdir())
