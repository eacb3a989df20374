"""Which version of a model does this worker serve, and how does it change without a dropped request?

A newer version is loaded beside the current one in a thread, checked and warmed up; the worker takes it
between two batches. A version that fails is refused for good; the one before stays.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from twinhull.errors import ModelRefused
from twinhull.handoff.registry import Registry, Version

log = logging.getLogger(__name__)

POLL_S = 2.0  # between looks at the registry without a hint
HINT_S = 0.25  # between looks at the hint

WarmUp = Callable[[Any], None]  # Any: an object of the user's model class


@dataclass(frozen=True, slots=True)
class Loaded:
    """A version ready to serve."""

    number: int
    model: Any  # Any: an object of the user's model class


class Slot:
    """The place of one model in a worker: empty, then one whole version after the other.

    `current` is replaced as a whole, never changed. `warm_ups` are called with a new model before it may
    become current; what they raise refuses the version. `hint` gives the announced version, if any.
    """

    def __init__(
        self,
        registry: Registry,
        name: str,
        kind: type,
        *,
        warm_ups: Sequence[WarmUp],
        hint: Callable[[], int | None],
    ) -> None:
        self.name = name
        self.current: Loaded | None = None
        self.previous: Loaded | None = None
        self.refused: set[int] = set()
        self._registry = registry
        self._kind = kind
        self._warm_ups = warm_ups
        self._hint = hint
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"model-{name}", daemon=True)

    def start(self) -> None:
        """Load the newest version if there is one, then watch for newer ones in a thread."""
        self.look()
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; does not wait for a load under way."""
        self._stop.set()

    def look(self) -> None:
        """Take the newest version that is not refused, if it is newer than the current one."""
        try:
            known = self._registry.versions(self.name)
        except ModelRefused as error:
            log.warning("models not read", extra={"model": self.name, "reason": str(error)})
            return
        floor = 0 if self.current is None else self.current.number
        newer = (v for v in reversed(known) if v.number > floor and v.number not in self.refused)
        for version in newer:
            if self._take(version):
                return

    def _take(self, version: Version) -> bool:
        started = time.monotonic()
        try:
            loaded = Loaded(version.number, self._build(version))
        except (
            Exception,
            SystemExit,
        ) as error:  # the user's model may raise anything: the version is refused
            self.refused.add(version.number)
            reason = str(error) if isinstance(error, ModelRefused) else f"{type(error).__name__}: {error}"
            facts = {"model": self.name, "version": version.number, "reason": reason}
            log.error("model refused", extra=facts)  # noqa: TRY400  # the reason is enough
            return False
        self.previous, self.current = self.current, loaded
        took_s = round(time.monotonic() - started, 3)
        log.info("swapped", extra={"model": self.name, "version": version.number, "took_s": took_s})
        return True

    def _build(self, version: Version) -> Any:  # Any: an object of the user's model class
        model = build(self._kind, self._registry.read(version))
        for warm_up in self._warm_ups:
            warm_up(model)
        return model

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while not self._stop.wait(HINT_S):
            hinted = self._hint()
            newest = max([self.current.number if self.current else 0, *self.refused])
            now = time.monotonic()
            if (hinted is not None and hinted > newest) or now >= looked_at + POLL_S:
                looked_at = now
                try:
                    self.look()
                except Exception:  # the thread's last line: a registry that cannot be read now is read later
                    log.exception("models not read", extra={"model": self.name})


def build(kind: type, tensors: dict[str, Any]) -> Any:  # Any: arrays; an object of the class
    """A model of the class from the tensors of a version.

    By the class's own `from_tensors(tensors)` if it has one; else it is made without arguments and loads them
    as its PyTorch state, strictly, and is set to evaluate.
    """
    from_tensors = getattr(kind, "from_tensors", None)
    if from_tensors is not None:
        return from_tensors(tensors)
    import torch

    model = kind()
    if not hasattr(model, "load_state_dict"):
        raise ModelRefused(
            f"{kind.__qualname__} is no PyTorch module and has no from_tensors(tensors).", hint="Give it one."
        )
    model.load_state_dict({name: torch.from_numpy(array) for name, array in tensors.items()}, strict=True)
    return model.eval()
