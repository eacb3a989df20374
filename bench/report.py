"""How does a bench say what it measured? The machine, a table, with --json one JSON object as last line."""

import argparse
import json
import operator
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

_HOLDS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


@dataclass(frozen=True, slots=True)
class Result:
    """One measured number. `bar` is what it must hold, such as `<= 150`; None: it is only printed.

    `peer` is what it was compared with, in the same run.
    """

    name: str
    value: float
    unit: str
    bar: str | None = None
    peer: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the bar holds."""
        if self.bar is None:
            return True
        sign, number = self.bar.split()
        return bool(_HOLDS[sign](self.value, float(number)))


def machine() -> str:
    """The machine in words: a number without it means little."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    system = f"{platform.system()} {platform.machine()}"
    return f"{cores} cores, load {load}, Python {platform.python_version()}, {system}"


def table(results: Iterable[Result]) -> str:
    """The results for people."""
    rows = [("result", "value", "unit", "bar", "", "beside")]
    rows += [
        (
            r.name,
            f"{r.value:.4g}",
            r.unit,
            r.bar or "",
            "" if r.bar is None else "ok" if r.ok else "MISSED",
            r.peer or "",
        )
        for r in results
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = {1}
    return "\n".join(
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def run(title: str, measure: Callable[[], list[Result]]) -> None:
    """Measure, print, and leave with 1 if a bar does not hold."""
    run_sections(title, {"all": measure})


def run_sections(title: str, sections: Mapping[str, Callable[[], list[Result]]]) -> None:
    """The same for the sections that the command line names, or for all."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(sections)}; all if none"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    given = parser.parse_args()
    asked: list[str] = given.sections or list(sections)
    if unknown := [name for name in asked if name not in sections]:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(sections)}")
    print(f"{title}\n{machine()}\n", flush=True)
    results: list[Result] = []
    for name in asked:
        if len(sections) > 1:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
        results += sections[name]()
    print(table(results))
    if given.json:
        print(json.dumps({"results": [{**asdict(result), "ok": result.ok} for result in results]}))
    sys.exit(0 if all(result.ok for result in results) else 1)
