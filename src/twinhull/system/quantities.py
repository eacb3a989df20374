"""Which text stands for a quantity of several parts: `1..4`, `8 x H100`, `32 within 5 ms`, `2 after 100 ms`.

Each class has one `parse`, which raises ValueError with an example, and one `str()`, so that
`parse(str(x)) == x`. Numbers inside are SI floats.
"""

import re
from dataclasses import dataclass
from typing import Self

from twinhull.units import FLOW, NUMBER, SECONDS, SHARE, quoted, refused

_RANGE = r"\s*([0-9]{1,10})\s*\.\.\s*([0-9]{1,10})?\s*"
_NETWORK = r"\s*(?:([0-9]{1,6})\s*x\s*)?([0-9][0-9.eE-]{0,20})\s*(GbE|\S+/s)(?:\s+([A-Za-z][\w -]{0,40}))?\s*"
MOST = 10**9  # a count above this is a slip of the pen


def whole(value: object, what: str, example: str) -> int:
    """A count from 0 on, from a number or its digits. Raises ValueError with an example."""
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,10}\s*", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise refused(value, f"is not {what}", example)
    if not 0 <= value <= MOST:
        raise ValueError(f"{quoted(value)} is outside 0 to {MOST}; write for example {example}")
    return value


@dataclass(frozen=True, slots=True)
class Range:
    """From `low` to `high` of something; `high` None is open: at least `low`."""

    low: int
    high: int | None

    @classmethod
    def parse(cls, value: object) -> Self:
        """`3`, `3..9` or `3..`."""
        if isinstance(value, cls):
            return value
        what, example = "a number or a range", "3, 3..9 or 3.."
        match = re.fullmatch(_RANGE, value) if isinstance(value, str) else None
        if match is None:
            count = whole(value, what, example)
            return cls(count, count)
        first = whole(match[1], what, example)
        last = whole(match[2], what, example) if match[2] else None
        if last is not None and last < first:
            raise refused(value, "ends before it starts", f"{last}..{first}")
        return cls(first, last)

    def __str__(self) -> str:
        if self.high == self.low:
            return str(self.low)
        return f"{self.low}..{'' if self.high is None else self.high}"


@dataclass(frozen=True, slots=True)
class Gpus:
    """How many GPUs of which device; either may be unknown. No GPU at all is a `count` of 0."""

    count: int | None
    device: str | None = None

    @classmethod
    def parse(cls, value: object) -> Self:
        """`8 x H100`, `8` or `H100`."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, str):
            return cls(whole(value, "a number of GPUs", "8 x H100"))
        match = re.fullmatch(r"\s*(?:([0-9]{1,10})(?:\s*x\s*|\s*$))?([A-Za-z][\w .+/-]{0,40})?\s*", value)
        if match is None or not (match[1] or match[2]):
            raise ValueError(
                f"{quoted(value)} is not a number of GPUs; write for example 8 x H100, 8 or H100"
            )
        count = whole(match[1], "a number of GPUs", "8 x H100") if match[1] else None
        device = match[2].strip() if match[2] else None
        return cls(count, device)

    def __str__(self) -> str:
        if self.device is None:
            return str(self.count)
        return self.device if self.count is None else f"{self.count} x {self.device}"


@dataclass(frozen=True, slots=True)
class Network:
    """All ports of one node: how many, bytes/s of each, and the kind (`GbE` is Ethernet)."""

    ports: int
    port_bandwidth: float
    kind: str | None = None

    @classmethod
    def parse(cls, value: object) -> Self:
        """`100 GbE`, `8 x 400 Gb/s InfiniBand` or `25 Gb/s`."""
        if isinstance(value, cls):
            return value
        example = "100 GbE or 8 x 400 Gb/s InfiniBand"
        match = re.fullmatch(_NETWORK, value) if isinstance(value, str) else None
        if match is None or match[1] == "0":
            raise refused(value, "is not a network", example)
        if match[3] == "GbE" and match[4]:
            raise refused(value, "names two kinds of network", example)
        unit, kind = ("Gb/s", "Ethernet") if match[3] == "GbE" else (match[3], match[4])
        return cls(int(match[1] or 1), FLOW.parse(f"{match[2]} {unit}"), kind.strip() if kind else None)

    @property
    def bandwidth(self) -> float:
        """Bytes/s of all ports of a node together."""
        return self.ports * self.port_bandwidth

    def __str__(self) -> str:
        flow = f"{self.port_bandwidth / 125e6:.15g} Gb/s"  # networks are sold in bits, whatever is shorter
        if FLOW.parse(flow) != self.port_bandwidth:
            flow = FLOW.show(self.port_bandwidth)
        short = flow.removesuffix("Gb/s") + "GbE"
        each = short if self.kind == "Ethernet" and flow.endswith(" Gb/s") else f"{flow} {self.kind or ''}"
        return (f"{self.ports} x {each}" if self.ports > 1 else each).strip()


@dataclass(frozen=True, slots=True)
class Span:
    """A length in time or in steps, or `auto`; exactly one of them is given. Never is infinite seconds."""

    seconds: float | None = None
    steps: int | None = None
    auto: bool = False  # follows from what is measured

    @classmethod
    def parse(cls, value: object) -> Self:
        """`10 min`, `500 steps`, `never` or `auto`."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.strip() == "auto":
            return cls(auto=True)
        match = re.fullmatch(r"\s*([0-9]{1,10})\s*steps?\s*", value) if isinstance(value, str) else None
        if match is not None:
            return cls(steps=whole(match[1], "a number of steps", "500 steps"))
        try:
            return cls(seconds=SECONDS.parse(value))
        except ValueError as error:
            raise ValueError(
                str(error).replace("for example 30 ms", "for example 10 min or 500 steps")
            ) from None

    def __str__(self) -> str:
        if self.auto:
            return "auto"
        return f"{self.steps} steps" if self.seconds is None else SECONDS.show(self.seconds)


