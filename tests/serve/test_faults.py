"""What becomes of requests while workers and broker are killed or frozen, and models go bad."""

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(60)]

SLACK_S = 1.5  # a busy machine's; a client that waits for a socket's time-out waits far longer


class Callers:
    """Clients that ask all the time, and note every answer."""

    def __init__(self, hull: Any, path: str, deadline_s: float) -> None:
        self.answers: list[tuple[int, dict[str, Any], float]] = []
        self.deadline_s = deadline_s
        self._hull = hull
        self._path = path
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(4)]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def sources(self, since: int = 0) -> set[str]:
        return {answer.get("source", "failed") for _, answer, _ in self.answers[since:]}

    def _ask(self, number: int) -> None:
        while not self._stop.wait(0.01):
            started = time.monotonic()
            status, answer = self._hull.ask(self._path, {"user": number})
            self.answers.append((status, answer, time.monotonic() - started))

    def check(self) -> None:
        assert {status for status, _, _ in self.answers} == {200}
        assert max(took for _, _, took in self.answers) < self.deadline_s + SLACK_S


def test_every_request_is_answered_while_a_worker_is_killed_and_comes_back(hull, until: Callable[..., Any]):
    with Callers(hull, "/recommend", 0.4) as callers:
        until(lambda: "fresh" in callers.sources())
        hull.kill("worker-scorers-0")
        until(lambda: hull.said("gateway", "breaker opened"))
        hull.start_worker("scorers")
        seen = len(callers.answers)
        until(lambda: "fresh" in callers.sources(seen))
    callers.check()
    assert callers.sources() == {"fresh", "cached"}


def test_every_request_is_answered_while_the_broker_is_frozen(hull, until: Callable[..., Any]):
    with Callers(hull, "/recommend", 0.4) as callers:
        until(lambda: "fresh" in callers.sources())
        hull.signal("broker", signal.SIGSTOP)
        until(lambda: hull.said("gateway", "broker away"))
        seen = len(callers.answers)
        until(lambda: len(callers.answers) > seen + 20)
        assert callers.sources(seen + 5) == {"cached"}
        assert hull.ask("/health", b"", method="GET")[1]["broker"] == "away"
        hull.signal("broker", signal.SIGCONT)
        seen = len(callers.answers)
        until(lambda: "fresh" in callers.sources(seen))
    callers.check()


def test_every_request_is_answered_while_the_broker_is_killed_and_restarted(hull, until: Callable[..., Any]):
    with Callers(hull, "/recommend", 0.4) as callers:
        until(lambda: "fresh" in callers.sources())
        hull.kill("broker")
        until(lambda: hull.said("gateway", "broker away"))
        assert hull.ask("/recommend", {"user": 99})[1]["source"] == "default"
        refused = hull.ask("/events/sales", {"a": 1})
        hull.start_broker()
        seen = len(callers.answers)
        until(lambda: "fresh" in callers.sources(seen))
    callers.check()
    assert refused[0] == 503
    assert all(process.poll() is None for process in hull.processes.values())
    assert hull.ask("/events/sales", {"a": 1})[0] == 202


def test_answers_given_while_the_broker_was_away_become_events_later(hull, until: Callable[..., Any]):
    hull.kill("broker")
    until(lambda: hull.ask("/recommend", {"user": 1})[1]["source"] == "cached")
    hull.start_broker()

    def cached() -> bool:
        with hull.client as client:
            return any(
                b"cached" in fields[b"body"] for _, fields in client.xrange(hull.keys.events("recommend"))
            )

    until(cached)


def test_a_queue_that_is_deleted_is_made_anew(hull):
    with hull.client as client:
        client.delete(hull.keys.queue("web"), hull.keys.queue("scorers"))
    hull.fresh("/recommend", {"user": 5})


def test_a_restarted_gateway_answers_from_what_the_broker_kept(hull):
    hull.kill("worker-web-0")
    hull.kill("gateway")
    hull.start_gateway()
    answer = hull.ask("/recommend", {"user": 3})[1]
    assert (answer["value"], answer["source"]) == (3.0, "cached")
    assert answer["model_version"] == hull.version


def test_an_empty_ladder_answers_503_at_the_deadline(hull):
    hull.kill("worker-web-0")
    status, answer = hull.ask("/bare", {"number": 1})
    assert (status, answer["error"]) == (503, "no fresh answer in time")


def test_a_restarted_worker_takes_up_what_it_left_behind(hull, until: Callable[..., Any], tmp_path: Path):
    mark = tmp_path / "mark"
    worker = hull.start_worker("risky")
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(hull.ask, "/patient", {"number": 5, "mark": str(mark)})
        until(mark.exists)
        hull.kill(worker)
        hull.start_worker("risky")
        status, answer = asked.result()
    assert (status, answer["value"], answer["source"]) == (200, 5, "fresh")


def test_what_a_dead_worker_held_is_cleared_by_another(hull, until: Callable[..., Any]):
    hull.ask("/late", {"number": 5, "wait_s": 600.0})
    hull.kill("worker-web-0")
    hull.start_worker("web", 1)
    with hull.client as client:
        until(lambda: client.xlen(hull.keys.queue("web")) == 0)


def test_a_row_that_kills_its_worker_ends_among_the_dead_letters(hull, until: Callable[..., Any]):
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(hull.ask, "/deadly", {"number": 666})
        for _ in range(3):
            worker = hull.start_worker("risky")
            until(lambda worker=worker: hull.processes[worker].poll() is not None)
            hull.kill(worker)
        hull.start_worker("risky")
        status, answer = asked.result()
    assert (status, answer["error"]) == (503, "handed out 3 times without an end")
    with hull.client as client:
        [(_, letter)] = client.xrange(hull.keys.dead_letters)
        assert client.xlen(hull.keys.queue("risky")) == 0
    assert (letter[b"lane"], letter[b"task"]) == (b"event", b"poison")
    assert hull.ask("/deadly", {"number": 1})[1]["value"] == 1


def test_a_worker_told_to_leave_answers_what_it_holds(hull, until: Callable[..., Any]):
    worker = hull.start_worker("risky")
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(hull.ask, "/held", {"number": 2, "wait_s": 0.5})
        until(lambda: in_hand(hull) == 1)
        assert hull.end(worker) == 0
        assert asked.result()[1]["value"] == 2


def test_a_gateway_told_to_leave_answers_what_it_holds(hull, until: Callable[..., Any]):
    hull.start_worker("risky")
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(hull.ask, "/held", {"number": 2, "wait_s": 0.5})
        until(lambda: in_hand(hull) == 1)
        assert hull.end("gateway") == 0
        assert asked.result()[1]["value"] == 2


@pytest.mark.parametrize("name", ["gateway", "worker-web-0"])
def test_whoever_is_told_to_leave_leaves_though_the_broker_is_frozen(hull, name: str):
    hull.signal("broker", signal.SIGSTOP)
    hull.ask("/recommend", {"user": 1})
    hull.ask("/events/sales", {"a": 1})
    assert hull.end(name) == 0


def in_hand(hull: Any) -> int:
    """How many entries of the risky pool a worker has taken and not finished."""
    with hull.client as client:
        if not client.exists(hull.keys.queue("risky")):  # nothing was asked yet
            return 0
        groups = client.xinfo_groups(hull.keys.queue("risky"))
    return sum(group["pending"] for group in groups)
