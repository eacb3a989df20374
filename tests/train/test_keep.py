"""What ranks keep together: the snapshot, failures, the cost, things with files of their own."""

import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from twinhull.errors import CheckpointError, TwinhullError
from twinhull.train.checkpoints.cost import Cost
from twinhull.train.checkpoints.keep import Keeper
from twinhull.train.checkpoints.manifest import Place
from twinhull.train.checkpoints.store import Store
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.pace import Pace

ALONE = Group(0, 1, torch.device("cpu"))
APPS = Path(__file__).parent / "apps"


class Loop:
    """A model, its optimizer and their keeper, as a run puts them together."""

    def __init__(self, directory: Path, *, pace: Pace | None = None, size: int = 4, **facts: Any) -> None:
        torch.manual_seed(1)
        self.pace = pace
        self.model: nn.Module = nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.keeper = Keeper(Job(name="fit", directory=directory, **facts), ALONE, pace)
        for thing in (self.model, self.optimizer, self.schedule):
            self.keeper.add(thing, type(thing).__name__)
        self._size = size

    def step(self) -> None:
        self.model(torch.randn(8, self._size)).pow(3).mean().backward()
        for wait in self.pace.before_update if self.pace else ():
            wait()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def state(self) -> list[Any]:
        things = (self.model, self.optimizer, self.schedule)
        return [_copied(thing.state_dict()) for thing in things]


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def names(directory: Path) -> list[str]:
    return Store(directory / "checkpoints" / "fit").names()


@pytest.mark.parametrize("announced", [True, False])
def test_what_is_saved_is_how_it_was_though_training_goes_on_at_once(tmp_path: Path, announced: bool) -> None:
    loop = Loop(tmp_path, pace=Pace() if announced else None, size=200)
    for _ in range(3):
        loop.step()
    expected = loop.state()
    loop.keeper.save(Place(step=3), required=True)
    for _ in range(3):
        loop.step()
    loop.keeper.settle()
    again = Loop(tmp_path, size=200)
    torch.testing.assert_close(again.state(), expected, rtol=0, atol=0)
    assert again.keeper.place.step == again.keeper.saved_step == 3


def test_a_change_that_nobody_announced_fails_the_save_and_the_next_one_is_copied_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, pace=Pace(), size=2000)
    loop.step()
    loop.keeper.save(Place(step=1), required=False)
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.mul_(0.5)
    loop.keeper.settle()
    failed = [record for record in caplog.records if record.message == "checkpoint failed"]
    assert len(failed) + len(names(tmp_path)) == 1  # the copy may have been quicker than the change
    expected = loop.state()
    loop.keeper.save(Place(step=2), required=True)
    if failed:
        assert "was changed while it was copied" in vars(failed[0])["reason"]
        loop.step()
    loop.keeper.settle()
    torch.testing.assert_close(Loop(tmp_path, size=2000).state(), expected, rtol=0, atol=0)


def test_a_save_is_logged_with_what_it_cost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    loop = Loop(tmp_path, pace=Pace())
    loop.keeper.save(Place(step=1), required=False)
    safe = loop.keeper.settle()
    said = [vars(record) for record in caplog.records if record.message == "checkpoint saved"]
    assert safe == Place(step=1)
    assert [(line["step"], line["bytes"] > 0) for line in said] == [(1, True)]
    assert loop.keeper.cost_s is not None
    assert abs(loop.keeper.cost_s - said[0]["stall_s"] - said[0]["slowdown_s"]) < 0.001


def test_one_save_is_under_way_at_a_time_and_none_is_left_out(tmp_path: Path) -> None:
    loop = Loop(tmp_path, pace=Pace(), keep=9)
    for step in range(1, 6):
        loop.step()
        loop.keeper.save(Place(step=step), required=False)
    loop.keeper.settle()
    assert [int(name[-1]) for name in names(tmp_path)] == [5, 4, 3, 2, 1]


