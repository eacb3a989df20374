import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from twinhull.errors import TwinhullError
from twinhull.train.books import Books
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.pace import Pace
from twinhull.train.run import Run
from twinhull.train.supervise import live
from twinhull.train.supervise.live import Beat, Doing


def books_of(folder: Path, rank: int = 0, **facts: Any) -> Books:
    group = Group(rank, 2, torch.device("cpu"))
    job = Job(name="fit", directory=folder, save_every_s=600.0, generation=3, **facts)
    return Books(job, group, Pace(), Beat(folder, rank))


def step(books: Books, number: int, **reported: Any) -> None:
    books.begin()
    books.fetched()
    books.placed()
    books.gradients_handed_over()
    books.report(reported)
    books.stepped(number, None)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics" / "fit.jsonl").read_text().splitlines()]


def steps(run: Run) -> Iterator[Any]:
    return run.steps(run.loader(list(range(6)), batch_size=2, collate=list))


def test_each_step_of_a_run_leaves_its_numbers(tmp_path: Path) -> None:
    run = Run.alone(name="fit", directory=tmp_path)
    for _ in steps(run):
        run.report(loss=torch.tensor(run.step + 0.5, requires_grad=True), rate=1e-3)
    run.finish()
    written = lines(tmp_path)
    assert [(line["step"], line["loss"], line["rate"]) for line in written] == [
        (1, 0.5, 1e-3), (2, 1.5, 1e-3), (3, 2.5, 1e-3)
    ]  # fmt: skip
    parts = ("data_s", "copy_s", "compute_s", "communication_s", "optimizer_s", "checkpoint_s", "other_s")
    for line in written:
        assert sum(line[part] for part in parts) >= 0.99 * line["step_s"] > 0


def test_a_hook_gets_each_step_with_what_was_reported_in_it(tmp_path: Path) -> None:
    run, seen = Run.alone(directory=tmp_path), list[tuple[float, float | None]]()

    def hook(numbers: Mapping[str, Any]) -> None:
        seen.append((numbers["step"], numbers.get("loss")))

    run.on_step(hook)
    for _ in steps(run):
        if run.step == 1:
            run.report(loss=7.0)
    assert seen == [(1, None), (2, 7.0), (3, None)]


def test_a_step_that_the_code_breaks_off_after_is_a_step(tmp_path: Path) -> None:
    run = Run.alone(name="fit", directory=tmp_path)
    for _ in steps(run):
        run.report(loss=1.0)
        break
    run.finish()
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, 1.0)]


def test_what_a_hook_raises_is_the_codes_own_crash() -> None:
    run = Run.alone()

    def hook(_: Mapping[str, Any]) -> None:
        raise LookupError("tracker")

    run.on_step(hook)
    with pytest.raises(LookupError, match="tracker"):
        list(steps(run))


def test_a_number_is_taken_as_it_was_when_it_was_reported(tmp_path: Path) -> None:
    run, total = Run.alone(name="fit", directory=tmp_path), torch.zeros(())
    for _ in steps(run):
        total += 1.0
        run.report(total=total)
    run.finish()
    assert [line["total"] for line in lines(tmp_path)] == [1.0, 2.0, 3.0]


def test_a_loss_that_is_no_number_ends_the_run_and_is_written(tmp_path: Path) -> None:
    run = Run.alone(name="fit", directory=tmp_path)
    with pytest.raises(TwinhullError, match="not finite: found after step"):
        for _ in steps(run):
            run.report(loss=torch.tensor(math.nan if run.step == 1 else 1.0))
    assert [line["loss"] for line in lines(tmp_path)][:2] == [1.0, None]


def test_asked_to_ignore_it_a_run_says_so_once_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    books = books_of(tmp_path, stop_on_nan=False)
    books.looping(0, None)
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            step(books, number, loss=math.inf)
            assert not books.is_bad()
    assert len(caplog.records) == 1


def test_every_rank_watches_its_own_loss_but_only_the_first_one_writes(tmp_path: Path) -> None:
    books = books_of(tmp_path, rank=1)
    books.looping(0, None)
    step(books, 1, loss=math.nan)
    assert books.is_bad()
    books.close()
    assert not (tmp_path / "metrics").exists()


def test_a_ranks_record_follows_what_it_does(tmp_path: Path) -> None:
    books = books_of(tmp_path)

    def shown() -> tuple[Doing, int, int]:
        record = live.read(tmp_path)[0]
        return record.doing, record.step, record.waits

    books.running(4)
    assert shown() == (Doing.BETWEEN, 4, 0)
    books.looping(4, None)
    assert shown() == (Doing.FIRST, 4, 0)
    books.begin()
    books.gradients_handed_over()
    assert shown() == (Doing.FIRST, 4, 1)
    books.stepped(5, None)
    assert shown() == (Doing.STEPPING, 5, 0)
    with books.saving():
        assert shown() == (Doing.SAVING, 5, 0)
    assert shown() == (Doing.STEPPING, 5, 0)
    books.between(5)
    assert shown() == (Doing.BETWEEN, 5, 0)


def test_waiting_for_a_checkpoint_is_a_stall_and_no_work(tmp_path: Path) -> None:
    books = books_of(tmp_path)
    books.looping(0, None)
    step(books, 1)
    worked_s = live.read(tmp_path)[0].worked_s
    with books.saving():
        sum(range(200_000))
    record = live.read(tmp_path)[0]
    assert record.worked_s == worked_s
    assert record.stalled_s > worked_s


def test_the_wait_between_gradients_and_update_is_the_checkpoints(tmp_path: Path) -> None:
    pace = Pace()
    pace.before_update.append(lambda: sum(range(200_000)))  # as a Keeper, which is there first
    beat = Beat(tmp_path, 0)
    books = Books(Job(name="fit", directory=tmp_path), Group(0, 1, torch.device("cpu")), pace, beat)
    seen: list[Mapping[str, Any]] = []
    books.hooks.append(lambda numbers: seen.append(dict(numbers)))
    books.looping(0, None)
    books.begin()
    books.fetched()
    books.placed()
    for callback in pace.before_update + pace.after_update:
        callback()
    books.stepped(1, None)
    assert seen[0]["checkpoint_s"] > seen[0]["compute_s"] + seen[0]["optimizer_s"]
    record = live.read(tmp_path)[0]
    assert record.stalled_s > record.worked_s
