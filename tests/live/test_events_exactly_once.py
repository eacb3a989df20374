"""10,000 events through kills of each plane and of the broker: each is trained on exactly once."""

import json
import threading
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from twinhull.handoff.registry import Registry

pytestmark = pytest.mark.live
EVENTS, BUNDLE = 10_000, 50

SYSTEM = """
name: count
pools:
  here: {nodes: 1, cpus: 2}
workloads:
  fit: {train: counting:fit, pool: here, every: 1 s, checkpoint: 20 steps}
  echo: {task: echoing:echo, pool: here}
endpoints:
  echo: {path: [echo], deadline: 200 ms, fallback: [cache]}
"""
ECHO = "def echo(n: int) -> int:\n    return n\n"
COUNT = f"""
import torch


class Seen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.times = torch.nn.Parameter(torch.zeros({EVENTS}))

    def forward(self, numbers):
        return self.times[numbers].mean()


class CountUp(torch.optim.Optimizer):
    # one up for each event that a global batch holds, however it is split over ranks
    def __init__(self, params):
        super().__init__(params, dict())

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p += torch.sign(p.grad)


def numbers(bodies):
    return torch.tensor([body["n"] for body in bodies])


def fit(run):
    model = run.wrap(run.latest(Seen) or Seen())
    optimizer = run.wrap(CountUp(model.parameters()))
    for batch in run.steps(run.loader(run.events("tick"), batch_size=25, collate=numbers)):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.publish(model, metrics={{"seen": float(model.times.detach().sum())}})
"""


class Poster(threading.Thread):
    """Posts every event in bundles, a bundle again and again under its key until it is accepted."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.accepted, self.repeated = url, 0, 0

    def run(self) -> None:
        for first in range(0, EVENTS, BUNDLE):
            body = "\n".join(json.dumps({"n": n}) for n in range(first, first + BUNDLE)).encode()
            while not self.post(body, f"bundle-{first}"):
                self.repeated += 1
                time.sleep(0.05)
            self.accepted += BUNDLE
            time.sleep(0.05)

    def post(self, body: bytes, key: str) -> bool:
        headers = {"Content-Type": "application/x-ndjson", "Idempotency-Key": key}
        try:
            with urlopen(Request(f"{self.url}/events/tick", body, headers), timeout=3) as answer:
                return bool(answer.status == 202)
        except HTTPError as error:
            with error:
                assert error.code == 503, error.read()
            return False
        except (URLError, OSError):
            return False


@pytest.mark.timeout(180)
def test_ten_thousand_events_are_trained_on_once_though_every_plane_is_killed(
    tmp_path: Path,
    start_up: Any,  # Any: the fixture's type lives in conftest
) -> None:
    (tmp_path / "count.yaml").write_text(SYSTEM)
    (tmp_path / "counting.py").write_text(COUNT)
    (tmp_path / "echoing.py").write_text(ECHO)
    run = start_up(tmp_path / "count.yaml", "--port", "0")
    poster = Poster(run.url)
    run.wait_for("checkpoint saved")
    poster.start()

    def after(share: float) -> None:
        run.until(lambda: poster.accepted >= share * EVENTS, 60, f"{share:.0%} of the events posted")

    def seen() -> list[float]:
        return [said["metrics"]["seen"] for said in run.seen("published")]

    after(0.15)
    run.kill("train:fit")
    after(0.35)
    for role in ("gateway", "worker:here-0"):
        run.kill(role)
    after(0.55)
    with run.held_down("broker"):
        run.kill("broker")
        time.sleep(2)  # an outage of a stated length, not a wait
    after(0.75)
    run.kill("broker")
    after(0.85)
    run.kill("train:fit")
    poster.join(60)
    assert poster.accepted == EVENTS
    run.until(lambda: EVENTS in seen(), 60, f"all events trained on; last {seen()[-3:]}")
    lost = [said["process"] for said in run.seen("lost")]
    assert lost.count("train:fit") == 2
    assert lost.count("broker") == 2
    assert "gateway" in lost
    assert poster.repeated > 0
    assert run.stop() == 130
    assert run.left_over() == []
    registry = Registry(run.directory.registry)
    newest = registry.newest("fit")
    assert newest is not None
    times = registry.read(newest)["times"]
    assert times.min() == 1.0
    assert times.max() == 1.0
