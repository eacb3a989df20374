"""A training script without torch that knows nothing of Twinhull: it sums up its steps and saves the sum.

What befalls it is said by the environment: PAUSE_S a step, and AT STEP:WHAT once, or each time with ALWAYS.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

parser = argparse.ArgumentParser()
parser.add_argument("--resume", type=Path)
parser.add_argument("--into", type=Path, required=True)
parser.add_argument("--out", type=Path)
parser.add_argument("--steps", type=int, default=20)
given = parser.parse_args()
given.into.mkdir(parents=True, exist_ok=True)
state = {"step": 0, "sum": 0}
stop: list[int] = []  # the signals it was asked by


def save() -> Path:
    path = given.into / f"state-{state['step']}.json"
    path.write_text(json.dumps(state))
    return path


def asked(number: int, _frame: object) -> None:
    stop.append(number)


def befalls(what: str) -> None:
    if what == "hang":
        time.sleep(1000)
    if what == "tear":
        save().write_text('{"step": 9')
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "leave":  # and something behind: in a session of its own, deaf to SIGTERM
        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
        subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
    if what == "raise":
        raise ValueError("boom")


if given.resume is not None:
    state = json.loads(given.resume.read_text())
if os.environ.get("OBEYS"):
    signal.signal(signal.SIGTERM, asked)
print(f"from {state['step']}", flush=True)
at, _, what = os.environ.get("AT", "").partition(":")
mark = given.into / ".befallen"
while state["step"] < given.steps and not stop:
    state = {"step": state["step"] + 1, "sum": state["sum"] + state["step"] + 1}
    if state["step"] % 5 == 0:
        save()
    if os.environ.get("BEATS"):
        Path(os.environ["TWINHULL_HEARTBEAT"]).touch()
    else:
        print(f"step {state['step']}\r", end="", file=sys.stderr, flush=True)
    time.sleep(float(os.environ.get("PAUSE_S", "0")))
    if str(state["step"]) == at and (os.environ.get("ALWAYS") or not mark.exists()):
        mark.touch()
        befalls(what)
if stop:
    save()
elif given.out is not None:
    given.out.mkdir(parents=True, exist_ok=True)
    save_file({"weight": np.array([state["sum"]], np.float32)}, given.out / "model.safetensors")
print(f"\nleft at {state['step']}", flush=True)
