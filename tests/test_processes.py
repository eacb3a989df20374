import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from twinhull.processes import Child, Command, Exit

pytestmark = pytest.mark.live


class Heard:
    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.pids: list[int] = []
        self.exits: list[Exit] = []

    def child(self, code: str, tmp_path: Path, **options: object) -> Child:
        command = Command("c", (sys.executable, "-S", "-c", code), dict(os.environ), tmp_path, **options)  # type: ignore
        return Child(
            command,
            lambda _, line: self.lines.append(line),
            lambda _, pid: self.pids.append(pid),
            self.exits.append,
        )


async def until(holds: Callable[[], object], limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.01)


def wait_for(holds: Callable[[], object], limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


SLEEPER = "import time; print('here', flush=True); time.sleep(60)"


def test_a_killed_child_comes_back(tmp_path: Path) -> None:
    async def story() -> None:
        heard = Heard()
        child = heard.child(SLEEPER, tmp_path)
        running = asyncio.create_task(child.run())
        await until(lambda: len(heard.lines) == 1)
        os.kill(heard.pids[0], signal.SIGKILL)
        await until(lambda: len(heard.lines) == 2)
        await child.stop()
        await running
        assert [e.code for e in heard.exits] == [-signal.SIGKILL, -signal.SIGTERM]
        assert heard.exits[0].back_in_s is not None
        assert heard.exits[1].back_in_s is None
        assert not any(psutil.pid_exists(pid) for pid in heard.pids)

    asyncio.run(story())


def test_a_final_exit_code_keeps_a_child_down(tmp_path: Path) -> None:
    async def story() -> None:
        heard = Heard()
        child = heard.child("raise SystemExit(75)", tmp_path, final=frozenset({75}))
        await child.run()
        assert child.code == 75
        assert len(heard.pids) == 1

    asyncio.run(story())


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    async def story() -> None:
        heard = Heard()
        deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER
        child = heard.child(deaf, tmp_path, grace_s=0.2)
        running = asyncio.create_task(child.run())
        await until(lambda: heard.lines)
        await child.stop()
        await running
        assert heard.exits[-1].code == -signal.SIGKILL

    asyncio.run(story())


def test_a_grandchild_in_the_group_ends_with_the_child(tmp_path: Path) -> None:
    async def story() -> None:
        heard = Heard()
        forks = "import os, time\npid = os.fork()\nos.write(1, f'{os.getpid()}\\n'.encode())\n"
        parent = forks + "time.sleep(60 if pid == 0 else 0.2)"
        child = heard.child(parent, tmp_path, final=frozenset({0}))
        await child.run()
        grandchildren = [int(line) for line in heard.lines]
        assert len(grandchildren) == 2
        await until(lambda: not any(_lives(pid) for pid in grandchildren))

    asyncio.run(story())


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_hold_file_keeps_a_child_down_until_it_is_gone(tmp_path: Path) -> None:
    async def story() -> None:
        heard = Heard()
        hold = tmp_path / "hold"
        hold.touch()
        child = heard.child(SLEEPER, tmp_path, hold=hold)
        running = asyncio.create_task(child.run())
        await asyncio.sleep(0.3)
        assert not heard.pids
        hold.unlink()
        await until(lambda: heard.lines)
        await child.stop()
        await running

    asyncio.run(story())


def test_stop_before_the_first_start_starts_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        heard = Heard()
        hold = tmp_path / "hold"
        hold.touch()
        child = heard.child(SLEEPER, tmp_path, hold=hold)
        running = asyncio.create_task(child.run())
        await asyncio.sleep(0)
        await child.stop()
        await running
        assert not heard.pids

    asyncio.run(story())


def test_a_child_that_cannot_be_started_says_why_and_is_tried_again(tmp_path: Path) -> None:
    async def story() -> None:
        heard = Heard()
        place = tmp_path / "later"
        child = heard.child(SLEEPER, place)
        running = asyncio.create_task(child.run())
        await until(lambda: heard.exits)
        assert heard.exits[0].code == 127
        assert b"No such file" in heard.lines[0]
        place.mkdir()
        await until(lambda: b"here" in heard.lines)
        await child.stop()
        await running

    asyncio.run(story())


def test_a_line_without_end_is_cut_and_the_rest_still_heard(tmp_path: Path) -> None:
    async def story() -> None:
        heard = Heard()
        endless = (
            "import sys; sys.stdout.write('x' * 3_000_000); sys.stdout.write('\\nlast'); sys.stdout.flush()"
        )
        child = heard.child(endless, tmp_path, final=frozenset({0}))
        await child.run()
        assert heard.lines[-1] == b"last"
        assert sum(map(len, heard.lines)) == 3_000_004

    asyncio.run(story())


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, {arguments}])
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        "'-c', 'from twinhull import processes as p; p.die_with_parent(); p.time.sleep(60)'",
        "'-m', 'twinhull.processes', 'sleep', '60'",
    ],
    ids=["python", "foreign program"],
)
def test_a_child_ends_when_its_parent_is_killed(arguments: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(arguments=arguments)], stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_for(lambda: psutil.Process(pid).cmdline()[-1] != "" and _settled(pid))
        parent.kill()
    wait_for(lambda: not _lives(pid))


def _settled(pid: int) -> bool:
    """Asleep in its own last call, so the bond with the parent is made."""
    process = psutil.Process(pid)
    return (
        process.status() == psutil.STATUS_SLEEPING
        and process.cpu_times().user + process.cpu_times().system > 0.01
    )
