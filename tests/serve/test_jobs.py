import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from celery import Celery

from twinhull import broker
from twinhull.errors import BrokerError, TwinhullError
from twinhull.handoff.registry import Registry
from twinhull.rundir import RunDirectory
from twinhull.serve import celery_app, jobs, schedule, wire
from twinhull.system.load import load_text

pytestmark = [pytest.mark.live, pytest.mark.timeout(40)]

SYSTEM = """
name: lane
pools:
  web: {nodes: 1, cpus: 2}
  scorers: {nodes: 1, gpus: 1 x L4}
workloads:
  note:    {task: work:note, pool: web}
  nightly: {task: work:nightly, pool: web, every: 1 h}
  slow:    {task: work:slow, pool: web, time_limit: 60 s}
  endless: {task: work:endless, pool: web, time_limit: 1 s}
  poison:  {task: work:poison, pool: web}
  failing: {task: work:failing, pool: web, retries: 2 after 100 ms}
  leaving: {task: work:leaving, pool: web}
  tenfold: {task: work:tenfold, pool: web, batch: 8 within 5 ms}
  double:  {task: work:double, pool: web}
  fit:     {train: work:fit, pool: web}
  score:   {task: work:score, pool: web, model: fit}
  heavy:   {task: work:heavy, pool: scorers}
  stuck:   {task: work:endless, pool: scorers, time_limit: 200 ms}
components:
  web-worker: {concurrency: 2}
  scorers-queue: {deliveries: 1}
"""

WORK = """
import os, signal, sys, time
from pathlib import Path

HERE = Path(os.environ["EFFECTS"])

def effect(name):
    with open(HERE / name, "a") as file:
        file.write(f"{os.getpid()}\\n")

def note(): effect("note")
def nightly(): effect("nightly")
def failing(): effect("failing"); raise ValueError("no luck")
def leaving(): effect("leaving"); sys.exit(3)
def poison(): effect("poison"); os.kill(os.getpid(), signal.SIGKILL)
def tenfold(rows: list[int]) -> list[int]: effect("tenfold"); return [10 * row for row in rows]
def double(n: int) -> int: return 2 * n

class Weights:
    @classmethod
    def from_tensors(cls, tensors):
        made = cls()
        made.factor = int(tensors["factor"][0])
        return made

def score(rows: list[int], *, model: Weights) -> list[int]: return [model.factor * row for row in rows]

def until(name):
    while not (HERE / name).exists():
        time.sleep(0.02)

def slow(): effect("slow begun"); until("go"); effect("slow")
def heavy(): effect("heavy begun"); until("go"); effect("heavy")
def endless(): effect("endless"); until("never")
"""


