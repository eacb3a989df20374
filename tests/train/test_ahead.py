"""Samples into batches, by the rank itself or by processes that load ahead for it."""

import os
import random
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from twinhull.train.run import Run


class Drawing:
    """Its samples are random numbers of all three generators."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class Broken:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise KeyError("no such picture")
        return index


class BrokenInBulk(Broken):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class Picky(Exception):
    """One that cannot be made again from its message."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} is not {other}")


class BrokenBadly(Broken):
    def __getitem__(self, index: int) -> int:
        raise Picky(index, 7)


def drawn(workers: int) -> list[Any]:
    run = Run.alone()
    loader = run.loader(Drawing(), batch_size=4, collate=list, workers=workers)
    return [(batch, float(torch.rand(()))) for batch in run.steps(loader, epochs=2)]


def test_random_numbers_of_samples_and_steps_do_not_depend_on_who_loads() -> None:
    assert drawn(workers=2) == drawn(workers=0)


def children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]


def test_workers_end_with_their_loop_however_it_ends() -> None:
    run, process = Run.alone(), psutil.Process()
    before, files = len(children()), process.num_fds()
    loader = run.loader(Drawing(), batch_size=4, collate=list, workers=1)
    for _ in range(10):
        for _ in run.steps(loader):
            assert len(children()) == before + 1
            break
        list(run.steps(loader))
    assert len(children()) == before
    assert process.num_fds() <= files + 2


def test_a_signal_to_stop_leaves_the_workers_at_work() -> None:
    run = Run.alone()
    loader = run.loader(Drawing(), batch_size=4, collate=list, workers=1)
    seen: list[int] = []
    for batch in run.steps(loader):
        for child in children():
            child.send_signal(signal.SIGTERM)
        seen += [sample[0] for sample in batch]
    assert sorted(seen) == list(range(20))


def test_a_killed_worker_is_an_error_and_no_hang() -> None:
    run = Run.alone()
    loader = run.loader(Drawing(), batch_size=1, collate=list, workers=1)
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
        for _ in run.steps(loader):
            for child in children():
                os.kill(child.pid, signal.SIGKILL)


@pytest.mark.parametrize("of_either_kind", [Broken(), BrokenInBulk()])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_sample_names_it_whoever_loads(of_either_kind: Broken, workers: int) -> None:
    run = Run.alone()
    with pytest.raises(KeyError, match="no such picture") as caught:
        list(
            run.steps(run.loader(of_either_kind, batch_size=2, shuffle=False, collate=list, workers=workers))
        )
    assert caught.value.args == ("no such picture",)
    assert caught.value.__notes__[0].startswith("It was raised for sample")
    assert "3 of Broken" in caught.value.__notes__[0]
    assert "in __getitem__" in "".join(traceback.format_exception(caught.value))


def test_a_run_that_was_stopped_while_workers_were_ahead_goes_on_where_training_was(tmp_path: Path) -> None:
    def life(directory: Path | None, *, leave_at: int | None = None) -> list[int]:
        run, seen = Run.alone(directory=directory), list[int]()
        loader = run.loader(list(range(40)), batch_size=4, collate=list, workers=2)
        for numbers in run.steps(loader):
            seen.extend(numbers)
            if run.step == leave_at:
                run.ask_to_stop()
        return seen

    with pytest.raises(SystemExit):
        life(tmp_path, leave_at=3)
    assert life(tmp_path) == life(None)[16:]


def test_an_error_that_cannot_travel_arrives_as_what_it_said() -> None:
    run = Run.alone()
    loader = run.loader(BrokenBadly(), batch_size=1, shuffle=False, collate=list, workers=1)
    with pytest.raises(RuntimeError, match="Picky: 0 is not 7") as caught:
        list(run.steps(loader))
    assert caught.value.__notes__ == ["It was raised for sample 0 of BrokenBadly."]


SCRIPT = """
import signal
from twinhull.train.run import Run
run = Run.alone()
loader = run.loader(range(100), batch_size=1, collate=list, workers=2)
for step, batch in enumerate(run.steps(loader)):
    if step == 3:
        print("there", flush=True)
        {then}
"""


def started(then: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(then=then)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.live
def test_a_script_that_fails_in_its_loop_ends_and_does_not_wait_for_its_workers() -> None:
    process = started("raise ValueError('mine')")
    _, told = process.communicate(timeout=15)
    assert process.returncode == 1
    assert told.strip().endswith("ValueError: mine")


@pytest.mark.live
def test_workers_die_with_a_rank_that_is_killed() -> None:
    process = started("signal.pause()")
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert alive == []
