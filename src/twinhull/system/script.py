"""How is a command of the user's read? Split into words as a shell would, without a shell, and filled in."""

import re
import shlex
from collections.abc import Mapping

from twinhull.units import closest, quoted

CHECKPOINT = "checkpoint"  # the newest checkpoint that can be trusted
PUBLISH = "publish"  # the directory in which the script leaves its model
PLACEHOLDERS = (CHECKPOINT, "checkpoints", PUBLISH, "ranks", "run")
_BRACES = re.compile(r"\{([A-Za-z_]\w*)\}")


def words_problem(command: str) -> str:
    """What is wrong with the spelling of a command; empty if nothing is."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        return f"{quoted(command)} cannot be split into words: {error}; close the quote, or escape it with \\"
    if not words or not words[0]:
        return "has no program; write for example torchrun --nproc-per-node {ranks} train.py"
    return _placeholder_problem(command)


def directory_problem(directory: str) -> str:
    """What is wrong with the directory that a command publishes from; empty if nothing is."""
    used = {CHECKPOINT, PUBLISH, "ranks"}.intersection(_BRACES.findall(directory))
    if used:
        return f"{{{min(used)}}} is no place for a model; write for example out/, or {{run}}/out"
    return _placeholder_problem(directory)


def holds(text: str, name: str) -> bool:
    """Whether a placeholder is in a text."""
    return name in _BRACES.findall(text)


def filled(text: str, values: Mapping[str, str]) -> str:
    """A text with its placeholders filled in; what is in braces and no placeholder stays."""
    return _BRACES.sub(lambda match: values.get(match[1], match[0]), text)


def words(command: str, values: Mapping[str, str]) -> list[str]:
    """The program and its arguments.

    While there is no checkpoint, an argument that wants one is dropped, and with an argument that is nothing
    else, the option before it: `--resume {checkpoint}`, `--resume={checkpoint}`.
    """
    found: list[str] = []
    for word in shlex.split(command):
        if holds(word, CHECKPOINT) and not values[CHECKPOINT]:
            if word == f"{{{CHECKPOINT}}}" and len(found) > 1 and found[-1].startswith("-"):
                found.pop()
            continue
        found.append(filled(word, values))
    return found


def _placeholder_problem(text: str) -> str:
    for name in _BRACES.findall(text):
        if name not in PLACEHOLDERS:
            known = ", ".join(f"{{{one}}}" for one in PLACEHOLDERS)
            near = closest(name, list(PLACEHOLDERS))
            return f"{{{name}}} is nothing that can be filled in.{near} Known: {known}"
    return ""
