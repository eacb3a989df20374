"""A launcher, torchrun, ranks and SIGKILL, all real."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from twinhull import broker
from twinhull.handoff import events
from twinhull.train.checkpoints.store import Store

pytestmark = [pytest.mark.live, pytest.mark.timeout(90)]

MEMORY = Path("/sys/fs/cgroup/memory")

Launch = Callable[..., Any]


def published(run: Path) -> dict[int, dict[str, Any]]:
    manifests = sorted((run / "registry" / "fit").glob("*/manifest.json"))
    return {int(path.parent.name): json.loads(path.read_text()) for path in manifests}


def are_gone(processes: list[psutil.Process], within_s: float = 10.0) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return not alive


@pytest.mark.timeout(300)
def test_twenty_killed_ranks_are_twenty_recoveries_at_the_first_restart_and_the_same_weights(
    launch: Launch, tmp_path: Path
) -> None:
    env = {"EPOCHS": "30"}
    calm = launch(directory=tmp_path / "calm", save_every_steps=5, env=env)
    assert calm.ends() == 0
    shaken = launch(directory=tmp_path / "shaken", save_every_steps=5, env=env | {"PAUSE_S": "0.003"})
    chance = random.Random(7)
    for generation in range(1, 21):
        ranks = shaken.until_training(generation, beyond=chance.randrange(8))
        os.kill(ranks[chance.randrange(2)].pid, signal.SIGKILL)
    assert shaken.ends() == 0
    assert len(shaken.said("generation started")) == 21
    assert [line["cause"] for line in shaken.said("generation ended")] == ["rank"] * 20 + ["done"]
    assert published(tmp_path / "shaken")[1]["sha256"] == published(tmp_path / "calm")[1]["sha256"]


def test_sigterm_saves_and_leaves_and_the_next_launcher_goes_on_to_the_same_weights(
    launch: Launch, tmp_path: Path
) -> None:
    calm = launch(directory=tmp_path / "calm")
    stopped = launch(directory=tmp_path / "stopped", env={"PAUSE_S": "0.01"})
    ranks = stopped.until_training(beyond=3)
    stopped.process.terminate()
    assert stopped.ends() == 75
    saved = Store(tmp_path / "stopped" / "checkpoints" / "fit").newest()
    assert saved is not None
    assert saved.place.step >= ranks[0].step
    again = launch(directory=tmp_path / "stopped")
    assert again.ends() == 0
    assert again.said("resumed")[0]["step"] == saved.place.step
    assert again.said("resumed")[0]["repeated_steps"] == 0
    assert not again.noise
    assert calm.ends() == 0
    assert published(tmp_path / "stopped")[1]["sha256"] == published(tmp_path / "calm")[1]["sha256"]
    assert launch(directory=tmp_path / "stopped").ends() == 0  # nothing is left to do


def test_sigterm_while_no_step_runs_ends_within_the_grace_and_keeps_the_last_checkpoint(
    launch: Launch, tmp_path: Path
) -> None:
    launched = launch("evaluates_for_ever", ranks=1, env={"MARK": str(tmp_path / "mark")})
    while not (tmp_path / "mark").exists():
        assert launched.process.poll() is None
        time.sleep(0.01)
    family = launched.family()
    launched.process.terminate()
    assert launched.ends(within_s=20) == 75
    assert are_gone(family)
    found = Store(tmp_path / "run" / "checkpoints" / "fit").newest()
    assert found is not None
    assert (found.place.step, found.place.loop, found.place.done) == (2, 1, False)


def test_the_same_exception_three_times_ends_it_and_its_traceback_is_shown_once(launch: Launch) -> None:
    launched = launch("raises_at_step_3")
    assert launched.ends() == 1
    crashes = launched.said("training crashed")
    assert [line["error"] for line in crashes] == ["ValueError: boom at three"] * 3
    assert crashes[0]["step"] in (3, 4)  # a loop that is left by an error counts the step that it was in
    assert len({line["step"] for line in crashes}) == 1
    assert [("exception" in line) for line in crashes] == [True, False, False]
    assert 'raise ValueError("boom at three")' in crashes[0]["exception"]
    assert "twinhull" not in crashes[0]["exception"]
    (last,) = launched.said("training ended: the same crash three times")
    assert last["error"] == "ValueError: boom at three"
    assert not launched.noise


def test_a_rank_that_leaves_without_a_word_is_a_crash_and_not_a_loss(launch: Launch) -> None:
    launched = launch("dies_at_step_3")
    launched.until_said("training crashed")
    assert launched.said("training crashed")[0]["error"] == "rank 1 left with exit 9 and said nothing"


def test_an_error_that_trying_again_cannot_mend_ends_it_at_once(launch: Launch) -> None:
    launched = launch("wraps_an_array", ranks=1)
    assert launched.ends() == 1
    assert len(launched.said("generation started")) == 1
    (line,) = launched.said("training crashed")
    assert "Mine cannot be wrapped: its state['mean'] is a numpy.ndarray" in line["error"]


def test_a_killed_launcher_leaves_no_process(launch: Launch) -> None:
    launched = launch(env={"PAUSE_S": "0.01", "EPOCHS": "100"})
    launched.until_training(beyond=5)
    family = launched.family()
    assert len(family) >= 3
    launched.process.kill()
    assert are_gone(family)


def test_a_killed_torchrun_is_a_loss_and_its_ranks_do_not_live_on(launch: Launch) -> None:
    launched = launch(ranks=1, save_every_steps=5, env={"PAUSE_S": "0.01"})
    ranks = launched.until_training(ranks=1)
    parent = psutil.Process(ranks[0].pid).parent()
    assert parent is not None
    orphans = [psutil.Process(record.pid) for record in ranks.values()]
    parent.kill()
    assert are_gone(orphans)
    assert launched.ends() == 0
    assert len(launched.said("generation started")) == 2


def test_a_rank_that_leaves_early_as_if_all_were_well_is_a_crash(launch: Launch) -> None:
    launched = launch("leaves_at_step_3", save_every_s=600.0)
    assert launched.ends() == 1
    crashes = launched.said("training crashed")
    assert len(crashes) == 3
    assert crashes[0]["error"] == "rank 1 left with exit 0 before the training function had returned"


def test_sigterm_during_the_start_ends_it_at_once(launch: Launch) -> None:
    launched = launch()
    launched.until_said("generation started")
    family = launched.family()
    launched.process.terminate()
    assert launched.ends(within_s=10) == 75
    assert are_gone(family)


def test_a_notice_stops_the_run_as_sigterm_does_and_so_does_the_end_of_the_walltime(
    launch: Launch, tmp_path: Path
) -> None:
    notice = tmp_path / "notice"
    env = {"PAUSE_S": "0.02", "EPOCHS": "100", "NOTICE": "tiny:is_taken", "TAKEN": str(notice)}
    launched = launch(ranks=1, env=env)
    launched.until_training(ranks=1)
    notice.write_text("")
    assert launched.ends() == 75
    assert launched.said("generation ended")[-1]["steps_to_repeat"] == 0
    again = launch(ranks=1, warning_s=20.0, env={"PAUSE_S": "0.02", "EPOCHS": "100", "WALLTIME_S": "24"})
    assert again.ends() == 75
    assert again.said("walltime is nearly over")
    assert again.said("generation ended")[-1]["steps_to_repeat"] == 0


@pytest.mark.skipif(not MEMORY.is_dir() or os.geteuid() != 0, reason="needs root and cgroup v1 for memory")
def test_a_rank_killed_for_want_of_memory_is_a_crash_that_ends_the_run(
    launch: Launch, tmp_path: Path
) -> None:
    group = MEMORY / f"twinhull-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(700 << 20))
        launched = launch("grows_at_step_3", ranks=1, env={"CGROUP": str(group)})
        assert launched.ends() == 1
        assert launched.said("training crashed")[0]["error"] == "killed by the kernel: out of memory"
    finally:
        group.rmdir()


def test_a_hang_is_found_by_the_missing_steps_and_training_goes_on(launch: Launch, tmp_path: Path) -> None:
    launched = launch("hangs_once", ranks=1, hang_timeout_s=4.0, env={"MARK": str(tmp_path / "mark")})
    assert launched.ends() == 0
    hang = launched.said("hang")[0]
    assert hang["step"] in (5, 6)
    assert "in hangs_once" in hang["exception"]  # where it was
    told = launched.said("goodput")[-1]
    assert told["restarts"] == {"hang": 1}
    assert 0 < told["goodput"] < 1
    assert len(launched.said("generation started")) == 2


def test_publishing_happens_once_a_cycle_though_all_die_between_it_and_the_end(
    launch: Launch, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    launched = launch("fit_and_linger", ranks=1, env={"MARK": str(mark)})
    launched.until_said("published")
    while not mark.exists():
        time.sleep(0.01)
    for record in launched.ranks.values():
        os.kill(record.pid, signal.SIGKILL)
    assert launched.ends() == 0
    assert len(launched.said("generation started")) == 2
    assert list(published(tmp_path / "run")) == [1]
    assert published(tmp_path / "run")[1]["made_by"] == {"train": "fit", "cycle": 1, "step": 26}


def test_loops_one_after_another_see_each_sample_once_though_ranks_are_killed(
    launch: Launch, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    launched = launch("two_loops", save_every_steps=1, env={"SEEN": str(seen), "PAUSE_S": "0.05"})
    for generation in (1, 2):
        ranks = launched.until_training(generation, beyond=2)
        os.kill(ranks[0].pid, signal.SIGKILL)
    assert launched.ends() == 0
    assert len(launched.said("generation started")) == 3
    lines = [line.split() for line in seen.read_text().splitlines()]
    parts = {
        (step, rank): (name, numbers) for name, step, rank, *numbers in lines
    }  # a step done again counts once
    assert sorted({int(step) for step, _ in parts}) == list(range(15))
    for loop, times in (("first", 1), ("second", 2)):
        count = Counter(n for name, numbers in parts.values() if name == loop for n in numbers)
        assert count == {str(n): times for n in range(40)}


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    server = subprocess.Popen(broker.command(tmp_path / "broker"), stdout=subprocess.DEVNULL)
    broker.wait_ready(broker.address(tmp_path / "broker"))
    yield broker.address(tmp_path / "broker")
    server.kill()
    server.wait()
    broker.clear(tmp_path / "broker")


def test_each_event_is_trained_once_though_ranks_are_killed_and_cycles_go_by(
    launch: Launch, tmp_path: Path, url: str
) -> None:
    import torch

    keys = broker.Keys("shop")
    with broker.connect(url) as client:
        events.append(client, keys, "tick", [{"n": n} for n in range(300)])
    launched = launch("count_events", system="shop", save_every_steps=3, every_s=1.0,
                      env={broker.VARIABLE: url, "PAUSE_S": "0.02"})  # fmt: skip
    counts = torch.zeros(500)
    launched.until_training(1, beyond=4)
    with broker.connect(url) as client:
        events.append(client, keys, "tick", [{"n": n} for n in range(300, 500)])
    os.kill(launched.ranks[1].pid, signal.SIGKILL)

    def trained() -> float:
        from twinhull.handoff.registry import Registry

        registry = Registry(tmp_path / "run" / "registry")
        found = [torch.from_numpy(registry.read(version)["weight"]) for version in registry.versions("fit")]
        counts.copy_(torch.stack(found).sum(0) if found else torch.zeros(500))
        return float(counts.sum())

    end = time.monotonic() + 60
    while trained() < 500 and time.monotonic() < end:
        assert launched.process.poll() is None
        time.sleep(0.1)
    launched.process.terminate()
    assert launched.ends() in (0, 75)
    assert trained() == 500, (counts, launched.lines[-30:], launched.noise)
    assert bool((counts == 1).all())
    made = [version["made_by"] for version in published(tmp_path / "run").values()]
    assert [m["cycle"] for m in made] == list(range(1, len(made) + 1))
    assert made[-1]["step"] == 50


def test_a_train_workload_of_the_system_file_runs_and_publishes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "system.yaml").write_text(
        "name: shop\npools:\n  here: {nodes: 1, cpus: 2}\n"
        "workloads:\n  fit: {train: tiny:fit, pool: here, checkpoint: 5 steps}\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent / "apps"), "TWINHULL_LOG_FORMAT": "json"}
    argv = [
        sys.executable,
        "-m",
        "twinhull.train.supervise.launch",
        "--run",
        str(run),
        "--train",
        "fit",
        "--ranks",
        "1",
    ]
    done = subprocess.run(argv, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done
    assert '"event": "cycle finished"' in done.stdout
    assert list(published(run)) == [1]
