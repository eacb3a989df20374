"""Scripts that were not written for us, under our supervisor: real processes, real kills, real trainers."""

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from twinhull.handoff.registry import Registry
from twinhull.train.scripts.script import family

pytestmark = [pytest.mark.live, pytest.mark.timeout(60)]

SCRIPTS = Path(__file__).parent / "apps" / "scripts"
KILLS = int(os.environ.get("KILLS", "2"))  # a start of a trainer costs 6 s of processor time
STEPS = 20 + 20 * KILLS
PLAIN = f"python {SCRIPTS / 'plain.py'} --into {{checkpoints}} --resume {{checkpoint}}"


class Commanded:
    """One launcher of a command, in a directory that is both the user's code and its run."""

    def __init__(self, root: Path, command: str, publish: str, more: str, env: dict[str, str]) -> None:
        self.run = root / "run"
        self.run.mkdir(parents=True, exist_ok=True)
        work = f"command: {json.dumps(command)}" + (f", publish: {publish}" if publish else "")
        (self.run / "system.yaml").write_text(
            "name: shop\npools:\n  here: {nodes: 1, cpus: 2}\n"
            f"workloads:\n  fit: {{pool: here, train: {{{work}}}{more and f', {more}'}}}\n"
        )
        self.lines: list[dict[str, Any]] = []
        self.said: list[str] = []
        words = [
            "twinhull.train.scripts.command",
            "--run",
            str(self.run),
            "--train",
            "fit",
            "--ranks",
            "2",
            "--nice",
            "0",
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=root,
            env={**os.environ, "TWINHULL_LOG_FORMAT": "json", "OMP_NUM_THREADS": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                self.said.append(line.strip())

    def events(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == event]

    def causes(self) -> list[str]:
        return [line["cause"] for line in self.events("generation ended")]

    def family(self) -> list[psutil.Process]:
        return family(str(self.run / "checkpoints" / "fit"))

    def until(self, happened: Callable[[], Any], within_s: float = 50.0) -> Any:
        def look() -> Any:
            found = happened()
            assert found or self.process.poll() is None, (self.lines, self.said)
            return found

        return until(look, within_s)

    def ends(self, within_s: float = 50.0) -> int:
        code = self.process.wait(within_s)
        self.reader.join(10)
        return code


def until(condition: Callable[[], Any], within_s: float) -> Any:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.005)
    raise AssertionError(f"not within {within_s} s")


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


Start = Callable[..., Commanded]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the launcher of a command in this test's directory; `more` are further fields of the workload."""
    started: list[Commanded] = []

    def begin(
        command: str = PLAIN, *, publish: str = "", more: str = "", root: Path = tmp_path, **env: str
    ) -> Commanded:
        started.append(Commanded(root, command, publish, more, env))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.wait()
        one.reader.join(10)
        left = one.family()
        for process in left:
            process.kill()
        assert one.process.stdout is not None
        one.process.stdout.close()


def weights(run: Path) -> dict[int, Any]:
    registry = Registry(run / "registry")
    return {version.number: registry.read(version) for version in registry.versions("fit")}


def test_a_killed_script_goes_on_from_its_newest_checkpoint_and_its_model_is_published(
    start: Start, tmp_path: Path
) -> None:
    one = start(PLAIN + " --out out", publish="out/", AT="12:die")
    assert one.ends() == 0, (one.lines, one.said)
    assert one.causes() == ["rank", "done"]
    assert [line["step"] for line in one.events("resumed")] == [10]
    assert [line for line in one.said if line.startswith("from")] == ["from 0", "from 10"]
    assert "step 20" in one.said
    assert "step 13" not in one.said  # a progress bar is condensed
    assert len(one.events("a command, not a function")) == 6  # what is lost, once
    assert [version["weight"].tolist() for version in weights(tmp_path / "run").values()] == [[210.0]]
    assert start(PLAIN + " --out out", publish="out/").ends() == 0  # nothing is left to do
    assert list(weights(tmp_path / "run")) == [1]


def test_what_the_script_was_writing_when_it_died_is_moved_aside_unless_it_shows_to_be_whole(
    start: Start, tmp_path: Path
) -> None:
    one = start(AT="12:tear")
    assert one.ends() == 0
    (torn,) = one.events("checkpoint torn")
    assert torn["checkpoint"] == "state-12.json"
    assert [line["step"] for line in one.events("resumed")] == [10]
    assert (tmp_path / "run/checkpoints/fit/cycle-1/state-12.json.torn").read_text() == '{"step": 9'


def test_a_checkpoint_with_a_flipped_byte_is_never_given_to_the_script(start: Start, tmp_path: Path) -> None:
    one = start(OBEYS="1", AT="12:hang")
    one.until((tmp_path / "run/checkpoints/fit/cycle-1/.befallen").exists)
    one.process.terminate()
    assert one.ends() == 75
    newest = tmp_path / "run/checkpoints/fit/cycle-1/state-10.json"
    changed = newest.stat().st_mtime_ns
    newest.write_text(newest.read_text().replace("55", "65"))
    os.utime(newest, ns=(changed, changed))
    again = start(OBEYS="1")
    assert again.ends() == 0
    assert [line["checkpoint"] for line in again.events("checkpoint damaged")] == ["state-10.json"]
    assert [line["step"] for line in again.events("resumed")] == [5]


def test_silence_longer_than_the_deadline_is_a_hang_and_leaves_no_process_behind(start: Start) -> None:
    one = start(more="hang_timeout: 1 s", AT="7:hang")
    assert one.ends() == 0
    assert one.causes() == ["hang", "done"]
    assert one.events("generation ended")[0]["exit"] == -signal.SIGKILL
    assert len(one.events("hang")) == 1
    assert not one.family()


def test_a_script_that_says_nothing_may_touch_its_heartbeat_instead(start: Start) -> None:
    one = start(PLAIN + " --steps 9", more="hang_timeout: 1 s", BEATS="1", PAUSE_S="0.4")
    assert one.ends() == 0
    assert one.causes() == ["done"]


def test_all_that_a_script_has_started_ends_with_it(start: Start) -> None:
    one = start(AT="7:leave", PAUSE_S="0.1")
    one.until(lambda: len(one.family()) == 2)
    deaf = [process for process in one.family() if "time.sleep(1000)" in " ".join(process.cmdline())]
    assert one.ends() == 0
    assert len(deaf) == 1
    assert not lives(deaf[0])
    assert not one.family()


def test_the_same_crash_three_times_ends_it_with_the_scripts_own_words(start: Start) -> None:
    one = start(AT="3:raise", ALWAYS="1")
    assert one.ends() == 1
    assert [line["error"] for line in one.events("training crashed")] == ["ValueError: boom"] * 3
    assert one.causes() == ["crash"] * 3


def test_a_script_that_is_preempted_saves_within_its_grace_and_the_next_launcher_goes_on(
    start: Start,
) -> None:
    one = start(OBEYS="1", PAUSE_S="0.2")
    one.until(lambda: "from 0" in one.said)
    one.process.send_signal(signal.SIGUSR1)
    assert one.ends() == 75
    (left,) = [line for line in one.said if line.startswith("left at")]
    step = int(left.removeprefix("left at "))
    again = start()
    assert again.ends() == 0
    if step:
        assert again.events("resumed")[0]["step"] == step
    assert f"from {step}" in again.said


def test_processes_that_outlive_a_killed_launcher_are_ended_before_two_write_at_once(start: Start) -> None:
    one = start(AT="7:leave", PAUSE_S="0.2")
    one.until(lambda: len(one.family()) == 2)
    before = one.family()
    one.process.kill()
    one.process.wait()
    again = start()
    assert again.ends() == 0
    assert again.events("ended what a former launcher left")[0]["processes"] >= 1
    assert not any(lives(process) for process in before)


def test_what_lies_in_the_directory_from_before_is_not_taken_for_a_result(
    start: Start, tmp_path: Path
) -> None:
    first = start(PLAIN + " --out out", publish="out/")
    assert first.ends() == 0
    shutil.rmtree(tmp_path / "run")
    second = start(PLAIN, publish="out/")
    assert second.ends() == 1
    assert "has left no model in" in second.lines[-1]["event"]
    assert "of a former run" in second.lines[-1]["event"]
    assert not weights(tmp_path / "run")


def test_each_cycle_begins_anew_and_publishes_once(start: Start, tmp_path: Path) -> None:
    one = start(PLAIN + " --out {publish}", more="every: 1 s", AT="12:die")
    one.until(lambda: len(one.events("cycle finished")) == 2)
    one.process.terminate()
    assert one.ends() in (0, 75)
    assert [line for line in one.said if line.startswith("from")][:3] == ["from 0", "from 10", "from 0"]
    made = [version.made_by["cycle"] for version in Registry(tmp_path / "run/registry").versions("fit")]
    assert made[:2] == [1, 2]


def test_a_rank_that_outlives_another_is_ended_long_before_torchrun_would(start: Start) -> None:
    one = start(f"torchrun --nproc-per-node {{ranks}} {SCRIPTS / 'deaf_peer.py'} {{checkpoints}}")
    assert one.ends() == 0, (one.lines, one.said)
    assert [line["ranks"] for line in one.events("generation started")] == [2, 2]
    assert one.causes() == ["rank", "done"]
    assert len(one.events("laggards are ended")) == 1
    assert one.events("generation ended")[0]["lived_s"] < 30  # torchrun's own wait


def test_a_program_that_is_not_there_is_the_users_to_mend(start: Start) -> None:
    one = start("toorchrun --resume {checkpoint} train.py")
    assert one.ends() == 2
    assert one.lines[-1]["event"].startswith("the program toorchrun of the command is not found")
    assert "begin with python or torchrun" in one.lines[-1]["event"]


def is_saving(root: Path) -> bool:
    """Whether a trainer is in the middle of a checkpoint: the directory is there and not complete."""
    found = root.glob("checkpoint-*")
    return any(not (path / "trainer_state.json").exists() for path in found if path.name[-1].isdecimal())


def shake(one: Commanded, script: str, kills: int, seed: int) -> None:
    """Kill the process that trains, at random moments and, where it can be seen, while it saves."""
    chance, root = random.Random(seed), one.run / "checkpoints" / "fit" / "cycle-1"

    def names() -> set[str]:
        return {path.name for path in root.iterdir() if not path.name.endswith(".torn")}

    for kill in range(1, kills + 1):
        one.until(lambda kill=kill: len(one.events("generation started")) == kill, 120)
        before = names()
        one.until(lambda before=before: names() - before, 120)
        due = time.monotonic() + chance.random() / 2
        one.until(lambda due=due: time.monotonic() > due or (chance.random() < 0.5 and is_saving(root)), 120)
        for process in one.family():
            if f"{script}.py" in " ".join(process.cmdline()[:4]):
                process.kill()
        one.until(lambda kill=kill: len(one.events("generation ended")) == kill, 120)


@pytest.mark.timeout(60 + 60 * KILLS)
@pytest.mark.parametrize(
    ("script", "words", "end"),
    [
        ("hf_trainer", f"python {{}} --steps {STEPS}", f"{STEPS}/{STEPS}"),
        ("lightning_fit", f"torchrun --nproc-per-node 1 {{}} --epochs {STEPS // 5}", f"step {STEPS}"),
    ],
)
def test_a_trainer_of_others_survives_every_kill_with_the_weights_of_the_calm_run(
    start: Start, tmp_path: Path, script: str, words: str, end: str
) -> None:
    trainer = {"hf_trainer": "transformers", "lightning_fit": "lightning"}[script]
    if importlib.util.find_spec(trainer) is None:
        pytest.skip(f"needs {trainer}: pip install 'twinhull[trainers]'")
    words = words.format(f"{SCRIPTS / script}.py {{checkpoints}} out --resume {{checkpoint}}")
    for name in ("calm", "shaken"):
        (tmp_path / name / "out").mkdir(parents=True)
    calm = start(words, publish="out", root=tmp_path / "calm")
    shaken = start(words + " --pause 0.05", publish="out", root=tmp_path / "shaken")
    shake(shaken, script, KILLS, seed=3)
    assert shaken.ends(120) == 0, (shaken.lines, shaken.said[-40:])
    assert calm.ends(60) == 0
    assert shaken.causes() == ["rank"] * KILLS + ["done"]
    assert any(end in line for line in shaken.said)
    expected, found = weights(tmp_path / "calm" / "run")[1], weights(tmp_path / "shaken" / "run")[1]
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(value, found[name], name)
