"""`twinhull up` as its users meet it: starts, stops, continues, refuses."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(90)]

SYSTEM = """
name: line
pools:
  here: {nodes: 1, cpus: 2}
workloads:
  fit: {train: training:fit, pool: here, checkpoint: 5 steps}
  guess: {task: guessing:guess, pool: here, model: fit, batch: 8 within 2 ms}
endpoints:
  guess: {path: [guess], deadline: 300 ms, fallback: [cache, guessing:shrug]}
"""
GUESSING = """
class Line:
    @classmethod
    def from_tensors(cls, tensors):
        line = cls()
        line.slope = float(tensors["weight"][0, 0])
        return line


def guess(rows, *, model: Line):
    return [row["x"] * model.slope for row in rows]


def shrug(x: float) -> float:
    return 0.0
"""
TRAINING = """
import time

import torch


class Data:
    def __len__(self):
        return 400

    def __getitem__(self, i):
        return torch.tensor([i / 400]), torch.tensor([i / 200])


def fit(run):
    model = run.wrap(torch.nn.Linear(1, 1, bias=False))
    optimizer = run.wrap(torch.optim.SGD(model.parameters(), lr=0.5))
    for x, y in run.steps(run.loader(Data(), batch_size=40), epochs=EPOCHS):
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(PAUSE)
    run.publish(model, metrics={"loss": float(loss.detach())})
