"""What became of the requests of a load: counts and times per phase, as a table, as JSON, as records."""

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Source = Literal["fresh", "cached", "default"]


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Instants are unix seconds; `asked_at` is when it was due, whatever the generator did."""

    stream: str
    phase: str
    asked_at: float
    sent_at: float | None
    answered_at: float | None
    status: int | None
    source: str | None
    version: int | None
    age_s: float | None
    reason: str | None  # of a request that failed


@dataclass(frozen=True, slots=True)
class Totals:
    """What became of the requests asked in one phase.

    `fresh`, `cached` and `default` are answers by their source, `plain` those that name none. `late` ones are
    among them. Asked = fresh + cached + default + plain + failed + unanswered (under way at the end).
    Times run from the instant when a request was due; None without an answer.
    """

    phase: str
    asked: int
    answered_in_time: int
    fresh: int
    cached: int
    default: int
    plain: int
    late: int
    failed: int
    unanswered: int
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    max_s: float | None
    versions: tuple[int, ...]
    reasons: dict[str, int]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What became of a load. Own lag is how late the generator's own timer rang: late answers within it say
    nothing about the server.
    """

    url: str
    deadline_s: float | None
    took_s: float
    total: Totals
    phases: tuple[Totals, ...]
    streams: tuple[Totals, ...]
    own_lag_p99_s: float
    own_lag_max_s: float
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        """Whether any request got no answer that counts."""
        return self.total.failed > 0

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """The report as plain values."""
        return asdict(self)

    def text(self) -> str:
        """The report as a table for people."""
        rows = [_HEAD, *(_row(t) for t in self.phases if len(self.phases) > 1), _row(self.total)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
        lines = [
            "  ".join(_cell(c, w, i) for i, (c, w) in enumerate(zip(r, widths, strict=True))) for r in rows
        ]
        deadline = "no deadline" if self.deadline_s is None else f"deadline {self.deadline_s * 1e3:g} ms"
        rate = self.total.asked / max(self.took_s, 1e-9)
        lines.append(
            f"{self.url}: {rate:.0f}/s for {self.took_s:.1f} s, {deadline}; "
            f"own lag p99 {self.own_lag_p99_s * 1e3:.1f} ms, max {self.own_lag_max_s * 1e3:.1f} ms"
        )
        lines += [f"failed: {count} x {reason}" for reason, count in self.total.reasons.items()]
        return "\n".join(line.rstrip() for line in lines)


@dataclass(slots=True)
class Tally:
    """Counts of one phase or stream while it goes on; may be read at any time."""

    name: str
    asked: int = 0
    in_time: int = 0
    late: int = 0
    failed: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    versions: set[int] = field(default_factory=set)
    times_s: "array[float]" = field(default_factory=lambda: array("d"))

    def answer(
        self, took_s: float, source: str | None, version: int | None, deadline_s: float | None
    ) -> None:
        """Count an answer."""
        self.times_s.append(took_s)
        self.sources[source or "plain"] += 1
        if version is not None:
            self.versions.add(version)
        if deadline_s is not None and took_s > deadline_s:
            self.late += 1
        else:
            self.in_time += 1

    def fail(self, reason: str) -> None:
        """Count a failure."""
        self.failed += 1
        self.reasons[reason] += 1

    def totals(self) -> Totals:
        """The counts now."""
        times = sorted(self.times_s)
        known = {name: self.sources[name] for name in ("fresh", "cached", "default")}
        return Totals(
            phase=self.name,
            asked=self.asked,
            answered_in_time=self.in_time,
            **known,
            plain=len(times) - sum(known.values()),
            late=self.late,
            failed=self.failed,
            unanswered=self.asked - len(times) - self.failed,
            p50_s=quantile(times, 0.50),
            p95_s=quantile(times, 0.95),
            p99_s=quantile(times, 0.99),
            max_s=times[-1] if times else None,
            versions=tuple(sorted(self.versions)),
            reasons=dict(self.reasons.most_common()),
        )


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that `share` of the ordered values do not exceed; None of nothing."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


_HEAD = ("phase", "asked", "in time", "fresh", "cached", "default", "plain", "late", "failed", "open",
         "p50 ms", "p95 ms", "p99 ms", "max ms")  # fmt: skip


def _row(t: Totals) -> tuple[str, ...]:
    counts = (
        t.asked,
        t.answered_in_time,
        t.fresh,
        t.cached,
        t.default,
        t.plain,
        t.late,
        t.failed,
        t.unanswered,
    )
    times = (t.p50_s, t.p95_s, t.p99_s, t.max_s)
    return (t.phase, *map(str, counts), *("-" if s is None else f"{s * 1e3:.1f}" for s in times))


def _cell(text: str, width: int, column: int) -> str:
    return text.ljust(width) if column == 0 else text.rjust(width)
