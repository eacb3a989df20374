"""Models that scripts leave, in all the ways in which they do."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from twinhull.handoff.registry import Registry
from twinhull.train.scripts.foreign import Before, NoModel, model_in, publish

ONE, TWO = np.ones(4, np.float32), np.full(4, 2.0, np.float32)


def left_by(write: Callable[[Path], object], directory: Path) -> dict[str, list[float]]:
    before = Before.look(directory)
    directory.mkdir(exist_ok=True)
    write(directory)
    return {name: value.tolist() for name, value in model_in(before).items()}


def sharded(directory: Path) -> None:
    save_file({"a": ONE}, directory / "model-00001-of-00002.safetensors")
    save_file({"b": TWO}, directory / "model-00002-of-00002.safetensors")


def indexed(directory: Path) -> None:
    sharded(directory)
    save_file({"c": ONE}, directory / "adapter.safetensors")
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


BOTH = {"a": [1.0] * 4, "b": [2.0] * 4}
STATE = {"a": torch.ones(4), "b": torch.full((4,), 2.0)}


@pytest.mark.parametrize(
    "write",
    [
        lambda out: save_file({"a": ONE, "b": TWO}, out / "model.safetensors"),
        sharded,
        indexed,
        lambda out: save_torch_file({k: v.bfloat16() for k, v in STATE.items()}, out / "m.safetensors"),
        lambda out: torch.save(STATE, out / "pytorch_model.bin"),
        lambda out: torch.save({"state_dict": STATE, "epoch": 3}, out / "last.ckpt"),
        lambda out: torch.save({**STATE, "step": 5}, out / "model.pt"),
    ],
)
def test_a_model_is_found_whatever_its_format(write: Callable[[Path], object], tmp_path: Path) -> None:
    assert left_by(write, tmp_path / "out") == BOTH


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda out: (out / "notes.txt").touch(), "the command has left no model in"),
        (lambda out: save_file({"a": ONE}, out / "m-00001-of-00002.safetensors"), "holds 1 of 2 new shards"),
        (
            lambda out: [save_file({"a": ONE}, out / f"{n}.safetensors") for n in "xy"],
            "a is in several files",
        ),
        (lambda out: [torch.save(STATE, out / f"{n}.pt") for n in "xy"], "holds several models: x.pt, y.pt"),
        (lambda out: save_file({"a": ONE * np.nan}, out / "m.safetensors"), "tensor a in"),
        (lambda out: (out / "m.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}"), "is cut short"),
        (lambda out: torch.save(torch.nn.Linear(1, 1), out / "m.pt"), "cannot be read as tensors alone"),
        (lambda out: torch.save([1], out / "m.pt"), "holds a list, not a state dict"),
        (lambda out: torch.save({"epoch": 1}, out / "m.ckpt"), "holds no tensor"),
    ],
)
def test_what_is_no_model_is_refused_and_says_why(
    write: Callable[[Path], object], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(NoModel, match=problem) as caught:
        left_by(write, tmp_path / "out")
    assert caught.value.exit_code == 1


def test_a_shard_of_a_former_run_does_not_complete_a_model(tmp_path: Path) -> None:
    sharded(tmp_path)
    with pytest.raises(NoModel, match="holds 1 of 2 new shards"):
        left_by(lambda out: save_file({"a": TWO}, out / "model-00001-of-00002.safetensors"), tmp_path)


def test_a_cycle_is_published_once_and_old_versions_go(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    for cycle in (1, 1, 2, 3):
        publish(registry, "fit", {"a": ONE * cycle}, cycle=cycle, keep=2, system="shop")
    assert [version.made_by for version in registry.versions("fit")] == [
        {"train": "fit", "cycle": 2},
        {"train": "fit", "cycle": 3},
    ]