"""


def system(directory: Path, *, epochs: int = 3, pause: float = 0.0) -> Path:
    (directory / "guessing.py").write_text(GUESSING)
    code = TRAINING.replace("EPOCHS", str(epochs)).replace("PAUSE", str(pause))
    (directory / "training.py").write_text(code)
    file = directory / "line.yaml"
    file.write_text(SYSTEM)
    return file


def ask(url: str, x: float) -> dict[str, Any]:
    request = Request(f"{url}/guess", json.dumps({"x": x}).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=5) as answer:
        return dict(json.loads(answer.read()))


def _listening(pid: int) -> list[Any]:  # Any: psutil has no types
    return [c for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]


def refused(file: Path, *options: str, env: dict[str, str] | None = None) -> str:
    """The one line with which `up` declines; exit code 2 and nothing started."""
    done = subprocess.run(
        [sys.executable, "-m", "twinhull", "up", str(file), "--plain", *options],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "started" not in done.stdout
    return done.stderr.strip().split("\n")[-1]


def test_it_trains_hands_over_and_serves_then_ctrl_c_leaves_nothing(tmp_path: Path, start_up: Any) -> None:
    run = start_up(system(tmp_path), "--port", "0")
    url = run.url
    run.wait_for("swapped", version=1)
    run.until(lambda: ask(url, 3.0)["source"] == "fresh", 10, "a fresh answer")
    answer = ask(url, 3.0)
    assert answer["model_version"] == 1
    assert answer["value"] == pytest.approx(6.0, abs=0.2)
    pids = list(run.roles().values())
    assert run.stop(signal.SIGINT) == 130
    assert run.left_over() == []
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not run.directory.up.exists()
    assert not list(run.directory.root.rglob("*.sock"))
    assert not list(run.directory.root.rglob("*.tmp"))


def test_a_second_up_in_the_same_run_directory_continues_where_the_first_stopped(
    tmp_path: Path, start_up: Any
) -> None:
    file = system(tmp_path, epochs=15, pause=0.02)
    first = start_up(file, "--only", "training")
    saved = first.wait_for("checkpoint saved", step=50)["step"]
    assert first.stop(signal.SIGTERM) == 75
    second = start_up(file, "--only", "training")
    resumed = second.wait_for("resumed")
    assert resumed["step"] >= saved
    second.process.wait(60)
    assert second.stop() == 0
    assert second.seen("published", version=1)
    assert second.left_over() == []


def test_killing_the_supervisor_ends_everything_it_started(tmp_path: Path, start_up: Any) -> None:
    run = start_up(system(tmp_path, epochs=1000, pause=0.01), "--port", "0")
    run.wait_for("checkpoint saved")
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait(5)
    end = time.monotonic() + 10
    while run.left_over() and time.monotonic() < end:
        time.sleep(0.05)
    assert run.left_over() == []


def test_serving_alone_answers_from_its_ladder_until_there_is_a_model(tmp_path: Path, start_up: Any) -> None:
    run = start_up(system(tmp_path), "--only", "serving", "--port", "0")
    url = run.url
    run.wait_for("gateway ready")
    answer = ask(url, 3.0)
    assert (answer["source"], answer["value"], answer["model_version"]) == ("default", 0.0, None)
    listening = [c.laddr.ip for pid in run.roles().values() for c in _listening(pid)]
    assert set(listening) == {"127.0.0.1"}
    assert not any(role.startswith("train:") for role in run.roles())


def test_a_system_that_only_trains_ends_with_its_training_and_opens_no_port(
    tmp_path: Path, start_up: Any
) -> None:
    file = system(tmp_path, epochs=1)
    file.write_text("\n".join(line for line in SYSTEM.split("\n")[:6]))
    run = start_up(file)
    assert run.process.wait(60) == 0
    assert run.stop() == 0
    assert run.seen("published", version=1)
    assert not run.seen("gateway")


def test_a_plane_that_the_system_lacks_is_one_clear_line(tmp_path: Path) -> None:
    file = system(tmp_path)
    file.write_text("\n".join(line for line in SYSTEM.split("\n")[:6]))
    assert "--only serving" in refused(file, "--only", "serving")


def test_a_gateway_that_is_killed_comes_back_on_the_same_port(tmp_path: Path, start_up: Any) -> None:
    run = start_up(system(tmp_path), "--only", "serving", "--port", "0")
    url = run.url
    run.wait_for("gateway ready")
    run.kill("gateway")
    assert ask(url, 1.0)["source"] == "default"  # waited in the socket's queue
    assert [said["process"] for said in run.seen("lost")] == ["gateway"]


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(system(tmp_path), "--only", "serving", "--port", str(port))
    assert f"127.0.0.1:{port}" in said
    assert "--port" in said


def test_a_run_directory_in_use_is_refused_with_its_holder(tmp_path: Path, start_up: Any) -> None:
    file = system(tmp_path)
    run = start_up(file, "--only", "serving", "--port", "0")
    run.wait_for("gateway ready")
    said = refused(file, "--run", str(run.directory.root))
    assert f"in use by process {run.process.pid}" in said


def test_a_run_directory_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = refused(system(tmp_path), "--run", str(tmp_path / "file" / "below"))
    assert "cannot be written" in said
    assert "--run" in said


def test_code_that_raises_on_import_is_one_line_with_its_place(tmp_path: Path) -> None:
    file = system(tmp_path)
    (tmp_path / "guessing.py").write_text("import math\nmath.sqrt(-1)\n")
    said = refused(file, "--only", "serving")
    assert "ValueError" in said
    assert "guessing.py:2" in said


def test_a_function_that_does_not_exist_is_named_with_those_that_do(tmp_path: Path) -> None:
    file = system(tmp_path)
    file.write_text(SYSTEM.replace("guessing:shrug", "guessing:shrugs"))
    said = refused(file, "--only", "serving")
    assert "guessing:shrugs" in said
    assert "shrug" in said.replace("shrugs", "")


def test_a_broker_that_does_not_answer_is_one_clear_line_without_its_password(tmp_path: Path) -> None:
    url = "redis://:secret@127.0.0.1:1/0"
    said = refused(system(tmp_path), env={"TWINHULL_BROKER": url})
    assert "127.0.0.1:1" in said
    assert "secret" not in said


def test_a_file_with_mistakes_is_told_with_all_their_places(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("name: bad\npools: {p: {nodes: x}}\nworkloads: {t: {task: nowhere, pool: q}}\n")
    done = subprocess.run(
        [sys.executable, "-m", "twinhull", "up", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("bad.yaml:") >= 3


def test_a_worker_that_is_stopped_at_the_end_is_killed_after_its_grace(tmp_path: Path, start_up: Any) -> None:
    run = start_up(system(tmp_path), "--only", "serving", "--port", "0")
    run.wait_for("worker ready")
    os.kill(run.pid("worker:here-0"), signal.SIGSTOP)
    assert run.stop(signal.SIGINT) == 130
    assert run.left_over() == []
