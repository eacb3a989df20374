"""What does `twinhull load` do? It sends bodies at a stated pace and prints what came back."""

import asyncio
import itertools
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import msgspec

from twinhull.errors import TwinhullError
from twinhull.serve.load_generator import Generator, Shot, constant, poisson
from twinhull.serve.load_report import LoadReport, Record
from twinhull.units import RATE, SECONDS, Measure

Arrivals = Literal["poisson", "constant", "file"]
INTERRUPTED = 130
FASTEST = 1e6  # requests a second; one core makes about 30,000


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a file that says more than the body."""

    body: msgspec.Raw
    path: str | None = None
    at: float | None = None


def main(
    url: str,
    *,
    requests: Path | None = None,
    path: str | None = None,
    body: str | None = None,
    rate: str = "50/s",
    duration: str = "10 s",
    deadline: str = "200 ms",
    arrivals: Arrivals = "poisson",
    seed: int = 0,
    out: Path | None = None,
    fmt: Literal["text", "json"] = "text",
) -> int:
    """Send load, print the report, write the records; 1 if a request failed, 130 after Ctrl-C.

    `arrivals` says when requests are due: as a crowd comes or as a clock ticks, at `rate` and for `duration`,
    or at the `at` of each line of the file. Raises TwinhullError for what the caller can mend.
    """
    generator = Generator(
        url, deadline_s=_parsed(SECONDS, "deadline", deadline), keep_records=out is not None
    )
    shots = shots_of(body, requests, path=path or generator.path)
    if arrivals == "file":
        schedule, source, for_s = _times(shots, requests), iter(shots), None
    else:
        schedule = _paced(_parsed(RATE, "rate", rate), arrivals, seed)
        source, for_s = itertools.cycle(shots), _parsed(SECONDS, "duration", duration)
    if out is not None:
        _write(out, [])  # now, rather than find after the load that it cannot be written
    report = _loop(_send(generator, source, schedule, for_s))
    if out is not None:
        _write(out, generator.records)
    print(json.dumps(report.to_json()) if fmt == "json" else report.text())
    return INTERRUPTED if report.interrupted else int(report.failed)


def shots_of(body: str | None, file: Path | None, *, path: str) -> list[Shot]:
    """The requests that a body or a file of NDJSON lines asks for; `path` where a line names none.

    Raises TwinhullError with the line that is wrong.
    """
    if (body is None) == (file is None):
        raise TwinhullError(
            "load needs either a body or a file of requests.", hint="--body '{...}' or --requests FILE"
        )
    if body is not None:
        shots = [_shot(body.encode(), "the body", path)]
    else:
        assert file is not None
        try:
            lines = file.read_bytes().splitlines()
        except OSError as error:
            raise TwinhullError(f"{file} cannot be read: {error.strerror or error}.") from error
        shots = [_shot(line, f"{file}:{n}", path) for n, line in enumerate(lines, 1) if line.strip()]
    if not shots:
        raise TwinhullError(f"{file} is empty.", hint="Each line is one JSON body.")
    for wanted in {shot.path for shot in shots}:
        _check_path(wanted)
    return shots


def _shot(line: bytes, place: str, path: str) -> Shot:
    _check_json(line, place)
    try:
        said = _line_decoder.decode(line)
    except msgspec.ValidationError:
        return Shot(path, line.strip())  # a bare body
    if said.at is not None and said.at < 0:
        raise TwinhullError(f"at is {said.at:g}; it must not be before the start, 0.", place=place)
    return Shot(said.path or path, bytes(said.body), said.at)


def _check_path(path: str) -> None:
    if path == "/":
        raise TwinhullError(
            "nothing says which endpoint is meant.", hint="Give a path, for example --path /recommend"
        )
    if not (path.startswith("/") and path.isascii() and path.isprintable()) or " " in path:
        raise TwinhullError(f"the path {path!r} must begin with / and write other characters as %XX.")


def _check_json(text: bytes, place: str) -> None:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise TwinhullError(f"not JSON: {error}.", place=place) from error


def _times(shots: list[Shot], file: Path | None) -> Iterator[float]:
    times = [shot.at for shot in shots if shot.at is not None]
    if len(times) < len(shots):
        raise TwinhullError(
            f"{file or 'the body'} does not say when each request is due.",
            hint='Each line needs {"at": SECONDS, "body": ...}; or give a rate.',
        )
    if times != sorted(times):
        raise TwinhullError(f"{file} is not in order: at must not decrease from line to line.")
    return iter(times)


def _paced(rate: float, arrivals: Arrivals, seed: int) -> Iterator[float]:
    if not 0 < rate <= FASTEST:
        raise TwinhullError(f"the rate {RATE.show(rate)} must be above 0 and at most {RATE.show(FASTEST)}.")
    return constant(rate) if arrivals == "constant" else poisson(rate, seed)


def _parsed(measure: Measure, name: str, text: str) -> float:
    try:
        value = measure.parse(text)
    except ValueError as error:
        raise TwinhullError(f"{name}: {error}.") from error
    if value == 0 or math.isinf(value):
        raise TwinhullError(f"the {name} is {text}; it must be above 0 and have an end.")
    return value


async def _send(
    generator: Generator, shots: Iterator[Shot], schedule: Iterator[float], for_s: float | None
) -> LoadReport:
    await generator.reach()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    async with generator:
        generator.start("load", shots, schedule, for_s=for_s)
        finishing = asyncio.create_task(generator.finish())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({finishing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if finishing.done():
            return finishing.result()
        finishing.cancel()
        return await generator.finish(at_once=True)


def _loop(main: Any) -> LoadReport:  # Any: a coroutine, whose three types nobody wants to read
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def _write(out: Path, records: list[Record]) -> None:
    try:
        with out.open("wb") as file:
            file.writelines(msgspec.json.encode(asdict(record)) + b"\n" for record in records)
    except OSError as error:
        raise TwinhullError(f"{out} cannot be written: {error.strerror or error}.") from error


_line_decoder = msgspec.json.Decoder(_Line)
