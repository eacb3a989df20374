"""Draw the live view of a run that has been, from its journal: `docs/picture.py RUN SECONDS > docs/live.svg`.

SECONDS is the moment to show, counted from the start of the run. Nothing in the picture is invented.
"""

import io
import sys
from pathlib import Path

from rich.console import Console

from twinhull import trace
from twinhull.deploy.board import Board
from twinhull.deploy.live import view
from twinhull.deploy.record import Record
from twinhull.rundir import RunDirectory
from twinhull.system.load import load


def main() -> None:
    """Read the journal up to the moment, fold it into a board, print the view as SVG."""
    run, moment_s = RunDirectory(Path(sys.argv[1])), float(sys.argv[2])
    seen = trace.read(run.journal)
    now = seen.events[0].t + moment_s
    records = [
        Record(e.t, e.subject, e.kind, e.fields.get("level", "info"), facts=e.fields) for e in seen.events
    ]
    records += [Record(t, "", "", sample={n: v}) for n, points in seen.samples.items() for t, v in points]
    board, url = Board(), ""
    for record in sorted((r for r in records if r.t <= now), key=lambda r: r.t):
        board.hear(record)
        url = str(record.facts.get("url", url)) if record.kind == "gateway" else url
    system = load(run.system).system
    deadlines = {name: end.deadline or 1.0 for name, end in system.endpoints.items()}
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(view(board, name=system.name, url=url, deadlines=deadlines, height=40, now=now))
    print(console.export_svg(title="twinhull up"))


if __name__ == "__main__":
    main()
