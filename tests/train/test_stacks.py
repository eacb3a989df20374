import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from twinhull.train.supervise import live, stacks

pytestmark = pytest.mark.live

PROGRAM = """
import sys, threading
from pathlib import Path
from twinhull.train.supervise import live, stacks

def waits_for_a_lock_that_nobody_opens():
    print("ready", flush=True)
    lock.acquire()

def works_on_and_on():
    print("ready", flush=True)
    number = 0
    while True:
        number += 1
        number -= 1

def sleeps_beside():
    threading.Event().wait()

folder, what = Path(sys.argv[1]), sys.argv[2]
beat = live.Beat(folder, 0)
if what != "unarmed":
    stacks.arm(folder, 0)
threading.Thread(target=sleeps_beside, daemon=True).start()
lock = threading.Lock()
lock.acquire()
{"works": works_on_and_on}.get(what, waits_for_a_lock_that_nobody_opens)()
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a process that is rank 0 in this test's directory, and busy in one way or another."""
    started: list[subprocess.Popen[str]] = []

    def start(what: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", PROGRAM, str(tmp_path), what]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def collected(folder: Path, within_s: float = 10.0) -> str:
    return stacks.collect(folder, live.read(folder), within_s)[0]


def test_a_rank_that_waits_for_ever_is_seen_with_its_main_thread_first(
    rank: Callable[[str], object], tmp_path: Path
) -> None:
    rank("hangs")
    first = collected(tmp_path)
    here, there = first.index("waits_for_a_lock"), first.index("sleeps_beside")
    assert here < there
    assert not stacks.moved(first, collected(tmp_path))


def test_a_rank_that_works_is_seen_to_move(rank: Callable[[str], object], tmp_path: Path) -> None:
    rank("works")
    first = collected(tmp_path)
    assert any(stacks.moved(first, collected(tmp_path)) for _ in range(20))


def test_a_stopped_rank_is_said_to_be_stopped(
    rank: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = rank("hangs")
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert collected(tmp_path) == "stopped by a signal (SIGSTOP)"


def test_a_rank_that_is_gone_is_said_to_be_gone(
    rank: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = rank("hangs")
    process.kill()
    process.wait()
    assert collected(tmp_path) == "gone"


def test_a_rank_that_does_not_expect_the_signal_is_not_sent_it(
    rank: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = rank("unarmed")
    assert collected(tmp_path) == "has only just begun to start"
    assert psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE


def test_of_a_deep_stack_the_inner_end_is_kept() -> None:
    frames = "\n".join(f'  File "deep.py", line {n} in f' for n in range(100))
    other = f"Thread 0x2 (most recent call first):\n{frames}"
    text = stacks.trimmed(f"{other}\n\nCurrent thread 0x1 (most recent call first):\n{frames}\n")
    assert text.startswith("Current thread")
    assert text.count("line 0 in") == 2
    assert len(text.splitlines()) == 46
