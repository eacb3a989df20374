"""What is on the disk: whole, refused, kept, removed, and whose it is. Saved by a Keeper of one rank."""

import fcntl
import hashlib
import json
import random
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from twinhull.errors import CheckpointError, RunInUse
from twinhull.train.checkpoints.fence import Overtaken
from twinhull.train.checkpoints.keep import Keeper
from twinhull.train.checkpoints.manifest import MANIFEST, STATE, Place
from twinhull.train.checkpoints.remote import Remote
from twinhull.train.checkpoints.restore import read_skeletons, restore
from twinhull.train.checkpoints.skeleton import unfit
from twinhull.train.checkpoints.store import Store
from twinhull.train.group import Group
from twinhull.train.job import Job

ALONE = Group(0, 1, torch.device("cpu"))
FILES = [".metadata", "__0_0.distcp", MANIFEST, STATE]
APPS = Path(__file__).parent / "apps"


class Pair(NamedTuple):
    left: int
    right: int


class Held:
    """Anything with a state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def save(run: Path, step: int, value: Any = None, keep: int = 2, **facts: Any) -> None:
    keeper = Keeper(Job(name="fit", directory=run, keep=keep, **facts), ALONE)
    thing = Held(0)
    keeper.add(thing, "Held")
    thing.value = torch.full((64,), float(step)) if value is None else value
    keeper.save(Place(step=step), required=True)
    keeper.settle()


def store_of(run: Path, url: str = "") -> Store:
    found = Store.of(Job(name="fit", directory=run, keep=2, checkpoints=url))
    assert found is not None
    return found


def value_of(store: Store) -> Any:
    found = store.newest()
    assert found is not None
    thing = Held(None)
    restore(thing, read_skeletons(found.path)[0], found.path)
    return thing.value


def newest_step(store: Store) -> int | None:
    found = store.newest()
    return found.place.step if found else None


def at(run: Path, step: int, file: str = "") -> Path:
    return run / "checkpoints" / "fit" / f"step-{step:09d}" / file


def rewrite(path: Path, **changed: Any) -> None:
    """Change a manifest so that its own hash holds."""
    said = json.loads(path.read_text()) | changed
    del said["sha256"]
    plain = json.dumps(said, sort_keys=True, indent=1).encode()
    said["sha256"] = hashlib.sha256(plain).hexdigest()
    path.write_bytes(json.dumps(said, sort_keys=True, indent=1).encode())


def test_an_empty_directory_has_no_checkpoint(tmp_path: Path) -> None:
    assert store_of(tmp_path).newest() is None
    assert store_of(tmp_path).last_place() is None


def test_the_manifest_says_all_that_is_known(tmp_path: Path) -> None:
    save(tmp_path, 3)
    found = store_of(tmp_path).newest()
    assert found is not None
    assert (found.place.step, found.parts, found.world_size, found.own_files) == (3, ("Held",), 1, False)
    assert (
        sorted([*found.files, MANIFEST]) == sorted(path.name for path in at(tmp_path, 3).iterdir()) == FILES
    )
    assert found.bytes == sum(at(tmp_path, 3, name).stat().st_size for name in found.files)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert store_of(tmp_path).names() == ["step-000000003", "step-000000002"]


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_byte_is_found_wherever_it_is_and_the_one_before_is_taken(
    tmp_path: Path, file: str
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = at(tmp_path, 2, file)
    whole = path.read_bytes()
    chance = random.Random(1)
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        assert newest_step(store_of(tmp_path)) == 1
    path.write_bytes(whole)
    assert newest_step(store_of(tmp_path)) == 2


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["missing", "short", "empty"])
def test_a_half_checkpoint_is_refused(
    tmp_path: Path, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = at(tmp_path, 2, file)
    whole = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(whole[:-1] if damage == "short" else b"")
    assert newest_step(store_of(tmp_path)) == 1
    assert "checkpoint refused" in caplog.messages


def test_an_empty_directory_with_a_checkpoints_name_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    at(tmp_path, 2).mkdir()
    assert newest_step(store_of(tmp_path)) == 1


def test_a_checkpoint_under_another_steps_name_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    at(tmp_path, 1).rename(at(tmp_path, 2))
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        store_of(tmp_path).newest()


def test_when_none_can_be_trusted_the_run_does_not_begin_again_by_itself(tmp_path: Path) -> None:
    save(tmp_path, 1)
    at(tmp_path, 1, STATE).unlink()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        save(tmp_path, 2)


def test_retention_removes_what_was_refused_and_never_what_verified(tmp_path: Path) -> None:
    save(tmp_path, 1, keep=1)
    save(tmp_path, 3, keep=2)
    at(tmp_path, 3, STATE).write_bytes(b"")
    save(tmp_path, 2, keep=1)
    assert store_of(tmp_path).names() == ["step-000000002"]
    assert value_of(store_of(tmp_path))[0] == 2


def test_a_refused_checkpoint_is_replaced_when_its_step_is_reached_again(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    at(tmp_path, 2, STATE).write_bytes(b"")
    save(tmp_path, 2)
    assert newest_step(store_of(tmp_path)) == 2


def test_a_step_that_was_saved_before_can_be_saved_again(tmp_path: Path, url: str) -> None:
    for where in ("", url):
        save(tmp_path, 2, torch.ones(1), checkpoints=where)
        save(tmp_path, 2, torch.zeros(1), checkpoints=where)
        assert value_of(store_of(tmp_path, where)).item() == 0
        assert store_of(tmp_path, where).names() == ["step-000000002"]


def test_a_newer_format_is_refused_with_the_version_that_wrote_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    rewrite(at(tmp_path, 1, MANIFEST), format=9, written_by="7.1")
    with pytest.raises(CheckpointError, match=r"format 9 .* reads up to 2.*7\.1"):
        store_of(tmp_path).newest()


def test_the_first_format_can_still_be_read(tmp_path: Path) -> None:
    """Its whole state is in state.pt, and the manifest knew fewer things."""
    at(tmp_path, 5).mkdir(parents=True)
    torch.save([{"value": torch.arange(3)}], at(tmp_path, 5, STATE))
    content = at(tmp_path, 5, STATE).read_bytes()
    files = {STATE: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    place = {
        "step": 5,
        "cycle": 2,
        "loop": 1,
        "passing": None,
        "events": {},
        "cycle_started": 1.0,
        "done": False,
    }
    said = {
        "format": 1, "written_by": "0.1", "place": place, "parts": ["Held"], "world_size": 2, "saved_at": 1.0,
        "files": files, "sha256": "",
    }  # fmt: skip
    at(tmp_path, 5, MANIFEST).write_text(json.dumps(said))
    rewrite(at(tmp_path, 5, MANIFEST))
    thing = Held(None)
    keeper = Keeper(Job(name="fit", directory=tmp_path), ALONE)
    keeper.add(thing, "Held")
    assert (keeper.place.step, keeper.place.cycle, thing.value.tolist()) == (5, 2, [0, 1, 2])


def test_done_is_marked_without_writing_the_state_again(tmp_path: Path) -> None:
    save(tmp_path, 1)
    store = store_of(tmp_path)
    found = store.newest()
    assert found is not None
    before = at(tmp_path, 1, "__0_0.distcp").stat()
    store.change(found, Place(step=1, done=True))
    again = store.newest()
    assert again is not None
    assert again.place.done
    assert at(tmp_path, 1, "__0_0.distcp").stat() == before
    assert sorted(path.name for path in at(tmp_path, 1).iterdir()) == FILES


def test_an_overtaken_generation_can_neither_start_nor_commit_nor_mark_the_end(tmp_path: Path) -> None:
    save(tmp_path, 1, generation=3)
    keeper = Keeper(Job(name="fit", directory=tmp_path, generation=3), ALONE)
    keeper.add(Held(1), "Held")
    store_of(tmp_path).claim(4)
    with pytest.raises(Overtaken, match="generation 3 was overtaken by generation 4"):
        keeper.finish(Place(step=1, done=True))
    keeper.save(Place(step=2), required=False)
    with pytest.raises(Overtaken):
        keeper.settle()
    with pytest.raises(Overtaken):
        Keeper(Job(name="fit", directory=tmp_path, generation=3), ALONE)
    place = store_of(tmp_path).last_place()
    assert place is not None
    assert (place.step, place.done) == (1, False)


def test_the_newest_generation_and_a_run_without_one_may_commit(tmp_path: Path) -> None:
    store_of(tmp_path).claim(4)
    save(tmp_path, 1, generation=4)
    save(tmp_path, 2, generation=5)
    save(tmp_path, 3)
    assert store_of(tmp_path).claimed() == 4
    assert newest_step(store_of(tmp_path)) == 3


def test_no_generation_can_claim_what_a_newer_one_has(tmp_path: Path) -> None:
    store_of(tmp_path).claim(4)
    with pytest.raises(Overtaken):
        store_of(tmp_path).claim(3)


def test_a_second_launcher_is_kept_away_as_long_as_the_first_lives(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    with store.held(), pytest.raises(RunInUse, match="another run"), store_of(tmp_path).held():
        pass
    with store_of(tmp_path).held(), (store.root / "lock").open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/away" if request.param == "file" else f"memory://{tmp_path.name}/away"


def test_checkpoints_can_be_kept_behind_a_url(tmp_path: Path, url: str) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, checkpoints=url)
    store = store_of(tmp_path, url)
    assert store.names() == ["step-000000003", "step-000000002"]
    assert list(store.root.glob("step-*")) == []
    assert value_of(store).tolist() == [3.0] * 64


@pytest.mark.parametrize("file", FILES)
def test_what_came_damaged_over_the_url_is_refused(tmp_path: Path, url: str, file: str) -> None:
    save(tmp_path, 1, checkpoints=url)
    save(tmp_path, 2, checkpoints=url)
    remote = Remote(f"{url}/fit")
    content = remote.read("step-000000002", file)
    remote.write("step-000000002", file, content[:-1] + bytes([content[-1] ^ 1]))
    assert newest_step(store_of(tmp_path, url)) == 1


def test_a_directory_without_a_manifest_behind_the_url_is_no_checkpoint_and_goes(
    tmp_path: Path, url: str
) -> None:
    save(tmp_path, 1, checkpoints=url)
    remote = Remote(f"{url}/fit")
    remote.write("step-000000002", "__0_0.distcp", b"half")
    assert store_of(tmp_path, url).names() == ["step-000000001"]
    save(tmp_path, 3, checkpoints=url)
    assert remote.find("step-000000002", "__0_0.distcp") is None


def test_the_end_of_a_cycle_is_marked_behind_the_url(tmp_path: Path, url: str) -> None:
    save(tmp_path, 1, checkpoints=url)
    keeper = Keeper(Job(name="fit", directory=tmp_path, checkpoints=url), ALONE)
    keeper.add(Held(1), "Held")
    keeper.finish(Place(step=1, done=True))
    place = store_of(tmp_path, url).last_place()
    assert place is not None
    assert place.done


def test_generations_are_fenced_behind_the_url_too(tmp_path: Path, url: str) -> None:
    store_of(tmp_path / "launcher", url).claim(2)
    with pytest.raises(Overtaken):
        save(tmp_path / "rank", 1, checkpoints=url, generation=1)


def test_what_was_saved_before_there_was_a_url_is_still_found(tmp_path: Path, url: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, checkpoints=url)
    assert value_of(store_of(tmp_path, url))[0] == 2


@pytest.mark.parametrize("wrong", ["nonsense://x", "s3://bucket/x"])
def test_a_url_that_nothing_here_can_reach_is_one_clear_error(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(CheckpointError, match="checkpoints cannot be kept in"):
        save(tmp_path, 1, checkpoints=wrong)


@pytest.mark.live
@pytest.mark.timeout(90)
def test_a_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    argv = [sys.executable, str(APPS / "dies_saving.py"), str(tmp_path)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len([outcome for outcome in outcomes if outcome["ranks"] == 1]) > 20
    assert {outcome["step"] for outcome in outcomes} == {1, 2}
    assert [outcome for outcome in outcomes if outcome["ranks"] == 2 and outcome["killed"]]
    for outcome in outcomes:
        assert outcome["killed"] or outcome["step"] == 2
        assert outcome["weight"] == outcome["step"]
        assert not [name for name in outcome["left"] if name.endswith(".tmp")]


@pytest.mark.parametrize(
    "value",
    [1, 1.5, True, None, "x", b"x", {1, 2}, [1, (2, {"a": "b"})], OrderedDict(a=1), {1: 2, "1": 3}],
)
def test_plain_state_comes_back_as_it_was(value: object, tmp_path: Path) -> None:
    assert not list(unfit({"value": value}, "state"))
    save(tmp_path, 1, [value, None])
    assert value_of(store_of(tmp_path)) == [value, None]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).T,
        torch.zeros(0, 3),
        torch.tensor(1.5),
        torch.ones(4, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.ones(3).expand(2, 3),
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_every_kind_of_tensor_comes_back_as_it_was(tensor: torch.Tensor, tmp_path: Path) -> None:
    save(tmp_path, 1, {"a": tensor, "b": (tensor,)})
    found = value_of(store_of(tmp_path))
    torch.testing.assert_close(found["a"], tensor.detach(), rtol=0, atol=0)
    torch.testing.assert_close(found["b"][0], tensor.detach(), rtol=0, atol=0)


def test_names_that_look_alike_are_told_apart(tmp_path: Path) -> None:
    save(
        tmp_path, 1, {1: torch.ones(1), "1": torch.zeros(1), "a/b": torch.ones(2), "a": {"b": torch.zeros(2)}}
    )
    found = value_of(store_of(tmp_path))
    assert (found[1].item(), found["1"].item(), found["a/b"].sum(), found["a"]["b"].sum()) == (1, 0, 2, 0)


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(1),
        np.float64(1.0),
        object(),
        [lambda: None],
        Pair(1, 2),
    ],
)
def test_state_that_could_not_be_loaded_again_is_found_before_it_is_saved(value: object) -> None:
    assert list(unfit({"value": value}, "state"))