def until(true: Callable[[], object], within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Lane:
    """A broker and the processes of a job lane in a directory of their own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = RunDirectory(root)
        self.directory.create()
        self.effects = root / "effects"
        self.effects.mkdir()
        (root / "work.py").write_text(WORK)
        self.directory.system.write_text(SYSTEM)
        self.system = load_text(SYSTEM, self.directory.system).system
        self.url = broker.address(self.directory.broker)
        self.client = broker.connect(self.url)
        self.keys = broker.Keys("lane")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.start_broker()

    def start_broker(self) -> None:
        self.broker = self._start("broker", broker.command(self.directory.broker))
        broker.wait_ready(self.url)

    def start(self, *what: str) -> subprocess.Popen[bytes]:
        """One process of the lane, as the supervisor starts it."""
        return self._start(
            what[-1], [sys.executable, "-m", "twinhull.serve.jobs", "--run", str(self.root), *what]
        )

    def start_worker(self, pool: str = "web") -> subprocess.Popen[bytes]:
        ready = self.log(pool).count('"jobs ready"')
        worker = self.start("--pool", pool)
        until(lambda: self.log(pool).count('"jobs ready"') > ready or worker.poll() is not None)
        return worker

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "EFFECTS": str(self.effects),
            "PYTHONPATH": str(self.root),
            "TWINHULL_LOG_FORMAT": "json",
            broker.VARIABLE: self.url,
        }
        with (self.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=environment, cwd=self.root, stdout=log, stderr=subprocess.STDOUT
            )
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        file = self.root / f"{name}.log"
        return file.read_text() if file.exists() else ""

    def effect(self, name: str) -> list[int]:
        """The processes that had this effect, one entry for each time."""
        file = self.effects / name
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []

    def go(self) -> None:
        """Let the slow ones end."""
        (self.effects / "go").touch()

    def run(self, task: str) -> str:
        return jobs.run_now(self.url, self.system, task)

    def letters(self, task: str) -> list[str]:
        """Reasons in the dead letters of a task."""
        found = self.client.xrange(self.keys.dead_letters)
        return [fields[b"reason"].decode() for _, fields in found if fields[b"task"] == task.encode()]

    def held(self, pool: str = "web") -> int:
        return self.client.hlen(self.keys.jobs_held(pool, socket.gethostname()))

    def waiting(self, pool: str = "web") -> int:
        return self.client.llen(self.keys.jobs(pool))

    def close(self) -> None:
        for log in self.root.glob("*.log"):  # pytest shows it with a failure
            print(f"--- {log.name}\n{log.read_text()[-4000:]}")
        for process in self.processes:
            process.kill()
            process.wait()
        self.client.close()
        broker.clear(self.directory.broker)


@contextmanager
def a_lane(root: Path):
    lane = Lane(root)
    try:
        yield lane
    finally:
        lane.close()


@pytest.fixture
def lane(tmp_path):
    with a_lane(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A lane with a worker for the tests that break nothing."""
    with a_lane(tmp_path_factory.mktemp("shared")) as made:
        made.start_worker()
        yield made


def batch(task: str, rows: list[object], *, seconds_left: float = 20.0, outputs: int = 0) -> wire.Batch:
    reply_to = f"lane:replies:{time.monotonic_ns()}"
    return wire.Batch(b"b1", task, reply_to, time.time() + seconds_left, rows, outputs)


@contextmanager
def a_sender(lane: Lane):
    sender = jobs.Sender(lane.url, lane.system)
    try:
        yield sender
    finally:
        sender.close()


def answer(lane: Lane, asked: wire.Batch) -> wire.Reply:
    until(lambda: lane.client.llen(asked.reply_to))
    return wire.decode_reply(lane.client.lpop(asked.reply_to))


def test_a_batch_of_a_gateway_is_answered_on_its_list(shared):
    asked = batch("tenfold", [1, 2, 3], outputs=1)
    with a_sender(shared) as sender:
        sender.send(asked)
        reply = answer(shared, asked)
        assert (reply.id, reply.rows, reply.errors) == (b"b1", [10, 20, 30], {})
        until(lambda: sender.counts.sent == 1)


def test_a_row_that_does_not_fit_fails_alone(shared):
    asked = batch("double", [{"n": 4}, {"n": "x"}])
    with a_sender(shared) as sender:
        sender.send(asked)
        reply = answer(shared, asked)
    assert reply.rows == [8, None]
    assert list(reply.errors) == [1]


def test_a_job_that_wants_a_model_gets_the_newest_version(shared):
    registry = Registry(shared.directory.registry)
    with a_sender(shared) as sender:
        for factor in (3, 4):
            version = registry.publish("fit", {"factor": np.array([factor])}, metrics={}, made_by={})
            asked = batch("score", [1, 2], outputs=1)
            sender.send(asked)
            reply = answer(shared, asked)
            assert (reply.rows, reply.model_version) == ([factor, 2 * factor], version.number)


def test_a_batch_that_fails_for_good_is_told_at_once_and_kept(shared):
    asked = batch("failing", [{}])
    with a_sender(shared) as sender:
        sender.send(asked)
        reply = answer(shared, asked)
    assert reply.errors == {0: "ValueError: no luck"}
    until(lambda: shared.letters("failing"))


def test_work_that_nobody_waits_for_any_longer_is_dropped_by_both_ends(shared):
    with a_sender(shared) as sender:
        sender.send(batch("tenfold", [1], seconds_left=-1))
        until(lambda: sender.counts.expired == 1)
    late = batch("tenfold", [1], seconds_left=-1, outputs=1)
    app = celery_app.sender_app(shared.system, shared.url)
    dropped = shared.log("web").count('"jobs expired"')
    app.send_task("tenfold", args=(wire.encode(late),), queue=shared.keys.jobs("web"))
    app.send_task("tenfold", args=(wire.encode(late),), queue=shared.keys.jobs("web"), expires=-1)
    until(lambda: shared.log("web").count('"jobs expired"') == dropped + 2)
    assert not shared.client.exists(late.reply_to)


def test_a_raised_error_is_retried_as_often_as_the_file_says_and_then_kept(shared):
    before, kept = len(shared.effect("failing")), len(shared.letters("failing"))
    shared.run("failing")
    until(lambda: len(shared.letters("failing")) == kept + 1)
    assert len(shared.effect("failing")) - before == 3
    assert shared.letters("failing")[-1] == "ValueError: no luck"
    assert shared.log("web").count('"job retried"') >= 2


def test_a_function_that_leaves_its_process_fails_like_any_other(shared):
    shared.run("leaving")
    until(lambda: shared.letters("leaving"))
    assert shared.letters("leaving") == ["SystemExit: 3"]
    assert len(shared.effect("leaving")) == 1


def test_a_function_beyond_its_time_limit_is_stopped(shared):
    shared.run("endless")
    until(lambda: shared.letters("endless"))
    assert "SoftTimeLimitExceeded" in shared.letters("endless")[0]


@pytest.mark.parametrize("kind", ["pickle", "json"])
def test_what_is_not_msgpack_is_refused(shared, kind):
    sender = Celery("stranger", broker=broker.celery_url(shared.url), set_as_current=False)
    sender.conf.task_serializer = kind
    before, refused = len(shared.effect("note")), shared.log("web").count("Refusing to deserialize")
    sender.send_task("note", queue=shared.keys.jobs("web"))
    sender.close()
    until(lambda: shared.log("web").count("Refusing to deserialize") > refused)
    shared.run("note")
    until(lambda: len(shared.effect("note")) > before)
    assert len(shared.effect("note")) == before + 1
    until(lambda: shared.held() == 0)


def test_a_job_whose_process_is_killed_is_done_once_more_and_takes_effect_once(lane):
    lane.start_worker()
    lane.run("slow")
    until(lambda: lane.effect("slow begun"))
    os.kill(lane.effect("slow begun")[0], signal.SIGKILL)
    until(lambda: len(lane.effect("slow begun")) == 2)
    lane.go()
    until(lambda: lane.log("web").count('"job done"'))
    assert len(lane.effect("slow")) == 1
    assert '"job retried"' in lane.log("web")


def test_a_job_that_always_kills_its_process_ends_among_the_dead_letters(lane):
    worker = lane.start_worker()
    lane.run("poison")
    until(lambda: lane.letters("poison"), within_s=30)
    assert len(lane.effect("poison")) == 3
    assert "SIGKILL" in lane.letters("poison")[0]
    lane.run("note")
    until(lambda: lane.effect("note"))
    assert worker.poll() is None


def test_jobs_outlive_their_broker(lane):
    worker = lane.start_worker()
    for _ in range(4):
        lane.run("slow")
    until(lambda: len(lane.effect("slow begun")) == 2)  # two run, two wait
    lane.broker.kill()
    lane.broker.wait()
    lane.go()
    lane.start_broker()
    until(lambda: len(lane.effect("slow")) == 4 and lane.log("web").count('"job done"') == 4)
    assert len(lane.effect("slow begun")) == 4
    until(lambda: lane.held() == lane.waiting() == 0)
    assert worker.poll() is None


def test_jobs_that_were_taken_when_the_broker_died_are_done_once(lane):
    worker = lane.start_worker()
    lane.run("slow")
    app = celery_app.sender_app(lane.system, lane.url)
    for _ in range(2):  # taken by the worker, and kept for later
        app.send_task("note", queue=lane.keys.jobs("web"), countdown=1.0)
    until(lambda: lane.effect("slow begun") and lane.held() == 3)
    lane.broker.kill()
    lane.broker.wait()
    until(lambda: "Connection to broker lost" in lane.log("web"))
    lane.start_broker()
    until(lambda: '"jobs taken back"' in lane.log("web"))
    lane.go()
    until(lambda: len(lane.effect("note")) == 2 and "done before" in lane.log("web"))
    assert len(lane.effect("slow begun")) == len(lane.effect("slow")) == 1
    assert worker.poll() is None


def test_a_worker_that_comes_back_after_a_kill_takes_its_jobs_up_at_once(lane):
    worker = lane.start_worker()
    lane.run("slow")
    until(lambda: lane.effect("slow begun"))
    worker.kill()
    worker.wait()
    until(lambda: not runs(lane.effect("slow begun")[0]))
    lane.go()
    lane.start_worker()
    until(lambda: lane.effect("slow"))
    assert len(lane.effect("slow")) == 1


def test_a_worker_that_is_asked_to_leave_gives_back_what_runs_too_long(lane):
    worker = lane.start_worker()
    lane.run("slow")
    until(lambda: lane.effect("slow begun"))
    worker.send_signal(signal.SIGINT)  # Ctrl-C is the supervisor's business
    worker.terminate()
    assert worker.wait(10) == 0
    until(lambda: not runs(lane.effect("slow begun")[0]))
    assert (lane.waiting(), lane.held()) == (1, 0)
    lane.go()
    lane.start_worker()
    until(lambda: lane.effect("slow"))


def test_a_worker_that_is_asked_to_leave_ends_what_it_can(lane):
    worker = lane.start_worker()
    lane.run("slow")
    until(lambda: lane.effect("slow begun"))
    worker.terminate()
    lane.go()
    assert worker.wait(10) == 0
    assert len(lane.effect("slow")) == 1
    assert (lane.waiting(), lane.held()) == (0, 0)


def test_a_pool_with_gpus_never_forks_and_gives_its_job_back_too(lane):
    worker = lane.start_worker("scorers")
    lane.run("heavy")
    until(lambda: lane.effect("heavy begun"))
    assert lane.effect("heavy begun") == [worker.pid]
    worker.terminate()
    assert worker.wait(10) == 0
    assert (lane.waiting("scorers"), lane.held("scorers")) == (1, 0)


def test_a_pool_with_gpus_ends_with_a_job_beyond_its_limit_and_gives_it_up_in_the_end(lane):
    lane.run("stuck")
    assert lane.start_worker("scorers").wait(10) == 1
    lane.start_worker("scorers")
    until(lambda: lane.letters("stuck"))
    assert lane.letters("stuck") == ["its worker was lost 1 x"]
    assert len(lane.effect("endless")) == 1


def test_a_worker_without_a_broker_leaves_when_asked(lane):
    worker = lane.start_worker()
    lane.broker.kill()
    lane.broker.wait()
    until(lambda: "Cannot connect" in lane.log("web"))
    worker.terminate()
    assert worker.wait(10) == 0


def test_a_scheduled_task_runs_at_once_and_then_only_when_due(lane):
    lane.start_worker()
    beat = lane.start("--beat")
    until(lambda: lane.effect("nightly") and lane.directory.schedule.exists())
    beat.kill()
    beat.wait()
    memory = json.loads(lane.directory.schedule.read_text())

    beat = lane.start("--beat")
    until(lambda: lane.log("--beat").count('"schedule read"') == 2)
    lane.run("note")
    until(lambda: lane.effect("note"))
    assert len(lane.effect("nightly")) == 1
    beat.terminate()
    assert beat.wait(10) == 0

    memory["ran_at"]["nightly"] -= 3600
    lane.directory.schedule.write_text(json.dumps(memory))
    lane.start("--beat")
    until(lambda: len(lane.effect("nightly")) == 2)


def test_a_torn_schedule_does_not_stop_the_scheduler(lane):
    lane.directory.schedule.write_text('{"ran_at": {"nigh')
    lane.start_worker()
    lane.start("--beat")
    until(lambda: lane.effect("nightly"))
    assert "schedule forgotten" in lane.log("--beat")


def test_a_run_that_is_due_waits_for_the_broker(lane):
    lane.broker.kill()
    lane.broker.wait()
    lane.start("--beat")
    until(lambda: "Connection error" in lane.log("--beat"))
    lane.start_broker()
    lane.start_worker()
    until(lambda: lane.effect("nightly"))


def test_a_sender_never_waits_for_a_broker(lane):
    with a_sender(lane) as sender:
        lane.broker.send_signal(signal.SIGSTOP)
        sender.send(batch("tenfold", [1]))
        until(lambda: sender.counts.failed == 1)
        lane.broker.send_signal(signal.SIGCONT)
        until(lane.client.ping)
        sender.send(batch("tenfold", [1]))
        until(lambda: sender.counts.sent == 1)
        lane.broker.kill()
        lane.broker.wait()
        sender.send(batch("tenfold", [1]))
        until(lambda: sender.counts.failed == 2)
        with pytest.raises(BrokerError, match="did not take the job"):
            lane.run("note")
        lane.start_broker()
        sender.send(batch("tenfold", [1]))
        until(lambda: sender.counts.sent == 2)


def test_a_sender_drops_and_counts_what_is_too_much(lane, monkeypatch):
    with a_sender(lane) as sender:
        lane.broker.send_signal(signal.SIGSTOP)
        for _ in range(jobs.WAITING + 10):
            sender.send(batch("tenfold", [1], seconds_left=0.1))
        assert sender.counts.dropped >= 8
        lane.broker.send_signal(signal.SIGCONT)
        until(lambda: sum((sender.counts.sent, sender.counts.failed, sender.counts.expired)) >= jobs.WAITING)


def test_an_unknown_task_is_one_clear_line(lane):
    with pytest.raises(TwinhullError, match="there is no task 'nope'"):
        lane.run("nope")


def test_the_schedule_names_what_recurs_and_nothing_else():
    system = load_text(SYSTEM, Path("lane.yaml")).system
    assert list(schedule.entries(system)) == ["nightly"]


def test_unanswered_work_comes_back_later_than_the_longest_task_may_take():
    system = load_text(SYSTEM, Path("lane.yaml")).system
    options = celery_app.broker_options(system, "web")
    assert options["visibility_timeout"] > celery_app.longest_task_s(system) >= celery_app.ASSUMED_LONGEST_S
