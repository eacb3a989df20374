"""How a child process is started, watched, restarted and ended, so that none is ever left behind."""

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(ending: signal.Signals = signal.SIGKILL) -> None:
    """Make this process end when its parent does, however the parent ends.

    Linux delivers `ending` by itself; elsewhere a thread looks twice a second whether the parent has changed.
    Call it first thing in a child's `main`. A parent that left during the call ends the child at once.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(ending), 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent, ending), daemon=True).start()
    if os.getppid() != parent:
        os.kill(os.getpid(), ending)


def _watch_parent(parent: int, ending: signal.Signals) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), ending)
