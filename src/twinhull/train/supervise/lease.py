"""Until when may the ranks of a host train? A host that the launcher cannot reach must stop by itself.

A host sends pings with the time of its own clock, the launcher sends them back. What comes back proves that
the launcher heard the host after that time, so the lease ends `lease_s` after the time in the newest answer.
The launcher gives a host up only when it has heard nothing for `lease_s` and a margin, and from then on
answers no ping. So the ranks of a host are dead before the next generation begins without it, however long
messages travel.

The host kills its ranks when the lease ends. Should the host's own process stand still, the ranks look
themselves: the end of the lease lies beside the folder of their records.
"""

import os
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

from twinhull.train.supervise.wire import now

LEASE_S = 10.0
PING_S = 1.0
_LOOK_S = 0.2
_UNTIL = struct.Struct("<d")


def margin_s(lease_s: float) -> float:
    """What the launcher waits beyond the lease: for the kill on a busy machine and clocks that drift."""
    return max(1.0, 0.2 * lease_s)


def write(folder: Path, until: float) -> None:
    """Let the ranks of `folder` train until then; it is one write, a reader sees the old or the new."""
    file = os.open(folder / "lease", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    os.pwrite(file, _UNTIL.pack(until), 0)
    os.close(file)


def enforce(folder: Path) -> None:
    """In a rank: leave without a word when the lease in `folder` ends; there is none on a single machine."""
    if (folder / "lease").exists():
        threading.Thread(target=_watch, args=(folder / "lease",), daemon=True).start()


def _watch(file: Path) -> None:
    while True:
        with suppress(FileNotFoundError):
            if now() > _UNTIL.unpack(file.read_bytes())[0]:
                os._exit(1)
        time.sleep(_LOOK_S)
