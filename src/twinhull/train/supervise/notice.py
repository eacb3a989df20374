"""Is this machine about to be taken away? A function of the user's is asked every second, in its own process.

`python -m twinhull.train.supervise.notice MODULE:FUNCTION` leaves with 75 as soon as the function says true.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping

from twinhull import logs, processes

EVERY_S = 1.0
_GIVEN = 75
log = logging.getLogger(__name__)


class Notice:
    """Listens for the notice that `entry` passes on; with "" for none."""

    def __init__(self, entry: str, env: Mapping[str, str]) -> None:
        words = [sys.executable, "-m", "twinhull.train.supervise.notice", entry]
        self._process = subprocess.Popen(words, env=dict(env), start_new_session=True) if entry else None

    @property
    def is_given(self) -> bool:
        """Whether the machine is about to go."""
        return self._process is not None and self._process.poll() == _GIVEN

    def end(self) -> None:
        """Listen no longer."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def main() -> int:
    """Ask until the function says yes; an error of its own is told once and means no."""
    from twinhull.train.supervise.rank import training_function

    processes.die_with_parent()
    logs.setup("notice")
    told = ""
    while True:
        try:
            if training_function(sys.argv[1])():
                return _GIVEN
        except Exception as error:  # the user's own; training must not depend on it
            if told != (told := f"{type(error).__name__}: {error}"):
                log.warning("notice cannot be asked for", extra={"function": sys.argv[1], "reason": told})
        time.sleep(EVERY_S)


if __name__ == "__main__":
    os._exit(main())
