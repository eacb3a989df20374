"""What has the launcher to tell of its time? Goodput while a generation trains, and the sum at its end."""

import logging

from twinhull import logs
from twinhull.train.supervise.generation import Cause, Generation
from twinhull.train.supervise.goodput import Ledger
from twinhull.train.supervise.wire import now

EVERY_S = 1.0
log = logging.getLogger(__name__)


class Account:
    """The time of one launcher, generation after generation."""

    def __init__(self, name: str) -> None:
        self._name, self._ledger, self._because, self._sample_at = name, Ledger(), "", 0.0

    def waited(self, seconds: float) -> None:
        """Ranks were due and not to be started: hosts were missing, or it was too early for another try."""
        self._ledger = self._ledger.waited(seconds)

    def look(self, generation: Generation, furthest: int) -> None:
        """Sample the goodput now and then; `furthest` is the step that was reached before this generation."""
        if now() < self._sample_at:
            return
        self._sample_at = now() + EVERY_S
        so_far = self._ledger.after(generation.spent(furthest), restarted_for=self._because)
        logs.sample({f"train.{self._name}.goodput": so_far.goodput})

    def close(self, generation: Generation, furthest: int, cause: Cause) -> None:
        """Enter a generation that has ended, and say where the time has gone."""
        self._ledger = self._ledger.after(generation.spent(furthest), restarted_for=self._because)
        self._because = "" if cause == "done" else cause
        log.info("goodput", extra=self._ledger.as_facts())
