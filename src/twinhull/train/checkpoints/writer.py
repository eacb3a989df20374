"""How is a checkpoint written while training goes on? By a thread of each rank, whole or not at all.

Each action is taken on all ranks and voted on: stage and make room; write, hash and send one's own part;
commit, by rank 0.
"""

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree

import torch

from twinhull.errors import CheckpointError
from twinhull.train.checkpoints import shards
from twinhull.train.checkpoints.manifest import STATE, Checkpoint, Files, Place, facts, name_of, sync
from twinhull.train.checkpoints.peers import Peers
from twinhull.train.checkpoints.snapshot import Snapshot
from twinhull.train.checkpoints.staging import Staging
from twinhull.train.checkpoints.store import Store


@dataclass(slots=True)
class Writing:
    """A save under way. `staged`: training may change the state again. `ended`: the rest is known."""

    place: Place
    parts: tuple[str, ...]
    snapshot: Snapshot
    required: bool
    began: float
    staged: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    made: Checkpoint | None = None
    error: BaseException | None = None


class Writer:
    """Writes one checkpoint at a time; the same calls on all ranks."""

    def __init__(self, store: Store, peers: Peers, device: torch.device) -> None:
        self.store, self.peers = store, peers
        self._staging = Staging(device)

    def start(self, writing: Writing) -> None:
        """Begin to write; returns at once."""
        self._staging.promise(writing.snapshot.late)
        # A daemon: a rank that fails leaves without asking a thread that may wait for a lost peer.
        threading.Thread(target=self._run, args=(writing,), name="checkpoint", daemon=True).start()

    def make_room(self, step: int) -> None:
        """An empty place for the checkpoint of a step, made by rank 0 while the others wait."""
        self.peers.together(lambda: self._make_room(step))

    def _make_room(self, step: int) -> None:
        self.store.check()  # an overtaken generation must not remove what is remote
        if self.peers.rank == 0:
            self.store.make_room(step)

    def _run(self, writing: Writing) -> None:
        try:
            writing.made = self._write(writing)
        except BaseException as error:  # for the training thread, which looks at it
            writing.error = error
            rmtree(self.store.beside(writing.place.step), ignore_errors=True)
        finally:
            writing.staged.set()
            writing.ended.set()

    def _write(self, writing: Writing) -> Checkpoint:
        snapshot, store, step = writing.snapshot, self.store, writing.place.step
        beside = store.beside(step)
        tensors = dict(snapshot.copied)

        def prepare() -> list[str]:
            try:
                tensors.update(self._staging.copy(snapshot.late))
            finally:
                writing.staged.set()
            if not snapshot.own:
                self._make_room(step)
            return [str(file.relative_to(beside)) for own in snapshot.own for file in _files(beside / own)]

        seen: list[list[str]] = self.peers.together(prepare)

        def write() -> Files:
            shards.write(beside, tensors, self.peers.group)  # first: its collectives need all ranks
            return self._answered_for(snapshot, beside, step, seen)

        files = {name: fact for part in self.peers.together(write) for name, fact in part.items()}
        made = Checkpoint(
            store.root / name_of(step), writing.place, writing.parts, self.peers.world_size, time.time(),
            files, took_s=time.monotonic() - writing.began, own_files=bool(snapshot.own),
        )  # fmt: skip
        self.peers.together(lambda: self._commit(made, beside) if self.peers.rank == 0 else None)
        store.forget(step)
        return made

    def _answered_for(self, snapshot: Snapshot, beside: Path, step: int, seen: list[list[str]]) -> Files:
        """Sizes and hashes of this rank's files, which are on the disk then, and sent if that is asked."""
        rank = self.peers.rank
        names = [*shards.written_by(rank, beside), *_share(seen, rank)]
        if rank == 0:
            torch.save(snapshot.skeletons, beside / STATE)
            names.append(STATE)
        for name in names:
            _sync_file(beside / name)
        for own in snapshot.own:
            for directory in {file.parent for file in _files(beside / own)}:
                sync(directory)
        found = {name: facts(beside / name) for name in names}
        self.store.send(step, names)
        return found

    def _commit(self, made: Checkpoint, beside: Path) -> None:
        missing = [name for name in made.files if not (beside / name).is_file()]
        if missing and self.store.remote is None:
            raise CheckpointError(
                f"{missing[0]} was written by another host and is not in {beside} here; "
                "hosts must share the run directory, or keep checkpoints behind a url."
            )
        self.store.commit(made)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _share(seen: list[list[str]], rank: int) -> list[str]:
    """The files of other makers that a rank answers for: each file has one of the ranks that see it."""
    mine: list[str] = []
    for index, name in enumerate(sorted({name for names in seen for name in names})):
        ranks = [other for other, names in enumerate(seen) if name in names]
        if ranks[index % len(ranks)] == rank:
            mine.append(name)
    return mine


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
