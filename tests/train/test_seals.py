"""What a script has left when it died, by hand: which of it is trusted, which is moved aside."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from twinhull.train.scripts import whole
from twinhull.train.scripts.entries import entries, step_of
from twinhull.train.scripts.seals import SETTLE_S, Checkpoints


def checkpoint(root: Path, step: int, *files: str) -> Path:
    """A directory as a trainer leaves it: state in a zip, weights in safetensors, numbers in JSON."""
    path = root / f"checkpoint-{step}"
    path.mkdir(parents=True)
    np.savez(path / "optimizer.npz", step=np.full(100, step))
    save_file({"weight": np.full(100, step)}, path / "model.safetensors")
    (path / "state.json").write_text(json.dumps({"step": step}))
    for file in files:
        (path / file).write_text(file)
    return path


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def settled(root: Path, *, well: bool = False) -> Path | None:
    found = Checkpoints(root)
    found.settle(well=well)
    return found.newest()


def test_a_directory_is_trusted_if_it_has_the_same_whole_files_as_the_one_before(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    assert settled(tmp_path, well=True) == tmp_path / "checkpoint-5"
    checkpoint(tmp_path, 10)
    assert settled(tmp_path) == tmp_path / "checkpoint-10"


@pytest.mark.parametrize("file", ["optimizer.npz", "model.safetensors", "state.json"])
@pytest.mark.parametrize("harm", [cut, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_directory_with_a_file_cut_missing_or_empty_is_moved_aside(file: str, harm, tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    settled(tmp_path, well=True)
    harm(checkpoint(tmp_path, 10) / file)
    assert settled(tmp_path) == tmp_path / "checkpoint-5"
    assert names(tmp_path) == ["checkpoint-10.torn", "checkpoint-5"]


def test_a_file_that_says_nothing_of_itself_is_trusted_only_if_it_is_the_same_as_before(
    tmp_path: Path,
) -> None:
    checkpoint(tmp_path, 5, "vocab.txt")
    settled(tmp_path, well=True)
    checkpoint(tmp_path, 10, "vocab.txt")
    assert settled(tmp_path) == tmp_path / "checkpoint-10"
    (checkpoint(tmp_path, 15, "vocab.txt") / "vocab.txt").write_text("another")
    assert settled(tmp_path) == tmp_path / "checkpoint-10"


def test_the_first_directory_of_a_killed_script_is_trusted_only_with_what_comes_last(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    assert settled(tmp_path) is None
    checkpoint(tmp_path, 5, "trainer_state.json")
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text("{}")
    assert settled(tmp_path) == tmp_path / "checkpoint-5"


def test_a_single_file_proves_itself_by_its_format(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for step in (5, 10):
        torch.save({"weight": torch.full((1000,), step)}, tmp_path / f"epoch=0-step={step}.ckpt")
    with (tmp_path / "epoch=0-step=10.ckpt").open("r+b") as file:
        file.seek(2000)
        file.write(b"x")
    assert settled(tmp_path) == tmp_path / "epoch=0-step=5.ckpt"
    assert names(tmp_path) == ["epoch=0-step=10.ckpt.torn", "epoch=0-step=5.ckpt"]


def test_a_flipped_byte_under_a_seal_is_found_though_its_file_looks_whole(tmp_path: Path) -> None:
    for step in (5, 10):
        save_file({"weight": np.full(100, step)}, tmp_path / f"step-{step}.safetensors")
    settled(tmp_path, well=True)
    path = tmp_path / "step-10.safetensors"
    data, times = bytearray(path.read_bytes()), path.stat()
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert whole.look(path) == "whole"
    assert settled(tmp_path) == tmp_path / "step-5.safetensors"


def test_what_was_sealed_and_copied_elsewhere_stays_trusted(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    path.write_bytes(b"a pickle, for all that is known")
    assert settled(tmp_path, well=True) == path
    os.utime(path, ns=(1, 1))
    assert settled(tmp_path) == path


def test_a_checkpoint_is_sealed_while_the_script_lives_once_a_newer_one_is_there(tmp_path: Path) -> None:
    found = Checkpoints(tmp_path)
    checkpoint(tmp_path, 5, "opaque")
    now = time.monotonic()
    assert found.look(now)
    assert not found.look(now)
    found.look(now)
    checkpoint(tmp_path, 10, "opaque")
    assert found.look(now)
    found.settle(well=False)
    assert found.seal("checkpoint-5") is not None
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-5"]  # its opaque file is as it was


def test_or_once_it_has_been_left_alone_while_the_script_beat_on(tmp_path: Path) -> None:
    found = Checkpoints(tmp_path)
    checkpoint(tmp_path, 5)
    found.look(time.monotonic())
    found.look(time.monotonic() + SETTLE_S)
    found.settle(well=False)
    assert found.newest() == tmp_path / "checkpoint-5"


def test_only_one_torn_checkpoint_is_kept(tmp_path: Path) -> None:
    for step in (5, 10):
        (tmp_path / f"step-{step}.json").write_text("{")
        assert settled(tmp_path) is None
    assert names(tmp_path) == ["step-10.json.torn"]


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    for name in (
        "config.json",
        "events.out.tfevents.17.host.0",
        "model-00001-of-00002.safetensors",
        "a.torn",
    ):
        (tmp_path / name).write_text("{")
    (tmp_path / "runs").mkdir()
    (tmp_path / "tmp-checkpoint-5").mkdir()
    (tmp_path / "last.ckpt").symlink_to("config.json")
    before = names(tmp_path)
    assert settled(tmp_path) is None
    assert names(tmp_path) == before
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "step"),
    [("checkpoint-40", 40), ("epoch=3-step=80.ckpt", 80), ("step_7-loss=0.25.ckpt", 7), ("last.ckpt", None)],
)
def test_a_name_tells_the_step(name: str, step: int | None) -> None:
    assert step_of(name) == step
