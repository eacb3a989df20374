"""The line of numbers that a run shows: means since the last one, under names that the view knows."""

import json
import math

import pytest
import torch

from twinhull import logs
from twinhull.deploy import record
from twinhull.deploy.board import Board
from twinhull.profile.clock import PARTS, Part, Times
from twinhull.train import progress
from twinhull.train.progress import Progress


def a_step(data_s: float, compute_s: float) -> list[float]:
    parts = [0.0] * PARTS
    parts[Part.DATA], parts[Part.COMPUTE] = data_s, compute_s
    return parts


def sampled(capsys: pytest.CaptureFixture[str]) -> list[dict[str, float]]:
    return [json.loads(line)["sample"] for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(autouse=True)
def supervised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(logs.VARIABLE, "json")
    monkeypatch.setattr(progress, "EVERY_S", 0.0)


def test_a_line_has_the_means_of_the_steps_since_the_last_one(capsys: pytest.CaptureFixture[str]):
    times = Times()
    shown = Progress("fit", times)
    times.add(a_step(0.1, 0.3))
    shown.stepped(1, left=9)
    times.add(a_step(0.2, 0.6))
    times.add(a_step(0.4, 0.8))
    shown.stepped(3, left=7)
    first, second = sampled(capsys)
    assert first == pytest.approx({
        "train.fit.step": 1, "train.fit.steps_total": 10, "train.fit.step_s": 0.4, "train.fit.data_s": 0.1,
        "train.fit.compute_s": 0.3, "train.fit.communication_s": 0, "train.fit.optimizer_s": 0,
        "train.fit.checkpoint_s": 0,
    })  # fmt: skip
    assert second["train.fit.step_s"] == pytest.approx(1.0)
    assert second["train.fit.data_s"] == pytest.approx(0.3)


def test_nothing_is_shown_before_a_second_has_passed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(progress, "EVERY_S", 1e9)
    times = Times()
    shown = Progress("fit", times)
    times.add(a_step(0.1, 0.3))
    shown.stepped(1, left=None)
    assert sampled(capsys) == []


def test_reported_values_are_read_when_they_are_shown(capsys: pytest.CaptureFixture[str]):
    shown = Progress("fit", Times())
    shown.report({"loss": torch.tensor(0.5), "rate": 0.1})
    shown.report({"loss": torch.tensor(0.25), "norm": math.inf})
    shown.stepped(1, left=None)
    [line] = sampled(capsys)
    assert line == {
        "train.fit.step": 1, "train.fit.steps_total": 0, "train.fit.loss": 0.25, "train.fit.rate": 0.1
    }  # fmt: skip


def test_the_live_view_finds_what_it_shows(capsys: pytest.CaptureFixture[str]):
    times = Times()
    shown = Progress("fit", times)
    times.add(a_step(0.1, 0.3))
    shown.report({"loss": 0.5})
    shown.stepped(4, left=6)
    board = Board()
    heard = record.read("rank:fit-0", capsys.readouterr().out.encode())
    assert heard is not None
    board.hear(heard)
    training = board.trainings["fit"]
    assert (training.step, training.steps_total, list(training.loss)) == (4, 10, [0.5])
    assert (training.step_s, training.data_s) == pytest.approx((0.4, 0.1))