@dataclass(frozen=True, slots=True)
class Time:
    """How long one call takes: `mean` seconds, plus `each` per item of a batch; `p99` of all."""

    mean: float
    each: float | None = None
    p99: float | None = None

    @classmethod
    def parse(cls, value: object) -> Self:
        """`80 ms`, `80 ms, p99 200 ms` or `5 ms + 0.1 ms each, p99 12 ms`."""
        if isinstance(value, cls):
            return value
        text = value if isinstance(value, str) else ""
        pattern = r"\s*([^,+]+?)\s*(?:\+\s*([^,+]+?)\s+each\s*)?(?:,\s*p99\s+([^,+]+?)\s*)?"
        match = re.fullmatch(pattern, text) if len(text) <= 200 else None
        if match is None and (isinstance(value, bool) or value != 0):
            example = "80 ms or 5 ms + 0.1 ms each, p99 12 ms"
            raise refused(value, "is not the time of a call", example)
        mean = SECONDS.parse(match[1]) if match else 0.0
        each = SECONDS.parse(match[2]) if match and match[2] else None
        p99 = SECONDS.parse(match[3]) if match and match[3] else None
        if p99 is not None and p99 < mean:
            raise ValueError(f"{quoted(value)}: the p99 is below the mean; write the larger one last")
        return cls(mean, each, p99)

    def __str__(self) -> str:
        each = "" if self.each is None else f" + {SECONDS.show(self.each)} each"
        p99 = "" if self.p99 is None else f", p99 {SECONDS.show(self.p99)}"
        return f"{SECONDS.show(self.mean)}{each}{p99}"


@dataclass(frozen=True, slots=True)
class Batch:
    """At most `size` items in one call, waiting at most `within` seconds for them."""

    size: int
    within: float

    @classmethod
    def parse(cls, value: object) -> Self:
        """`32 within 5 ms`."""
        if isinstance(value, cls):
            return value
        match = re.fullmatch(r"\s*([0-9]{1,10})\s+within\s+(.+)", value) if isinstance(value, str) else None
        if match is None:
            raise refused(value, "is not a batch", "32 within 5 ms")
        size, within = whole(match[1], "a batch", "32 within 5 ms"), SECONDS.parse(match[2])
        if size == 0 or within == float("inf"):
            raise refused(value, "would never be full", "32 within 5 ms")
        return cls(size, within)

    def __str__(self) -> str:
        return f"{self.size} within {SECONDS.show(self.within)}"


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a failed call is tried again, how long after, and which share of all calls may be retries."""

    count: float
    after: float | None = None
    budget: float | None = None

    @classmethod
    def parse(cls, value: object) -> Self:
        """`3`, `3 after 2 s`, `3 after 2 s, budget 10 %` or `unlimited`."""
        if isinstance(value, cls):
            return value
        text = value if isinstance(value, str) else ""
        pattern = r"\s*([^,]+?)\s*(?:\s+after\s+([^,]+?)\s*)?(?:,\s*budget\s+([^,]+?)\s*)?"
        match = re.fullmatch(pattern, text) if len(text) <= 200 else None
        count, after, budget = match.groups() if match else (value, None, None)
        try:
            number = NUMBER.parse(count)
        except ValueError:
            number = 0.5
        if number % 1 != 0 and number != float("inf"):
            raise refused(value, "is not a number of retries", "2 after 100 ms")
        return cls(number, SECONDS.parse(after) if after else None, SHARE.parse(budget) if budget else None)

    def __str__(self) -> str:
        after = "" if self.after is None else f" after {SECONDS.show(self.after)}"
        budget = "" if self.budget is None else f", budget {SHARE.show(self.budget)}"
        return f"{NUMBER.show(self.count)}{after}{budget}"
