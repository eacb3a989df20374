"""How is the run now? Everything the live view shows, folded from the records as they come."""

import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from twinhull.deploy.record import SAID, Record

_KEPT = 240  # points of a series that a small chart can use
_QUIET = {SAID, "started", "checkpoint saved"}  # kinds that the event list of the view leaves out


@dataclass(slots=True)
class Training:
    """One training job: where it stands, what it published, when it last saved."""

    state: str = "starting"
    ranks: int = 0
    generation: int = 0
    step: float = 0.0
    steps_total: float = math.nan
    step_s: float = math.nan
    data_s: float = math.nan
    loss: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    saved_at: float = math.nan
    saved_in_s: float = math.nan
    version: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)  # Any: the user's own


@dataclass(slots=True)
class Serving:
    """One endpoint: totals by source, the rate of the last seconds, the tail beside the promise."""

    asked: float = 0.0
    fresh: float = 0.0
    cached: float = 0.0
    default: float = 0.0
    failed: float = 0.0
    late: float = 0.0
    p50_s: float = math.nan
    p99_s: float = math.nan
    rate: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _seen: tuple[float, float] | None = None

    def hear(self, t: float, what: str, value: float) -> None:
        """Take one sampled number; `asked` also gives the rate."""
        if what == "asked":
            if self._seen is not None and t > self._seen[0]:
                self.rate.append(max(0.0, value - self._seen[1]) / (t - self._seen[0]))
            self._seen = (t, value)
        if what in {"asked", "fresh", "cached", "default", "failed", "late", "p50_s", "p99_s"}:
            setattr(self, what, value)


@dataclass(slots=True)
class Board:
    """The state of one run. `alive` holds the pid of each running process, `expected` all there should be."""

    trainings: dict[str, Training] = field(default_factory=dict)
    servings: dict[str, Serving] = field(default_factory=dict)
    alive: dict[str, int] = field(default_factory=dict)
    expected: set[str] = field(default_factory=set)
    versions: dict[str, dict[str, int]] = field(default_factory=dict)  # model -> worker -> version
    batch: float = math.nan
    waiting: dict[str, tuple[float, float]] = field(default_factory=dict)  # stream -> events, oldest age in s
    recent: deque[Record] = field(default_factory=lambda: deque(maxlen=6))

    def hear(self, record: Record) -> None:
        """Take one record."""
        for name, value in record.sample.items():
            self._sampled(record.t, name.split("."), value)
        if record.kind:
            if record.kind not in _QUIET or record.level in {"warning", "error"}:
                self.recent.append(record)
            with suppress(
                KeyError, TypeError, ValueError
            ):  # a user's event may have our words, not our facts
                self._happened(record)

    def _sampled(self, t: float, name: list[str], value: float) -> None:
        match name:
            case ["train", job, "loss"]:
                self._training(job).loss.append(value)
            case ["train", job, ("step" | "steps_total" | "step_s" | "data_s") as what]:
                setattr(self._training(job), what, value)
            case ["serve", "batch"]:
                self.batch = value
            case ["serve", endpoint, what]:
                self.servings.setdefault(endpoint, Serving()).hear(t, what, value)
            case ["events", stream, "waiting"]:
                self.waiting[stream] = (value, self.waiting.get(stream, (0.0, 0.0))[1])
            case ["events", stream, "oldest_s"]:
                self.waiting[stream] = (self.waiting.get(stream, (0.0, 0.0))[0], value)
            case _:
                pass

    def _happened(self, record: Record) -> None:
        facts = record.facts
        plane, _, name = record.role.partition(":")
        if plane == "train":
            self._trained(self._training(name), record)
        elif plane == "rank":
            self._trained(self._training(name.rpartition("-")[0]), record)
        elif plane == "up" and "process" in facts:
            self._lives(str(facts["process"]), record)
        elif plane == "worker" and record.kind == "swapped":
            self.versions.setdefault(str(facts["model"]), {})[record.role] = int(facts["version"])

    def _lives(self, process: str, record: Record) -> None:
        if record.kind == "started":
            self.alive[process] = int(record.facts["pid"])
            self.expected.add(process)
        else:
            self.alive.pop(process, None)
            if process.startswith("train:"):
                self._training(process.removeprefix("train:")).state = _state(record)

    def _trained(self, training: Training, record: Record) -> None:
        facts = record.facts
        match record.kind:
            case "generation started":
                training.state = "training"
                training.generation = int(facts.get("generation", 0))
                training.ranks = int(facts.get("ranks", 0))
            case "checkpoint saved":
                training.saved_at, training.saved_in_s = record.t, float(facts.get("took_s", math.nan))
            case "published":
                training.version = int(facts["version"])
                metrics = facts.get("metrics")
                training.metrics = dict(metrics) if isinstance(metrics, dict) else {}
            case "cycle finished":
                training.state = "waiting for the next cycle"
            case _:
                pass

    def _training(self, job: str) -> Training:
        return self.trainings.setdefault(job, Training())


def _state(end: Record) -> str:
    """What has become of a training job whose launcher left."""
    if end.kind == "lost":
        return "lost, starting again"
    return {0: "done", 75: "stopped and saved"}.get(int(end.facts.get("exit", 1)), "failed, see its log")
