"""The numbers of each step as lines of JSON, for people, notebooks and trackers.

A step that is done again after a restart has one line of each time: the last one counts, and has the higher
`generation`. What is not finite is `null`, since JSON has no word for it.
"""

import logging
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger(__name__)

EVERY_S = 1.0
MOST_BYTES = 64 << 20  # then the file becomes NAME.1.jsonl, in place of an older one, and a new one begins
_PLAIN = (float, int, str)
_MOST_STEPS = 4096  # kept unwritten: their tensors take memory of the device


class Metrics:
    """Keeps the numbers of steps and writes them once a second; without a path it does nothing.

    The law: what happens to the file never disturbs training, and what is in it is whole lines.
    """

    def __init__(self, path: Path | None, generation: int) -> None:
        self._path, self._generation = path, generation
        self._kept: list[dict[str, Any]] = []  # Any: numbers, or tensors of one on a device
        self._written_at = time.monotonic()
        self._told = False
        self._encode = msgspec.json.Encoder().encode_lines

    def stepped(self, numbers: dict[str, Any]) -> None:  # Any: as above
        """One more step; `numbers` has its number and times and what was reported. It is kept, not copied."""
        if self._path is None:
            return
        numbers["t"], numbers["generation"] = time.time(), self._generation
        self._kept.append(numbers)
        if len(self._kept) >= _MOST_STEPS or time.monotonic() - self._written_at >= EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write what is kept."""
        kept, self._kept = self._kept, list[dict[str, Any]]()
        self._written_at = time.monotonic()
        if self._path is None or not kept:
            return
        _read(kept)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if _append(self._path, self._encode(kept)) >= MOST_BYTES:
                self._path.replace(self._path.with_suffix(".1.jsonl"))
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        if not self._told:
            facts = {"file": str(self._path), "reason": error.strerror or str(error)}
            log.warning("metrics of steps are lost", extra=facts)
            self._told = True


def _append(path: Path, lines: bytes) -> int:
    """Add all of it or nothing; gives the size of the file then. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            written = file.write(lines)
            while written < len(lines):  # the disk has room for a part, or for none: the next write tells
                written += file.write(lines[written:])
        except OSError:
            file.truncate(before)
            raise
        return before + len(lines)


def _read(steps: list[dict[str, Any]]) -> None:  # Any: as above
    """Replace what is no plain number by its number: the tensors of one device in one go."""
    tensors: dict[Any, list[tuple[dict[str, Any], str]]] = defaultdict(list)  # Any: a torch.device
    for step in steps:
        for name, value in step.items():
            if isinstance(value, _PLAIN):
                continue
            if hasattr(value, "device") and hasattr(value, "detach"):
                tensors[value.device].append((step, name))
            else:
                step[name] = float(value)  # of numpy, say
    for places in tensors.values():
        import torch

        together = torch.stack([step[name].detach().reshape(()).double() for step, name in places])
        for (step, name), number in zip(places, together.tolist(), strict=True):
            step[name] = number
