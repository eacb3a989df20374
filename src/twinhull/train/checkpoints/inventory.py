"""Which checkpoints are there, are they whole, which can go? For `twinhull checkpoints`, without torch."""

import json
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from twinhull.errors import CheckpointError, TwinhullError
from twinhull.rundir import RunDirectory, default_for
from twinhull.train.checkpoints.manifest import Checkpoint, Refused
from twinhull.train.checkpoints.remote import Remote
from twinhull.train.checkpoints.store import Store
from twinhull.units import BYTES, SECONDS

Action = Literal["ls", "verify", "prune"]
Format = Literal["text", "json"]
_PATIENCE_S = 2.0  # a longer silence would look like a hang


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint of a workload. `checkpoint` is None if its manifest cannot be trusted.

    `problems` are `FILE: reason`; none says that it is whole, as far as was looked.
    """

    train: str
    name: str
    checkpoint: Checkpoint | None
    problems: tuple[str, ...]
    removed: bool = False


def main(
    action: Action, file: Path | None, *, run: Path | None, train: str | None, keep: int | None, fmt: Format
) -> int:
    """Do what the verb says and print it; 1 if `verify` has found damage."""
    if action == "prune" and (keep is None or keep < 1):
        raise TwinhullError("prune needs to know how many may stay.", hint="Give --keep N, at least 1.")
    found: list[Found] = []
    with tempfile.TemporaryDirectory() as aside:
        for name, store in _stores(file, run, train, Path(aside)).items():
            if action == "prune":
                found += _pruned(name, store, keep or 1)
                continue
            look = _looked_at if action == "ls" else _verified
            seen = [look(name, store, which) for which in store.names()]
            left = store.names()  # a run at work removes old ones meanwhile
            found += [one for one in seen if one.name in left]
    _print(action, found, fmt)
    return 1 if action == "verify" and any(one.problems for one in found) else 0


def _stores(file: Path | None, run: Path | None, train: str | None, aside: Path) -> dict[str, Store]:
    """Where each training workload keeps its checkpoints; those behind a URL come through `aside`."""
    from twinhull.system.load import load

    if run is None and file is None:
        raise TwinhullError("whose checkpoints?", hint="Give the system file, or --run DIR.")
    directory = RunDirectory(run) if run else default_for(file, load(file).system.name) if file else None
    assert directory is not None
    described = directory.system if directory.system.exists() else file
    urls = _urls(described) if described else {}
    names = set(urls) | {path.name for path in _directories(directory.checkpoints)}
    if train is not None and train not in names:
        known = ", ".join(sorted(names)) or "none"
        raise TwinhullError(
            f"there is no training workload {train} in {directory.root}.", hint=f"Known: {known}."
        )
    stores: dict[str, Store] = {}
    for name in sorted(names if train is None else {train}):
        remote = Remote(f"{urls[name].rstrip('/')}/{name}") if urls.get(name) else None
        away = remote is not None and bool(remote.names())
        stores[name] = Store(aside / name, remote=remote) if away else Store(directory.checkpoints / name)
    return stores


def _urls(file: Path) -> dict[str, str]:
    from twinhull.system.load import load
    from twinhull.system.model import State, Train

    components = load(file).system.components
    urls: dict[str, str] = {}
    for name, part in components.items():
        if isinstance(part, Train):
            kept_in = components.get((part.checkpoint.to if part.checkpoint else None) or "")
            urls[name] = (kept_in.url if isinstance(kept_in, State) else None) or ""
    return urls


def _directories(path: Path) -> list[Path]:
    return [one for one in path.iterdir() if one.is_dir()] if path.is_dir() else []


def _looked_at(train: str, store: Store, name: str) -> Found:
    """What the manifest says, and whether all files are there in their size."""
    try:
        checkpoint = store.described(name)
    except Refused as refused:
        return Found(train, name, None, (str(refused),))
    sizes = {file: store.size(name, file) for file in checkpoint.files}
    problems = [
        f"{file} is missing"
        if sizes[file] is None
        else f"{file} has {sizes[file]} bytes instead of {facts['bytes']}"
        for file, facts in checkpoint.files.items()
        if sizes[file] != facts["bytes"]
    ]
    return Found(train, name, checkpoint, tuple(problems))


def _verified(train: str, store: Store, name: str) -> Found:
    """The same after reading every file."""
    try:
        checkpoint = store.described(name)
    except (Refused, CheckpointError) as refused:
        return Found(train, name, None, (str(refused),))
    problems: list[str] = []
    with _progress(f"{train} {name}", len(checkpoint.files)) as tell:
        for index in range(len(checkpoint.files)):
            tell(index)
            try:
                store.verified(name, index, len(checkpoint.files))
            except Refused as refused:
                problems.append(str(refused))
    return Found(train, name, checkpoint, tuple(problems))


def _pruned(train: str, store: Store, keep: int) -> list[Found]:
    """Remove all but the newest `keep`; the newest that verifies stays in any case."""
    names = store.names()
    kept = set(names[:keep])
    for name in names:
        if not _verified(train, store, name).problems:
            kept.add(name)
            break
    removed = [name for name in names if name not in kept]
    for name in removed:
        store.remove(name)
    return [Found(train, name, None, (), removed=name in removed) for name in names]


@contextmanager
def _progress(what: str, total: int) -> Generator[Any]:  # Any: a function of the number that is done
    """A line on stderr that says how far it is, once it takes long."""
    began, shown = time.monotonic(), False

    def tell(done: int) -> None:
        nonlocal shown
        if time.monotonic() - began > _PATIENCE_S:
            shown = True
            print(f"\r{what}: {done} of {total} files", end="", file=sys.stderr, flush=True)

    yield tell
    if shown:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _print(action: Action, found: list[Found], fmt: Format) -> None:
    if fmt == "json":
        print(json.dumps([_facts(action, one) for one in found]))
        return
    if action == "prune":
        for one in found:
            print(f"{one.train} {one.name}: {'removed' if one.removed else 'stays'}")
    elif found:
        rows = [("train", "step", "cycle", "age", "size", "ranks", "took", "whole"), *map(_row, found)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
            print("  ".join(cells).rstrip())
    if not found:
        print("There are no checkpoints.")


def _row(one: Found) -> tuple[str, ...]:
    whole = "; ".join(one.problems) or "yes"
    checkpoint = one.checkpoint
    if checkpoint is None:
        return (one.train, one.name.removeprefix("step-").lstrip("0"), "", "", "", "", "", whole)
    place = checkpoint.place
    cycle = f"{place.cycle}{' done' if place.done else ''}"
    age = SECONDS.show(_short(max(0.0, time.time() - checkpoint.saved_at)))
    took = SECONDS.show(_short(checkpoint.took_s)) if checkpoint.took_s else ""
    size = BYTES.show(_short(checkpoint.bytes))
    return one.train, str(place.step), cycle, age, size, str(checkpoint.world_size), took, whole


def _short(number: float) -> float:
    return float(f"{number:.2g}")


def _facts(action: Action, one: Found) -> dict[str, Any]:  # Any: JSON
    facts: dict[str, Any] = {"train": one.train, "name": one.name}
    if action == "prune":
        return facts | {"removed": one.removed}
    if one.checkpoint is not None:
        checkpoint = one.checkpoint
        facts |= {
            "step": checkpoint.place.step,
            "cycle": checkpoint.place.cycle,
            "done": checkpoint.place.done,
            "saved_at": checkpoint.saved_at,
            "bytes": checkpoint.bytes,
            "ranks": checkpoint.world_size,
            "took_s": checkpoint.took_s,
            "parts": list(checkpoint.parts),
        }
    return facts | {"whole": not one.problems, "problems": list(one.problems)}
