"""Which text stands for which number: `30 ms`, `80 GB`, `2000/s`, `99.9 %`, `2.10 USD/h` <-> SI floats.

Inside there are only seconds, bytes, bytes/s, 1/s, shares of 1 and USD/s. Each `Measure` has one `parse` and
one `show`; `parse(show(x)) == x` exactly, and of all spellings the shortest wins. Infinity is a word: `never`
for times, `unlimited` for the rest.
"""

import difflib
import math
import re
from dataclasses import dataclass
from decimal import Context, Decimal

_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?"
_EXACT = Context(prec=40)  # decimal, so that 99.9 % is 0.999 and not the float after it
_AMOUNT = re.compile(rf"\s*({_NUMBER})\s*(\S.*?)?\s*")
MOST_GUESSED = 500
HOUR = 3600
DAY = 24 * HOUR
MONTH = 730 * HOUR  # a twelfth of 365 days: the month of cloud bills
YEAR = 365 * DAY


def quoted(value: object) -> str:
    """A value as it is quoted in messages: in double quotes, cut when long."""
    text = value if isinstance(value, str) else _plain(value)
    text = "".join(c if c.isprintable() else "?" for c in text)
    text = text if len(text) <= 40 else text[:37] + "..."
    return f'"{text}"' if isinstance(value, str) else text


def refused(value: object, problem: str, example: str) -> ValueError:
    """The error for a value that a file must not hold: the value, what is wrong with it, what to write."""
    return ValueError(f"{quoted(value)} {problem}; write for example {example}")


def closest(word: str, known: list[str]) -> str:
    """The known word that was probably meant, as a sentence after a space; empty when none is near."""
    if len(known) > MOST_GUESSED:  # comparing takes time, and a guess among thousands is no help
        return ""
    by_folded = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(word[:60].casefold(), list(by_folded), n=1)
    return f' Did you mean "{by_folded[near[0]]}"?' if near else ""


@dataclass(frozen=True, slots=True)
class Measure:
    """One kind of quantity: what it is called, an example, and each unit as a ratio to the SI one."""

    what: str
    example: str
    units: dict[str, tuple[int, int]]
    infinity: str = ""
    most: float = math.inf

    def parse(self, value: object) -> float:
        """The SI number that a text stands for. Raises ValueError, with an example, for anything else."""
        if isinstance(value, str):
            return self._parse_text(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refused(value, f"is not {self.what}", self.example)
        if value == 0 or "" in self.units:
            return self._bounded(float(value), value)
        raise refused(value, "has no unit", self.example)

    def show(self, value: float) -> str:
        """The shortest text that `parse` turns into exactly this number."""
        if value == 0:
            return "0"
        if math.isinf(value):
            return self.infinity
        spellings = [(number, unit) for unit in self.units for number in self._numbers(value, unit)]
        number, unit = min(spellings, key=lambda pair: (len(pair[0]), "." in pair[0]))
        return _joined(number, unit)

    @property
    def pattern(self) -> str:
        """A regular expression that every accepted text matches, for editors."""
        units = "|".join(re.escape(unit) for unit in self.units if unit)
        optional = "?" if "" in self.units else ""
        word = f"|{self.infinity}" if self.infinity else ""
        return rf"^(\s*{_NUMBER}\s*({units}){optional}\s*{word})$"

    def _parse_text(self, text: str) -> float:
        if self.infinity and text.strip() == self.infinity:
            return math.inf
        match = _AMOUNT.fullmatch(text) if len(text) <= 60 else None
        if match is None:
            negative = re.match(r"\s*-\s*[0-9]", text)
            raise refused(text, "is negative" if negative else f"is not {self.what}", self.example)
        number, unit = match[1], match[2] or ""
        if unit in self.units:
            up, down = self.units[unit]
            exact = _EXACT.divide(_EXACT.multiply(Decimal(number), up), down)
            return self._bounded(float(exact), text)
        if float(number) == 0 and not unit:
            return 0.0
        if not unit:
            raise refused(text, "has no unit", self.example)
        units = [known for known in self.units if known]
        meant = closest(unit, units) or f" Units: {', '.join(units)}"
        raise refused(text, f"is not {self.what}", f"{self.example}.{meant}")

    def _bounded(self, number: float, said: object) -> float:
        if math.isnan(number) or number < 0:
            raise refused(said, f"is not {self.what}", self.example)
        if math.isinf(number):
            way_out = f'; write "{self.infinity}" if that is meant' if self.infinity else ""
            raise ValueError(f"{quoted(said)} is too large for {self.what}{way_out}")
        if number > self.most:
            raise ValueError(f"{quoted(said)} is more than {self.show(self.most)}")
        return number

    def _numbers(self, value: float, unit: str) -> list[str]:
        """The numbers that, written before this unit, read as exactly this value."""
        up, down = self.units[unit]
        exact = _EXACT.divide(_EXACT.multiply(Decimal(repr(value)), down), up)
        texts = {_short(f"{exact:.15g}"), _short(repr(float(exact))), _short(str(exact))}
        return [text for text in texts if self._reads(_joined(text, unit), value)]

    def _reads(self, text: str, value: float) -> bool:
        try:
            return self.parse(text) == value
        except ValueError:
            return False


def _short(number: str) -> str:
    """`30.0` as `30`, `1e-05` as `1e-5`."""
    mantissa, _, exponent = number.lower().partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def _joined(number: str, unit: str) -> str:
    return f"{number}{unit}" if not unit or unit.startswith("/") else f"{number} {unit}"


def _plain(value: object) -> str:
    """A value that is no text, as the file would write it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    return str(value)


SECONDS = Measure(
    "a time",
    "30 ms",
    {
        "s": (1, 1),
        "ms": (1, 1000),
        "us": (1, 1_000_000),
        "ns": (1, 1_000_000_000),
        "min": (60, 1),
        "h": (HOUR, 1),
        "day": (DAY, 1),
    },
    infinity="never",
)
_BYTES = {
    "B": (1, 1),
    "kB": (10**3, 1),
    "MB": (10**6, 1),
    "GB": (10**9, 1),
    "TB": (10**12, 1),
    "PB": (10**15, 1),
    "KiB": (2**10, 1),
    "MiB": (2**20, 1),
    "GiB": (2**30, 1),
    "TiB": (2**40, 1),
}
_BITS = {
    "b/s": (1, 8),
    "kb/s": (10**3, 8),
    "Mb/s": (10**6, 8),
    "Gb/s": (10**9, 8),
    "Tb/s": (10**12, 8),
}
BYTES = Measure("a size", "64 MB", _BYTES, infinity="unlimited")
FLOW = Measure(
    "a bandwidth",
    "25 Gb/s",
    {f"{unit}/s": ratio for unit, ratio in _BYTES.items()} | _BITS,
    infinity="unlimited",
)
RATE = Measure(
    "a rate",
    "2000/s",
    {"/s": (1, 1), "/min": (1, 60), "/h": (1, HOUR), "/day": (1, DAY)},
    infinity="unlimited",
)
SHARE = Measure("a share", "99.9 %", {"%": (1, 100)}, most=1.0)
USD = Measure(
    "an amount of money over time",
    "2.10 USD/h",
    {
        "USD/s": (1, 1),
        "USD/h": (1, HOUR),
        "USD/day": (1, DAY),
        "USD/month": (1, MONTH),
        "USD/year": (1, YEAR),
    },
    infinity="unlimited",
)
NUMBER = Measure(
    "a number",
    "3",
    {"": (1, 1), "k": (10**3, 1), "M": (10**6, 1), "B": (10**9, 1), "T": (10**12, 1)},
    infinity="unlimited",
)
