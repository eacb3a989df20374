import json
import os
import random
import signal
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from twinhull.errors import CheckpointError
from twinhull.train.checkpoint import MANIFEST, STATE, Place, Store, unfit


def save(store: Store, step: int, value: float | None = None) -> None:
    state = {"weight": torch.full((64,), float(step if value is None else value))}
    store.save(Place(step=step), ("Net",), [state], world_size=2)


def names(store: Store) -> list[str]:
    return sorted(path.name for path in store.root.iterdir())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "fit", keep=2)


def newest_step(store: Store) -> int | None:
    found = store.newest()
    return found.place.step if found else None


def test_what_is_saved_comes_back(store: Store) -> None:
    place = Place(
        step=3, cycle=2, loop=1, passing={"epoch": 1}, events={"sales": {"index": 7}}, cycle_started=5.0
    )
    store.save(place, ("Net",), [{"weight": torch.arange(3)}], world_size=4)
    found = store.newest()
    assert found is not None
    assert (found.place, found.parts, found.world_size) == (place, ("Net",), 4)
    assert store.load(found)[0]["weight"].tolist() == [0, 1, 2]


def test_an_empty_directory_has_no_checkpoint(store: Store) -> None:
    assert store.newest() is None
    assert store.last_place() is None


def test_only_the_newest_are_kept(store: Store) -> None:
    for step in (1, 2, 3):
        save(store, step)
    assert names(store) == ["step-000000002", "step-000000003"]


@pytest.mark.parametrize("file", [STATE, MANIFEST])
def test_a_flipped_byte_is_found_wherever_it_is_and_the_one_before_is_taken(store: Store, file: str) -> None:
    save(store, 1)
    save(store, 2)
    path = store.root / "step-000000002" / file
    whole = path.read_bytes()
    chance = random.Random(1)
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        assert newest_step(store) == 1
    path.write_bytes(whole)
    assert newest_step(store) == 2


@pytest.mark.parametrize("file", [STATE, MANIFEST])
@pytest.mark.parametrize("damage", ["missing", "short", "empty"])
def test_a_half_checkpoint_is_refused(
    store: Store, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 1)
    save(store, 2)
    path = store.root / "step-000000002" / file
    whole = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(whole[:-1] if damage == "short" else b"")
    assert newest_step(store) == 1
    assert "checkpoint refused" in caplog.messages


def test_when_none_can_be_trusted_the_run_does_not_begin_again_by_itself(store: Store) -> None:
    save(store, 1)
    (store.root / "step-000000001" / STATE).unlink()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        store.newest()


def test_retention_never_removes_the_one_that_verified(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=1)
    save(store, 2)
    (tmp_path / "step-000000002" / STATE).write_bytes(b"")
    store.save(Place(step=1), ("Net",), [{}], world_size=1)
    assert newest_step(store) == 1
    assert names(store) == ["step-000000001"]


def test_a_refused_checkpoint_is_replaced_when_its_step_is_reached_again(store: Store) -> None:
    save(store, 1)
    save(store, 2)
    (store.root / "step-000000002" / STATE).write_bytes(b"")
    save(store, 2)
    assert newest_step(store) == 2


def test_a_newer_format_is_refused_with_the_version_that_wrote_it(store: Store) -> None:
    from twinhull.train import checkpoint

    save(store, 1)
    path = store.root / "step-000000001" / MANIFEST
    said = json.loads(path.read_text()) | {"format": 9, "written_by": "7.1"}
    del said["sha256"]
    path.write_bytes(checkpoint._encoded({**said, "sha256": checkpoint._digest(said)}))
    with pytest.raises(CheckpointError, match=r"format 9 .* reads up to 1.*7\.1"):
        store.newest()


def test_done_is_marked_without_writing_the_state_again(store: Store) -> None:
    save(store, 1)
    found = store.newest()
    assert found is not None
    store.change(found, Place(step=1, done=True))
    again = store.newest()
    assert again is not None
    assert again.place.done
    assert names(store) == ["step-000000001"]


def test_a_full_disk_is_one_clear_error_and_the_one_before_stays(tmp_path: Path) -> None:
    """A file-size limit makes the kernel refuse the write, as a full disk does."""
    store = Store(tmp_path)
    save(store, 1)
    pid = os.fork()
    if pid == 0:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
        try:
            save(store, 2)
        except CheckpointError as error:
            os._exit(7 if "step 2 cannot be written" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert names(store) == ["step-000000001"]
    assert newest_step(store) == 1


@pytest.mark.live
@pytest.mark.timeout(60)
def test_a_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    argv = [sys.executable, str(Path(__file__).parent / "apps" / "dies_saving.py"), str(tmp_path)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    outcomes = [line.split() for line in done.stdout.splitlines()]
    assert len(outcomes) > 8
    assert [killed for killed, *_ in outcomes] == ["True"] * (len(outcomes) - 1) + ["False"]
    assert {step for _, step, *_ in outcomes} == {"1", "2"}
    for _, step, weight, *left in outcomes:
        assert float(weight) == float(step)
        assert f"step-{int(step):09d}" in left
        assert not [name for name in left if name.endswith(".tmp")]


@pytest.mark.parametrize(
    "value", [torch.zeros(1), 1, 1.5, True, None, "x", b"x", [1, (2, {"a": torch.ones(1)})]]
)
def test_plain_state_can_be_kept(value: object, store: Store) -> None:
    assert not list(unfit({"value": value}, "state"))
    found = store.save(Place(step=1), ("Mine",), [OrderedDict(value=value)], world_size=1)
    assert store.load(found)


@pytest.mark.parametrize("value", [np.zeros(1), np.float64(1.0), object(), [lambda: None]])
def test_state_that_could_not_be_loaded_again_is_found_before_it_is_saved(value: object) -> None:
    assert list(unfit({"value": value}, "state"))