def test_poll_tells_once_that_a_place_is_safe(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.keeper.save(Place(step=1), required=False)
    writing = loop.keeper._writing
    assert writing is not None
    writing.ended.wait(10)
    assert [loop.keeper.poll(), loop.keeper.poll()] == [Place(step=1), None]


def test_a_save_that_waits_for_another_does_not_swallow_what_became_safe(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.keeper.save(Place(step=1), required=False)
    loop.keeper.save(Place(step=2), required=False)
    assert loop.keeper.poll() in [Place(step=1), Place(step=2)]
    loop.keeper.settle()
    assert loop.keeper.saved_step == 2


def test_a_signal_in_the_middle_of_a_save_does_not_disturb_it(tmp_path: Path) -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
    try:
        loop = Loop(tmp_path, size=1000)
        loop.keeper.save(Place(step=1), required=True)
        os.kill(os.getpid(), signal.SIGTERM)
        loop.keeper.settle()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught == [signal.SIGTERM]
    assert Loop(tmp_path, size=1000).keeper.saved_step == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    argv = [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(argv, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small disk cannot be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_on_a_full_disk_training_goes_on_with_the_checkpoint_before(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(small_disk, pace=Pace(), size=170)
    loop.step()
    loop.keeper.save(Place(step=1), required=True)
    loop.keeper.settle()
    (small_disk / "other").write_bytes(b"x" * 400_000)
    expected = loop.state()
    loop.step()
    loop.keeper.save(Place(step=2), required=False)
    loop.step()
    loop.keeper.settle()
    [failed] = [vars(record) for record in caplog.records if record.message == "checkpoint failed"]
    assert (failed["step"], failed["reason"]) == (2, "No space left on device")
    assert (loop.keeper.saved_step, names(small_disk)) == (1, ["step-000000001"])
    assert list((small_disk / "checkpoints" / "fit").glob("*.tmp")) == []
    loop.keeper.save(Place(step=3), required=True)
    with pytest.raises(CheckpointError, match=r"step 3 cannot be written: .*The one before is still there"):
        loop.keeper.settle()
    (small_disk / "other").unlink()
    torch.testing.assert_close(Loop(small_disk, size=170).state(), expected, rtol=0, atol=0)


def test_a_required_save_that_fails_raises_when_it_is_looked_at(tmp_path: Path) -> None:
    """A file-size limit makes the kernel refuse the write, as a full disk does."""
    loop = Loop(tmp_path, size=100)
    loop.keeper.save(Place(step=1), required=True)
    loop.keeper.settle()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            loop.keeper.save(Place(step=2), required=True)
            while loop.keeper._writing is not None:
                loop.keeper.poll()
        except CheckpointError as error:
            os._exit(7 if "step 2 cannot be written" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert names(tmp_path) == ["step-000000001"]
    assert Loop(tmp_path, size=100).keeper.saved_step == 1


def test_a_finished_cycle_is_followed_by_a_new_one_that_restores_nothing(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.keeper.save(Place(step=4, cycle=2), required=False)
    loop.keeper.finish(Place(step=4, cycle=2, done=True))
    fresh = Loop(tmp_path, cycle_started=5.0)
    place = fresh.keeper.place
    assert (place.step, place.cycle, place.loop, place.done, place.cycle_started) == (4, 3, 0, False, 5.0)


def test_the_end_of_a_cycle_is_saved_if_its_last_step_was_not(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.step()
    loop.keeper.finish(Place(step=1, done=True))
    assert Loop(tmp_path).keeper.place.cycle == 2


def test_a_run_without_a_directory_keeps_nothing() -> None:
    keeper = Keeper(Job(name="fit"), ALONE, Pace())
    keeper.add(nn.Linear(1, 1), "Linear")
    keeper.save(Place(step=1), required=True)
    assert (keeper.settle(), keeper.poll(), keeper.saved_step) == (None, None, None)
    keeper.finish(Place(step=1, done=True))


def test_wrapping_something_else_than_was_saved_is_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.keeper.save(Place(step=1), required=True)
    loop.keeper.settle()
    keeper = Keeper(Job(name="fit", directory=tmp_path), ALONE)
    with pytest.raises(CheckpointError, match="holds Sequential as wrapped thing 1, the code wraps Linear"):
        keeper.add(nn.Linear(4, 4), "Linear")


def test_a_model_of_another_size_is_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.keeper.save(Place(step=1), required=True)
    loop.keeper.settle()
    with pytest.raises(
        CheckpointError, match=r"cannot be loaded into Sequential: .*size mismatch for 0\.weight"
    ):
        Loop(tmp_path, size=5)


def test_what_a_checkpoint_cannot_hold_is_refused_when_it_is_wrapped(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"here": object()}

    keeper = Keeper(Job(name="fit", directory=tmp_path), ALONE)
    with pytest.raises(
        TwinhullError, match=r"Odd cannot be wrapped: its state\['here'\] is a builtins.object"
    ):
        keeper.add(Odd(), "Odd")


class Engine:
    """Keeps its state in files of its own, as DeepSpeed does."""

    own_files = True

    def __init__(self, text: str) -> None:
        self.text = text

    def save_files(self, directory: Path) -> None:
        (directory / "part").mkdir()
        (directory / "part" / "zero.pt").write_text(self.text)

    def load_files(self, directory: Path) -> None:
        self.text = (directory / "part" / "zero.pt").read_text()


@pytest.mark.parametrize("away", [False, True])
def test_a_thing_with_files_of_its_own_gets_them_back(tmp_path: Path, away: bool) -> None:
    job = Job(name="fit", directory=tmp_path, checkpoints=f"file://{tmp_path}/away" if away else "")
    keeper = Keeper(job, ALONE)
    engine = Engine("weights")
    keeper.add(engine, "Engine")
    keeper.save(Place(step=1), required=True)
    engine.text = "later"
    keeper.settle()
    again, other = Keeper(job, ALONE), Engine("")
    again.add(other, "Engine")
    assert other.text == "weights"


def test_a_flipped_byte_in_files_of_its_own_is_found(tmp_path: Path) -> None:
    keeper = Keeper(Job(name="fit", directory=tmp_path), ALONE)
    keeper.add(Engine("weights"), "Engine")
    keeper.save(Place(step=1), required=True)
    keeper.settle()
    (tmp_path / "checkpoints/fit/step-000000001/own-0/part/zero.pt").write_text("weighti")
    with pytest.raises(CheckpointError, match="none of the 1"):
        Keeper(Job(name="fit", directory=tmp_path), ALONE)


def test_a_stall_in_a_step_is_not_counted_a_second_time_as_slow_down() -> None:
    cost = Cost(Job(name="fit"))
    for _ in range(3):
        cost.stepped(1.0, writing=False)
    cost.stalled(0.25, in_step=False)
    cost.stalled(0.5, in_step=True)
    cost.stepped(1.75, writing=True)
    cost.stepped(1.5, writing=True)
    assert cost.saved(worked=True) == (0.75, 0.75)
    assert cost.cost_s == 1.5


def test_the_automatic_interval_begins_short_and_follows_the_cost() -> None:
    cost = Cost(Job(name="fit", save_auto=True, mtbf_s=20_000.0))
    assert cost.due_s == 30.0
    cost.stalled(1.0, in_step=False)
    cost.saved(worked=True)
    assert cost.due_s == 200.0
    cost.stalled(100.0, in_step=False)
    cost.saved(worked=False)
    assert cost.due_s == 200.0


def test_the_interval_of_the_file_stays_what_it_is() -> None:
    cost = Cost(Job(name="fit", save_every_s=7.0))
    cost.stalled(100.0, in_step=False)
    cost.saved(worked=True)
    assert cost.due_s == 7.0


@pytest.mark.live
@pytest.mark.timeout(90)
def test_any_number_of_ranks_and_any_strategy_load_exactly_what_four_ranks_saved(tmp_path: Path) -> None:
    argv = [sys.executable, "-W", "error", str(APPS / "shards.py"), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "ddp of 4 was loaded by ddp of 1",
        "ddp of 4 was loaded by fsdp of 2",
        "fsdp of 4 was loaded by ddp of 2",
        "fsdp of 4 was loaded by hsdp of 4",
        "hsdp of 4 was loaded by fsdp of 2",
        "a damaged part was refused by 2",
        "files of its own were refused by 2",
        "a failing rank failed the save on 4, which went on",
    ]
