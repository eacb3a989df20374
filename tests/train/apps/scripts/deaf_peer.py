"""Two ranks under torchrun: the first dies once, the second is deaf to SIGTERM and waits for it for ever."""

import os
import signal
import sys
import time
from pathlib import Path

into = Path(sys.argv[1])
if os.environ["RANK"] == "0":
    print("rank 0 is up", flush=True)
    if not (into / ".died").exists():
        while not (into / ".deaf").exists():
            time.sleep(0.01)
        (into / ".died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    (into / ".done").touch()
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (into / ".deaf").touch()
    while not (into / ".done").exists():
        time.sleep(0.01)
