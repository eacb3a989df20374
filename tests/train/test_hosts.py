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
from twinhull.train.supervise import wire

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
    env = {"SEEN": str(tmp_path / "calmly"), "GO": str(tmp_path)}
    calm = launch("notes", ranks=2, directory=tmp_path / "calm", env=env)
    run = crew(save_every_steps=10)
    first, second = run.host("one"), run.host("two")
    run.until_steps(1, 3)
    second.kill()
    run.until_steps(2, 2)
    run.host("two")
    run.until_steps(3, 2)
    first.kill()
    run.launcher.until_said("generation started", 4)
    run.ends()
    assert run.ranks() == [4, 2, 4, 2]
    assert run.causes() == ["host", "growth", "host", "done"]
    assert run.launcher.said("generation ended")[1]["steps_to_repeat"] == 0
    run.assert_each_sample_once()
    assert calm.ends() == 0
    assert_same_weights(run.directory, tmp_path / "calm")


def test_a_killed_or_stopped_rank_starts_all_again_and_without_elastic_nodes_a_lost_host_is_waited_for(
    crew: Start,
) -> None:
    run = crew(low=2, save_every_steps=10, hang_timeout_s=5.0)
    run.host("one")
    second = run.host("two")
    run.until_steps(1, 3)
    os.kill(next(iter(second.ranks().values())).pid, signal.SIGKILL)
    run.until_steps(2, 3)
    rank, stopped = next(iter(second.ranks().items()))
    os.kill(stopped.pid, signal.SIGSTOP)
    run.until_steps(3, 2)
    hang = run.launcher.said("hang")[0]
    assert (hang["ranks"], hang["hosts"]) == ([rank], ["two"])
    assert "stopped by a signal" in hang["exception"]
    second.kill()
    waiting = run.launcher.until_said("waiting for hosts")
    assert (waiting[0]["there"], waiting[0]["needed"]) == (1, 2)
    run.host("two")
    run.until_steps(4, 1)
    run.ends()
    assert run.ranks() == [4, 4, 4, 4]
    assert run.causes() == ["rank", "hang", "host", "done"]
    run.assert_each_sample_once()
    assert [run.hosts[index].process.wait(20) for index in (0, 2)] == [0, 0]


def test_a_frozen_host_is_given_up_and_trains_no_step_when_it_wakes(crew: Start) -> None:
    run = crew(save_every_steps=10, lease_s=2.0)
    run.host("one")
    frozen = run.host("two")
    run.until_steps(1, 3)
    family = frozen.family()
    for process in family:
        process.suspend()
    run.until_steps(2, 2)
    lost = run.launcher.said("host lost")[0]
    assert lost["host"] == "two"
    assert lost["reason"].startswith("silent")
    for process in reversed(family):  # the ranks first
        process.resume()
    run.until_steps(3, 1)
    run.ends()
    noted = run.noted()
    first_new = next(index for index, note in enumerate(noted) if note[0] == 2)
    assert all(note[0] > 1 for note in noted[first_new:])
    run.assert_each_sample_once()


def test_a_host_told_to_go_takes_nothing_along_and_the_launcher_stops_all_at_one_step(crew: Start) -> None:
    run = crew(save_every_s=600.0)
    staying, going = run.host("one"), run.host("two")
    run.until_steps(1, 3)
    going.process.terminate()
    assert going.process.wait(20) == 75
    run.until_steps(2, 2)
    run.launcher.process.send_signal(signal.SIGUSR1)
    assert run.launcher.ends() == 75
    assert run.causes() == ["preempted", "stop"]
    assert [line["steps_to_repeat"] for line in run.launcher.said("generation ended")] == [0, 0]
    assert staying.process.wait(20) == 75


def test_hosts_of_a_killed_launcher_end_their_ranks_and_train_for_the_next_one(crew: Start) -> None:
    run = crew(save_every_steps=10)
    hosts = [run.host("one"), run.host("two")]
    run.until_steps(1, 3)
    ranks = [psutil.Process(record.pid) for host in hosts for record in host.ranks().values()]
    assert len(ranks) == 4
    run.launcher.process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not alive
    run.relaunch()
    run.ends()
    assert [line["generation"] for line in run.launcher.said("generation started")] == [2]
    run.assert_each_sample_once()


def test_who_does_not_fit_is_turned_away_with_a_line_on_both_sides(crew: Start) -> None:
    run = crew()
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


def test_two_launchers_of_one_run_directory_are_one_too_many(launch: Start) -> None:
    launched = launch(env={"PAUSE_S": "0.05", "EPOCHS": "100"}, ranks=1)
    launched.until_training(ranks=1)
    other = launch(ranks=1)
    assert other.ends() == 2
    assert launched.ranks  # the second one has left them alone
