"""A training run as a bench watches it: a launcher of ours or torchrun, and the notes of its steps."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent.parent
T = TypeVar("T")
_FRESH_S = 0.2  # a rank that has noted no step for so long may be gone
ENV = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Step:
    """One step as a rank noted it: when, which process, its number, its loss and its samples."""

    at: float
    pid: int
    step: int
    loss: float
    samples: tuple[int, ...]


def steps(notes: Path, rank: int) -> list[Step]:
    """What a rank has noted so far; a line that is being written is left out."""
    path = notes.with_name(f"{notes.name}.{rank}")
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    found: list[Step] = []
    for line in whole.splitlines():
        at, pid, step, loss, samples = line.split()
        found.append(Step(float(at), int(pid), int(step), float(loss), tuple(map(int, samples.split(",")))))
    return found


def until(condition: Callable[[], T], within_s: float = 60.0) -> T:
    """What the condition gives once it gives something true."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.005)
    raise TimeoutError(f"not within {within_s:.0f} s")


def system(run: Path, **train: object) -> None:
    """Write the system file of a run with one training job of bench/training/app.py."""
    run.mkdir(parents=True, exist_ok=True)
    facts = {"train": "training.app:fit", "pool": "here", "checkpoint": "5 steps", **train}
    said = ", ".join(
        f'{name}: "{value}"' if isinstance(value, str) else f"{name}: {value}"
        for name, value in facts.items()
    )
    text = f"name: bench\npools:\n  here: {{nodes: 1, cpus: 2}}\nworkloads:\n  fit: {{{said}}}\n"
    (run / "system.yaml").write_text(text)


def ours(run: Path, ranks: int, env: Mapping[str, str], *options: str) -> subprocess.Popen[bytes]:
    """Our launcher; its words go into RUN/log."""
    argv = [sys.executable, "-m", "twinhull.train.supervise.launch", "--run", str(run), "--train", "fit"]
    return _start([*argv, "--ranks", str(ranks), "--nice", "0", *options], run, env)


def torchrun(run: Path, ranks: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The hand-written script under torchrun, with the cure for its restarts."""
    run.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}",
            "--max-restarts=100", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
            str(HERE / "training" / "by_hand.py"), str(run / "state.pt")]  # fmt: skip
    cured = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return _start(argv, run, {**env, **cured})


def _start(argv: list[str], run: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with (run / "log").open("ab") as log:
        return subprocess.Popen(argv, env={**ENV, **env, "NOTES": str(run / "notes")}, stdout=log, stderr=log)


def signalled(run: Path, rank: int, number: signal.Signals, beyond: int) -> tuple[float, int]:
    """Send a signal to a rank once it has done `beyond` steps in its present life: when, and to whom."""

    def sent() -> tuple[float, int] | None:
        pid = _steady(run / "notes", rank, beyond)
        try:
            return (time.time(), pid) if pid and os.kill(pid, number) is None else None
        except ProcessLookupError:  # it has gone with the one that was lost before
            return None

    found = until(sent)
    assert found is not None
    return found


def training_again(run: Path, rank: int, pid: int, since: float, within_s: float = 120.0) -> float:
    """How long after `since` another process than `pid` completed a step as this rank."""

    def again() -> float:
        found = steps(run / "notes", rank)
        return found[-1].at if found and found[-1].pid != pid and found[-1].at > since else 0.0

    until(again, within_s)
    first = next(s.at for s in steps(run / "notes", rank) if s.pid != pid and s.at > since)
    return first - since


def end(process: subprocess.Popen[bytes]) -> None:
    """End it and whatever it has started."""
    import psutil

    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    process.wait()
    for one in family:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue


def _steady(notes: Path, rank: int, beyond: int) -> int:
    found = steps(notes, rank)
    if not found or time.time() - found[-1].at > _FRESH_S:
        return 0
    pid = found[-1].pid
    own = [step for step in found if step.pid == pid]
    return pid if len(own) > beyond else 0


def global_losses(run: Path, ranks: int) -> dict[int, float]:
    """The loss of each step over all samples of its global batch."""
    return {
        step: sum(part.loss * len(part.samples) for part in parts) / sum(len(part.samples) for part in parts)
        for step, parts in ((step, last_life(parts)) for step, parts in _parts(run, ranks).items())
    }


def _parts(run: Path, ranks: int) -> dict[int, list[Step]]:
    """What all ranks have noted, by step."""
    found: dict[int, list[Step]] = {}
    for noted in (step for rank in range(ranks) for step in steps(run / "notes", rank)):
        found.setdefault(noted.step, []).append(noted)
    return dict(sorted(found.items()))


def last_life(parts: list[Step]) -> list[Step]:
    """Of one step's parts those that were trained last: the newest ones that share no sample."""
    kept: list[Step] = []
    seen: set[int] = set()
    for part in sorted(parts, key=lambda s: s.at, reverse=True):
        if not seen & set(part.samples):
            kept.append(part)
            seen |= set(part.samples)
    return kept


def listening(
    run: Path, env: Mapping[str, str], address: str = "127.0.0.1"
) -> tuple[subprocess.Popen[bytes], str]:
    """Our launcher waiting for one or two machines, and the address at which they join."""
    system(run)
    options = ("--listen", f"{address}:0", "--nodes", "1..2", "--lease", "2")
    launcher = ours(run, 1, {**env, "TWINHULL_LOG_FORMAT": "json"}, *options)
    command = until(lambda: [line["command"] for line in said(run, "waiting for hosts: type on each")])[0]
    return launcher, str(command).split()[2]


def host(
    run: Path, at: str, name: str, env: Mapping[str, str], enter: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """A machine of two ranks that joins; `enter` comes before the command."""
    argv = [
        *enter,
        sys.executable,
        "-m",
        "twinhull",
        "join",
        at,
        "--ranks",
        "2",
        "--name",
        name,
        "--code",
        str(HERE),
    ]
    return _start([*argv, "--token-file", str(run / "join.token")], run, env)


def said(run: Path, event: str) -> list[dict[str, Any]]:  # Any: JSON
    """What the launcher has said of this kind."""
    lines = (run / "log").read_text().splitlines() if (run / "log").exists() else []
    found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return [line for line in found if line.get("event") == event]


def each_once(run: Path, ranks: int, num_samples: int) -> bool:
    """Whether each sample was trained once, where of a step that was done again only the last time counts."""
    parts = [part for step in _parts(run, ranks).values() for part in last_life(step)]
    return sorted(sample for part in parts for sample in part.samples) == list(range(num_samples))


def grows(notes: Path, rank: int) -> bool:
    """Whether a rank completes steps just now."""
    before = len(steps(notes, rank))
    time.sleep(0.3)
    return len(steps(notes, rank)) > before + 3
