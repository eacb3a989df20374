from pathlib import Path

import pytest

from twinhull.train.supervise import live
from twinhull.train.supervise.live import Beat, Doing, Failure, Phase


def test_what_a_rank_has_written_can_be_read(tmp_path: Path) -> None:
    beat = Beat(tmp_path, 3)
    assert live.read(tmp_path)[3].phase is Phase.STARTING
    beat.running(40)
    beat.doing(Doing.FIRST)
    beat.timed(0.5, 0.25, 0.125)
    beat.completed(41, Doing.STEPPING)
    record = live.read(tmp_path)[3]
    assert (record.phase, record.doing, record.step, record.started_at_step) == (1, Doing.STEPPING, 41, 40)
    assert (record.step_s, record.own_s, record.data_s) == (0.5, 0.25, 0.125)


def test_every_completion_and_every_change_of_work_is_a_beat(tmp_path: Path) -> None:
    beat = Beat(tmp_path, 0)
    beats = []
    for speak in (lambda: beat.running(0), lambda: beat.doing(Doing.SAVING), lambda: beat.completed(1)):
        speak()
        beats.append(live.read(tmp_path)[0].beats)
    assert beats == [1, 2, 3]


def test_a_rank_waits_until_its_step_is_complete(tmp_path: Path) -> None:
    beat = Beat(tmp_path, 0)
    beat.running(0)
    beat.waits()
    assert live.read(tmp_path)[0].waits == 1
    beat.completed(1)
    assert live.read(tmp_path)[0].waits == 0


def test_a_rank_turns_back_to_what_it_did(tmp_path: Path) -> None:
    beat = Beat(tmp_path, 0)
    beat.completed(1, Doing.STEPPING)
    before = beat.doing(Doing.SAVING)
    beat.doing(before)
    assert live.read(tmp_path)[0].doing is Doing.STEPPING


def test_the_first_step_of_a_loop_and_the_loop_before_are_forgotten(tmp_path: Path) -> None:
    beat = Beat(tmp_path, 0)
    for loop in (10.0, 1.0):
        beat.doing(Doing.FIRST)
        for step_s in (50 * loop, loop, loop):
            beat.timed(step_s, step_s, 0.0)
        beat.completed(3)
        assert live.read(tmp_path)[0].step_s == pytest.approx(loop)


def test_the_cost_of_a_generation_adds_up(tmp_path: Path) -> None:
    beat = Beat(tmp_path, 0)
    for _ in range(3):
        beat.timed(0.5, 0.25, 0.125)
        beat.stalled(0.25)
    beat.doing(Doing.FIRST)
    record = live.read(tmp_path)[0]
    assert (record.worked_s, record.stalled_s) == (1.5, 0.75)


def test_how_a_rank_left_is_kept_with_its_last_step(tmp_path: Path) -> None:
    beat = Beat(tmp_path, 1)
    beat.running(7)
    beat.left(Phase.FAILED, Failure(7, "ValueError: no", "Traceback ..."))
    assert live.read(tmp_path)[1].phase is Phase.FAILED
    assert live.failure(tmp_path, 1) == Failure(7, "ValueError: no", "Traceback ...")
    assert live.failure(tmp_path, 0) is None


def test_a_record_that_is_not_whole_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "rank-0").write_bytes(b"half")
    assert live.read(tmp_path) == {}
    assert live.read(tmp_path / "nowhere") == {}
