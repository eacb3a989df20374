"""What does the supervisor keep of a run? The journal, one log file a process, and `up.json`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from twinhull.deploy.record import SAID, Record
from twinhull.rundir import RunDirectory, write_whole
from twinhull.trace import Journal

_LOG_LIMIT = 20 << 20  # bytes; then the file is set aside once, so a run keeps at most twice this a process


@dataclass(slots=True)
class Keeper:
    """Writes what was heard. A full disk costs lines, never the run."""

    directory: RunDirectory
    lost: int = 0
    _files: dict[str, BinaryIO] = field(default_factory=dict)
    _journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        self._journal = Journal(self.directory.journal)

    def keep(self, said: Record) -> None:
        """Put a record into the journal; plain text goes to the log files only."""
        if said.kind and said.kind != SAID:
            level = {} if said.level == "info" else {"level": said.level}
            self._journal.event(said.t, said.kind, said.role, {**said.facts, **level})
        for name, value in said.sample.items():
            self._journal.sample(said.t, name, value)

    def keep_line(self, name: str, line: bytes) -> None:
        """Append a line of a child to its log file."""
        try:
            file = self._files.get(name) or self._open(name)
            file.write(line + b"\n")
            if file.tell() > _LOG_LIMIT:
                del self._files[name]
                file.close()
                path = self.directory.logs / f"{name}.log"
                path.replace(path.with_name(f"{name}.log.1"))
        except OSError:
            self.lost += 1

    def write_up(self, facts: Mapping[str, Any]) -> None:  # Any: JSON
        """Replace `up.json` whole."""
        try:
            write_whole(self.directory.up, json.dumps(facts, indent=1))
        except OSError:
            self.lost += 1

    def flush(self) -> None:
        """Write what waits."""
        self._journal.flush()

    def close(self) -> None:
        """Write what waits and close all files."""
        for file in self._files.values():
            file.close()
        self._journal.close()

    def _open(self, name: str) -> BinaryIO:
        file = (self.directory.logs / f"{name}.log").open("ab", buffering=0)
        self._files[name] = file
        return file
