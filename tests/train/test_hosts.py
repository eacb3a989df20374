"""A launcher and two hosts on this machine, all real processes: kills, growth, preemption, refusals."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from twinhull.handoff.registry import Registry
from twinhull.train import wire

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

Start = Callable[..., Any]


def assert_same_weights(one: Path, other: Path) -> None:
    ours, theirs = (weights(Registry(run / "registry")) for run in (one, other))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        np.testing.assert_allclose(weight, theirs[name], rtol=1e-5, atol=1e-7)


def weights(registry: Registry) -> dict[str, Any]:
    newest = registry.newest("fit")
    assert newest is not None
    return dict(registry.read(newest))


def test_a_killed_host_is_gone_at_once_and_grown_back_to_and_the_weights_are_as_if_nothing_had_been(
    crew: Start, launch: Start, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    env = {"SEEN": str(tmp_path / "seen calmly"), "EPOCHS": "6"}
    calm = launch("notes", ranks=2, directory=tmp_path / "calm", env=env)
    run = crew("notes", save_every_steps=5, env={"SEEN": str(seen), "PAUSE_S": "0.05", "EPOCHS": "6"})
    first, second = run.host("one"), run.host("two")
    run.launcher.until_said("host joined", 2)
    run.until_steps(1, 3)
    second.kill()
    run.launcher.until_said("generation started", 2)
    assert run.launcher.said("generation started")[1]["ranks"] == 2
    run.until_steps(2, 2)
    run.host("two")
    started = run.launcher.until_said("generation started", 3)
    assert [line["ranks"] for line in started] == [4, 2, 4]
    run.until_steps(3, 2)
    first.kill()
    run.launcher.until_said("generation started", 4)
    assert run.launcher.ends() == 0, run.launcher.lines[-20:]
    causes = [line["cause"] for line in run.launcher.said("generation ended")]
    assert causes == ["host", "growth", "host", "done"]
    run.assert_each_sample_once(203, 6)
    assert run.launcher.said("generation ended")[1]["steps_to_repeat"] == 0
    assert calm.ends() == 0
    assert_same_weights(run.directory, tmp_path / "calm")


def test_a_rank_killed_on_one_host_starts_all_again(crew: Start, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    run = crew("notes", save_every_steps=5, env={"SEEN": str(seen), "PAUSE_S": "0.02"})
    run.host("one")
    second = run.host("two")
    run.until_steps(1, 3)
    os.kill(second.ranks()[0].pid, signal.SIGKILL)
    assert run.launcher.ends() == 0
    assert [line["cause"] for line in run.launcher.said("generation ended")] == ["rank", "done"]
    run.assert_each_sample_once(203, 2)
    assert [host.process.wait(20) for host in run.hosts] == [0, 0]


def test_a_frozen_host_is_given_up_and_trains_no_step_when_it_wakes(crew: Start, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    run = crew("notes", save_every_steps=5, lease_s=2.0,
               env={"SEEN": str(seen), "PAUSE_S": "0.05", "EPOCHS": "5"})  # fmt: skip
    run.host("one")
    frozen = run.host("two")
    run.until_steps(1, 3)
    family = frozen.family()
    for process in family:
        process.suspend()
    run.until_steps(2, 2)
    lost = run.launcher.said("host lost")
    assert lost[0]["host"] == "two"
    assert lost[0]["reason"].startswith("silent")
    for process in reversed(family):  # the ranks first
        process.resume()
    run.launcher.until_said("generation started", 3)
    assert run.launcher.ends() == 0
    noted = run.noted()
    first_new = noted.index(next(note for note in noted if note[0] == 2))
    assert all(note[0] > 1 for note in noted[first_new:])
    run.assert_each_sample_once(203, 5)


def test_a_host_told_to_go_takes_nothing_along_and_the_launcher_stops_all_at_one_step(
    crew: Start, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    run = crew("notes", save_every_s=600.0, env={"SEEN": str(seen), "PAUSE_S": "0.05", "EPOCHS": "50"})
    run.host("one")
    going = run.host("two")
    run.until_steps(1, 3)
    going.process.terminate()
    assert going.process.wait(20) == 75
    run.until_steps(2, 2)
    ended = run.launcher.said("generation ended")[0]
    assert (ended["cause"], ended["steps_to_repeat"]) == ("preempted", 0)
    run.launcher.process.send_signal(signal.SIGUSR1)
    assert run.launcher.ends() == 75
    assert run.launcher.said("generation ended")[-1]["steps_to_repeat"] == 0
    assert run.hosts[0].process.wait(20) == 75


def test_hosts_of_a_killed_launcher_end_their_ranks_and_train_for_the_next_one(
    crew: Start, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    run = crew("notes", save_every_steps=5, env={"SEEN": str(seen), "PAUSE_S": "0.02", "EPOCHS": "3"})
    hosts = [run.host("one"), run.host("two")]
    run.until_steps(1, 3)
    ranks = [psutil.Process(record.pid) for host in hosts for record in host.ranks().values()]
    assert len(ranks) == 4
    run.launcher.process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not alive
    run.relaunch()
    assert run.launcher.ends() == 0
    assert [line["generation"] for line in run.launcher.said("generation started")] == [2]
    run.assert_each_sample_once(203, 3)


def test_who_does_not_fit_is_turned_away_with_a_line_on_both_sides(crew: Start, tmp_path: Path) -> None:
    run = crew("notes", env={"SEEN": str(tmp_path / "seen")})
    lost = run.host("lost", token="another")
    assert lost.process.wait(30) == 2
    assert "does not accept the token" in lost.text()
    with socket.create_connection(("127.0.0.1", run.port)) as sock:
        sock.sendall(os.urandom(5000))
        assert sock.recv(100)
    with socket.create_connection(("127.0.0.1", run.port)) as sock:
        sock.sendall(wire._GREETING.pack(wire._MAGIC, wire.PROTOCOL + 1))
        assert sock.recv(100)
    refusals = run.launcher.until_said("host refused", 3)
    reasons = " ".join(line["reason"] for line in refusals)
    assert "another token" in reasons
    assert "not Twinhull" in reasons
    assert f"version {wire.PROTOCOL + 1}" in reasons
    (run.directory / "join.mark").write_text("of another disk")
    stranger = run.host("stranger")
    assert stranger.process.wait(30) == 2
    assert "is not the launcher's run directory" in stranger.text()
    assert "is not the launcher's run directory" in run.launcher.until_said("host refused", 4)[-1]["reason"]


def test_without_elastic_nodes_it_waits_for_the_lost_host(crew: Start, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    run = crew("notes", low=2, save_every_steps=5, env={"SEEN": str(seen), "PAUSE_S": "0.02"})
    run.host("one")
    second = run.host("two")
    run.until_steps(1, 3)
    second.kill()
    waiting = run.launcher.until_said("waiting for hosts")
    assert (waiting[0]["there"], waiting[0]["needed"]) == (1, 2)
    run.host("two")
    assert run.launcher.ends() == 0
    assert [line["ranks"] for line in run.launcher.said("generation started")] == [4, 4]
    run.assert_each_sample_once(203, 2)


def test_two_launchers_of_one_run_directory_are_one_too_many(launch: Start, tmp_path: Path) -> None:
    launched = launch(env={"PAUSE_S": "0.05", "EPOCHS": "100"}, ranks=1)
    launched.until_training(ranks=1)
    other = launch(ranks=1)
    assert other.ends() == 2
    assert launched.ranks  # the second one has left them alone
