"""Which checkpoint does a run start from? The newest that verifies, the same on all ranks."""

import logging
import os

from twinhull.train.checkpoints.manifest import Checkpoint, Refused
from twinhull.train.checkpoints.peers import Peers
from twinhull.train.checkpoints.store import Store

log = logging.getLogger(__name__)


def find(store: Store, peers: Peers) -> Checkpoint | None:
    """The newest checkpoint whose files hold; the ranks of a host share the reading.

    Raises CheckpointError if there are some and none can be trusted. What a killed writer left is removed.
    """
    index, of = _among_the_host(peers)

    def prepare() -> list[str]:
        store.check()
        if index == 0:
            store.clean()
        return store.names() if peers.rank == 0 else []

    names: list[str] = peers.together(prepare)[0]
    for name in names:
        found: list[Checkpoint] = []
        problems = peers.together(lambda name=name, found=found: _problem(store, name, (index, of), found))
        problem = next((text for text in problems if text), "")
        if not problem:
            return found[0]
        if peers.rank == 0:
            log.warning("checkpoint refused", extra={"checkpoint": name, "reason": problem})
    if names:
        raise store.untrusted(len(names))
    return None


def _problem(store: Store, name: str, share: tuple[int, int], found: list[Checkpoint]) -> str:
    try:
        found.append(store.verified(name, *share))
    except Refused as refused:
        return str(refused)
    return ""


def _among_the_host(peers: Peers) -> tuple[int, int]:
    """This rank's number among the ranks of its host, and how many they are; alone where nobody says."""
    if peers.world_size == 1:
        return 0, 1
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
