import subprocess
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from twinhull import broker


class Server:
    """A real broker that can be killed, also as a machine that loses power would."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = broker.address(directory)
        self.keys = broker.Keys("shop")
        self._process: subprocess.Popen[bytes] | None = None
        self._sizes: deque[tuple[float, int]] = deque()

    def start(self) -> None:
        self._sizes.clear()
        self._process = subprocess.Popen(broker.command(self.directory), stdout=subprocess.DEVNULL)
        broker.wait_ready(self.url)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def note_size(self) -> None:
        """Remember how long the append-only file is now, for `lose_power`."""
        self._sizes.append((time.monotonic(), self._log.stat().st_size))

    def logged(self, text: bytes) -> bool:
        """Whether the append-only file holds this already; with everysec it may lag what was acknowledged."""
        return text in self._log.read_bytes()

    def lose_power(self, seconds: float) -> int:
        """Kill the broker and cut off what it wrote to its file in the last seconds; the bytes cut off."""
        since = time.monotonic() - seconds
        self.kill()
        kept = next((size for at, size in self._sizes if at >= since), self._log.stat().st_size)
        lost = self._log.stat().st_size - kept
        with self._log.open("rb+") as file:
            file.truncate(kept)
        return lost

    @property
    def _log(self) -> Path:
        return max((self.directory / "appendonlydir").glob("*.incr.aof"))

    def end(self) -> None:
        if self._process is not None:
            self.kill()
        broker.clear(self.directory)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "broker")
    server.start()
    yield server
    server.end()


@pytest.fixture
def client(server: Server):
    with broker.connect(server.url) as client:
        yield client
