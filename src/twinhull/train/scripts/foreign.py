"""Which model has a script left, and is it one? Found in its directory, read, looked at, published.

safetensors (`model.safetensors`, or shards with or without an index), else a state dict of PyTorch (`.bin`,
`.pt`, `.pth`, or Lightning's `.ckpt` with its "state_dict"), which is read without running code from it.
"""

import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinhull.errors import TwinhullError
from twinhull.handoff.registry import Registry
from twinhull.train import beam
from twinhull.train.scripts import whole

Tensors = dict[str, Any]  # Any: arrays of numpy or tensors of PyTorch
_INDEX, _SAFE, _TORCH = ".safetensors.index.json", ".safetensors", (".bin", ".pt", ".pth", ".ckpt")
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.")
log = logging.getLogger(__name__)


class NoModel(TwinhullError):
    """Raised when a script has ended well and left no model that could be published."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Before:
    """What lay in a script's directory before it was started: a former run's result is not this one's."""

    directory: Path
    files: Mapping[str, tuple[int, int, int]]

    @classmethod
    def look(cls, directory: Path) -> "Before":
        """The files of this moment."""
        return cls(directory, _files(directory))

    def changed(self) -> set[str]:
        """The files that were written since."""
        return {name for name, facts in _files(self.directory).items() if self.files.get(name) != facts}


def model_in(before: Before) -> Tensors:
    """The model that a script has left since then. Raises NoModel."""
    new = before.changed()
    paths = _chosen(before, new)
    tensors = _safe(paths) if paths[0].suffix == _SAFE else _of_torch(paths[0])
    if not tensors:
        raise NoModel(f"{paths[0]} holds no tensor.")
    for name, value in tensors.items():
        if _has_nan(value):
            raise NoModel(
                f"tensor {name} in {paths[0].parent} holds NaN: a model that diverged is not published.",
                hint="Remove the checkpoints of the last steps, or train with a smaller learning rate.",
            )
    return tensors


def publish(
    registry: Registry, model: str, tensors: Tensors, *, cycle: int, keep: int | None, system: str
) -> None:
    """Publish once a cycle, and tell serving, which may be away. Raises TwinhullError."""
    version = registry.publish(model, tensors, metrics={}, made_by={"train": model, "cycle": cycle})
    if keep is not None:
        registry.prune(model, keep)
    beam.announce(system, model, version.number)


def _files(directory: Path) -> dict[str, tuple[int, int, int]]:
    found: dict[str, tuple[int, int, int]] = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.is_file():
            facts = path.stat()
            found[path.name] = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
    return found


def _chosen(before: Before, new: Collection[str]) -> list[Path]:
    """The files that make up the model. Raises NoModel."""
    where = before.directory
    indices = sorted(name for name in new if name.endswith(_INDEX))
    if indices:
        said = json.loads((where / indices[0]).read_text(encoding="utf-8"))
        names = sorted(set(said["weight_map"].values()))
        if missing := [name for name in names if name not in new]:
            raise NoModel(f"{where / indices[0]} names {missing[0]}, which the command has not written.")
        return [where / name for name in names]
    if safe := sorted(name for name in new if name.endswith(_SAFE)):
        _check_shards(where, safe)
        return [where / name for name in safe]
    torch = sorted(name for name in new if name.endswith(_TORCH) and name != "training_args.bin")
    if len(torch) > 1:
        raise NoModel(f"{where} holds several models: {', '.join(torch[:5])}.",
                      hint="Save the one to publish into a directory of its own.")  # fmt: skip
    if torch:
        return [where / torch[0]]
    stale = " since it was started: what lies there is of a former run" if before.files else ""
    raise NoModel(
        f"the command has left no model in {where}{stale}.",
        hint="Save model.safetensors or a state dict (.pt, .bin, .ckpt) there, or leave publish out.",
    )


def _check_shards(where: Path, names: list[str]) -> None:
    """All of as many as their names say."""
    shards = [match for name in names if (match := _SHARD.search(name))]
    if shards and len(shards) < int(shards[0][2]):
        raise NoModel(f"{where} holds {len(shards)} of {int(shards[0][2])} new shards: a part is missing.")


def _safe(paths: list[Path]) -> Tensors:
    tensors: Tensors = {}
    for path in paths:
        if whole.look(path) != "whole":
            raise NoModel(f"{path} is cut short.", hint="Let the command end only when it is written.")
        part = _read_safe(path)
        if twice := sorted(tensors.keys() & part.keys()):
            names = ", ".join(one.name for one in paths)
            raise NoModel(f"{twice[0]} is in several files of {path.parent}: {names}.",
                          hint="Save one model there.")  # fmt: skip
        tensors |= part
    return tensors


def _read_safe(path: Path) -> Tensors:
    """With numpy where it knows the types, else with PyTorch, which is slow to import."""
    kinds = {str(part.get("dtype")) for part in whole.safetensors_header(path).values()}
    if any(kind.startswith(("BF", "F8")) for kind in kinds):
        from safetensors.torch import load_file

        return dict(load_file(path))
    from safetensors.numpy import load_file as load_arrays

    return dict(load_arrays(path))


def _of_torch(path: Path) -> Tensors:
    import pickle

    import torch

    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise NoModel(
            f"{path} cannot be read as tensors alone: {str(error).splitlines()[0]}",
            hint="Save model.state_dict(); with Lightning trainer.save_checkpoint(path, weights_only=True).",
        ) from error
    if isinstance(held, dict) and isinstance(held.get("state_dict"), dict):
        held = held["state_dict"]
    if not isinstance(held, dict):
        raise NoModel(f"{path} holds a {type(held).__name__}, not a state dict.")
    tensors = {str(name): value for name, value in held.items() if isinstance(value, torch.Tensor)}
    if left_out := sorted(str(name) for name in held if str(name) not in tensors):
        log.warning("not published", extra={"file": str(path), "not_tensors": left_out[:20]})
    return tensors


def _has_nan(value: Any) -> bool:  # Any: as in Tensors
    """NaN is never meant; infinite is, in masks."""
    if hasattr(value, "detach"):
        return bool(value.is_floating_point() and value.isnan().any())
    return bool(value.dtype.kind == "f" and (value != value).any())  # noqa: PLR0124  # only NaN differs
