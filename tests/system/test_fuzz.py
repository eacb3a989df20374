"""Whatever is done to a file, it loads, or every problem has a place and a message."""

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinhull.system.load import load, load_text
from twinhull.system.places import compose
from twinhull.system.problems import SystemFileError
from twinhull.system.write import dump

FILES = Path(__file__).parent / "files"
VALID = [(FILES / name).read_bytes() for name in ("shop.yaml", "everything.yaml", "mistakes.yaml")]
NASTY = [
    *("0", "-1", "1e999", ".nan", ".inf", "~", "null", "true", "on", "[]", "{}", "''", '"\\0"', '"\\ud800"'),
    *("&a", "*a", "!!python/object:x", "!t", "[[[]]]", "{a: {b: {c: d}}}", "?", "---", "...", "<<", "%", "@"),
    *(
        "|",
        ">",
        "é",
        "..",
        "1..",
        "a:b",
        "app:fit",
        "kind",
        "cache",
        "fit",
        "never",
        "unlimited",
        "task",
        "train",
    ),
    *(
        "*",
        "&",
        "!",
        "#",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "- ",
        "5 ms",
        "100 %",
        "10 min",
        "host",
        "9" * 50,
        "x" * 5000,
    ),
    *("\t", "\n", "\n  ", " ", "\u2028", "\ufeff", "\x00", "\ud83d", "\r", "9" * 50, "x" * 5000),
]
VALUES = [
    0,
    -1,
    1.5,
    1e308,
    True,
    "",
    "8",
    "5 ms",
    "never",
    "unlimited",
    [],
    {},
    [[]],
    [{}],
    {"": 1},
    ["a", "a"],
]
VALUES += ["fit", "rank", "web", "web-queue", "clients", "broker", "cache", "a:b", 10**12, "1..0", "x" * 200]


def bytewise(raw: bytes, rng: random.Random) -> bytes:
    at, change = rng.randrange(len(raw) + 1), rng.randrange(4)
    if change == 0:
        return raw[:at] + bytes([rng.randrange(256)]) + raw[at:]
    if change == 1:
        return raw[:at] + raw[at + rng.randint(1, 20) :]
    if change == 2:
        return raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
    return raw[:at] + raw[rng.randrange(len(raw) + 1) :][: rng.randint(1, 200)] + raw[at:]


def tokenwise(raw: bytes, rng: random.Random) -> bytes:
    tokens = re.split(r"(\s+|[{}\[\],:])", raw.decode("utf-8", "replace"))
    at, other, change = rng.randrange(len(tokens)), rng.randrange(len(tokens)), rng.randrange(4)
    if change == 0:
        del tokens[at]
    elif change == 1:
        tokens[at], tokens[other] = tokens[other], tokens[at]
    else:
        tokens[at] = rng.choice(NASTY)
    return "".join(tokens).encode("utf-8", "surrogatepass")


def linewise(raw: bytes, rng: random.Random) -> bytes:
    lines = raw.split(b"\n")
    at, other, change = rng.randrange(len(lines)), rng.randrange(len(lines)), rng.randrange(4)
    if change == 0:
        del lines[at]
    elif change == 1:
        lines.insert(other, lines[at])
    elif change == 2:
        lines[at] = b" " * rng.randint(0, 6) + lines[at].lstrip()
    else:
        lines[at], lines[other] = lines[other], lines[at]
    return b"\n".join(lines)


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """The text with a few changes to its bytes, words or lines."""
    for _ in range(rng.randint(1, 4)):
        raw = rng.choice([bytewise, tokenwise, linewise])(raw, rng)
    return raw


def rebuilt(raw: bytes, rng: random.Random) -> bytes:
    """The text as JSON, with a few values replaced, removed, added or copied elsewhere."""
    data: Any = compose(raw.decode(), "x").data
    for _ in range(rng.randint(1, 3)):
        holders = [(holder, key) for holder in containers(data) for key in keys(holder)]
        (holder, key), (other, another) = rng.choice(holders), rng.choice(holders)
        change = rng.randrange(4)
        if change == 0:
            del holder[key]
        elif change == 1:
            holder[key] = copy.deepcopy(other[another])
        elif change == 2 and isinstance(holder, dict):
            holder[rng.choice(NASTY)] = copy.deepcopy(rng.choice(VALUES))
        else:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
    return json.dumps(data).encode()


def containers(data: Any) -> Iterator[Any]:
    if isinstance(data, (dict, list)):
        yield data
        for key in keys(data):
            yield from containers(data[key])


def keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(12))
def test_a_mutated_file_loads_or_is_told_what_is_wrong_where(seed: int, tmp_path: Path):
    rng = random.Random(seed)
    path = tmp_path / "x.yaml"
    for _ in range(100):
        raw = rng.choice([mutated, mutated, rebuilt])(rng.choice(VALID), rng)
        path.write_bytes(raw)
        try:
            system = load(path).system
        except SystemFileError as error:
            assert error.problems, raw
            for problem in error.problems:
                assert problem.line >= 1, raw
                assert problem.col >= 1, raw
                assert problem.message.strip(), raw
                assert str(problem).isprintable(), raw
        else:
            assert load_text(dump(system), path).system == system, raw
