"""How long may ranks take to save and leave? Checkpoint < grace < warning must hold, or work is lost."""

import logging
from contextlib import suppress

from twinhull.train.checkpoints.manifest import Refused
from twinhull.train.checkpoints.store import Store
from twinhull.train.supervise.wire import now

EVERY_S = 1.0  # between two looks at the newest checkpoint
UNSTATED_S = 3.0  # when the file does not say what warning a machine gets
WALLTIME_S = 60.0  # before the end of the walltime, when no warning is stated
log = logging.getLogger(__name__)


def grace_s(warning_s: float | None) -> float:
    """From the request to leave until the ranks are killed: the warning, less what is needed to end them."""
    return UNSTATED_S if warning_s is None else max(0.5 * warning_s, warning_s - max(1.0, 0.1 * warning_s))


def problem(took_s: float | None, warning_s: float | None) -> str:
    """What is wrong with the times, in one line with its numbers; "" if nothing is known to be."""
    grace = grace_s(warning_s)
    if took_s is None or took_s < grace:
        return ""
    stated = f"{warning_s:g} s" if warning_s is not None else "not stated"
    return (
        f"a checkpoint took {took_s:.1f} s, ranks that must leave get {grace:.1f} s (warning: {stated}): "
        "what was trained since the last checkpoint will be lost. State a longer warning, or save less."
    )


class Watch:
    """Says once what is wrong with the times: of the checkpoint found at the start, or of the first."""

    def __init__(self, warning_s: float | None) -> None:
        self._warning_s, self._look_at, self._name = warning_s, 0.0, ""
        self._looks = 2

    def look(self, store: Store) -> None:
        """Look at the newest checkpoint, now and then."""
        if not self._looks or now() < self._look_at:
            return
        self._look_at = now() + EVERY_S
        name = next(iter(store.names()), "")
        if name in ("", self._name):
            return
        self._name, self._looks = name, self._looks - 1
        with suppress(Refused):
            if said := problem(store.described(name).took_s, self._warning_s):
                log.warning("checkpoints take too long", extra={"reason": said})
                self._looks = 0
