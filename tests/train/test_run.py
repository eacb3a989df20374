import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from twinhull import broker
from twinhull.errors import CheckpointError, TwinhullError, UserCodeError
from twinhull.handoff.registry import Registry
from twinhull.train.checkpoints.store import Store
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.run import Run
from twinhull.train.supervise.rank import training_function

APPS = Path(__file__).parent / "apps"


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)


def train(run: Run, epochs: int = 1, *, leave_at: int | None = None) -> tuple[nn.Module, list[int]]:
    """Which samples one life of a run has trained; it may be cut short by `leave_at`."""
    model, seen = run.wrap(Net()), []
    for numbers in run.steps(run.loader(list(range(10)), batch_size=4, collate=list), epochs=epochs):
        seen += numbers
        if run.step == leave_at:
            run.ask_to_stop()
    return model, seen


def test_alone_in_plain_python_nothing_is_needed_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run.alone()
    model, seen = train(run, epochs=2)
    assert sorted(seen) == sorted(list(range(10)) * 2)
    assert run.step == 6
    assert run.publish(model, metrics={"recall": 0.5}) is None
    assert run.latest(Net) is None
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as left:
        train(Run.alone(directory=tmp_path), leave_at=1)
    assert left.value.code == 75
    again = Run.alone(directory=tmp_path)
    assert again.step == 2
    _, seen = train(again)
    whole = train(Run.alone())[1]
    assert seen == whole[8:]


def test_random_numbers_of_a_step_depend_on_the_step_alone() -> None:
    def draw() -> list[float]:
        run = Run.alone()
        loader = run.loader(list(range(6)), batch_size=2)
        return [float(torch.rand(1)) + float(np.random.rand()) for _ in run.steps(loader)]

    assert draw() == draw()


def test_a_break_ends_the_loop_and_the_next_one_begins_afresh() -> None:
    run = Run.alone()
    loader = run.loader(list(range(10)), batch_size=4, collate=list)
    for _ in run.steps(loader):
        break
    assert run.step == 1
    assert sorted(n for numbers in run.steps(loader) for n in numbers) == list(range(10))


def test_the_last_short_batch_is_not_dropped() -> None:
    run = Run.alone()
    assert [len(b) for b in run.steps(run.loader(list(range(10)), batch_size=4, collate=list))] == [4, 4, 2]


def test_an_empty_dataset_has_no_steps() -> None:
    run = Run.alone()
    assert list(run.steps(run.loader([], batch_size=4))) == []


def test_a_dataset_may_give_whole_batches_itself() -> None:
    class Table:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, number: int) -> int:
            raise AssertionError("one by one is slow")

        def __getitems__(self, numbers: list[int]) -> torch.Tensor:
            return torch.tensor(numbers)

    run = Run.alone()
    assert torch.cat(list(run.steps(run.loader(Table(), batch_size=2, shuffle=False)))).tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_published_weights_are_those_of_the_model_and_latest_loads_them(tmp_path: Path) -> None:
    run = Run.alone(name="fit", directory=tmp_path)
    model, _ = train(run)
    assert run.publish(model, metrics={"recall": 0.5}) == 1
    version = Registry(tmp_path / "registry").newest("fit")
    assert version is not None
    assert version.metrics == {"recall": 0.5}
    latest = Run.alone(name="fit", directory=tmp_path).latest(Net)
    assert latest is not None
    assert latest.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(latest.state_dict(), model.state_dict())


def test_latest_uses_from_tensors_where_the_class_has_it(tmp_path: Path) -> None:
    class Mine:
        def __init__(self, names: list[str]) -> None:
            self.names = names

        @classmethod
        def from_tensors(cls, tensors: dict[str, np.ndarray]) -> "Mine":
            return cls(sorted(tensors))

    run = Run.alone(directory=tmp_path)
    run.publish(train(run)[0])
    latest = run.latest(Mine)
    assert latest is not None
    assert latest.names == ["bias", "weight"]


def test_code_that_wraps_something_else_than_what_was_saved_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        train(Run.alone(directory=tmp_path), leave_at=1)
    run = Run.alone(directory=tmp_path)
    with pytest.raises(CheckpointError, match="holds Net as wrapped thing 1, the code wraps Linear"):
        run.wrap(nn.Linear(1, 1))


def test_a_dataset_that_has_grown_is_noticed_when_a_loop_is_taken_up_again(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        train(Run.alone(directory=tmp_path), leave_at=1)
    run = Run.alone(directory=tmp_path)
    run.wrap(Net())
    with pytest.raises(CheckpointError, match="has 11 samples and had 10"):
        list(run.steps(run.loader(list(range(11)), batch_size=4)))


def test_what_cannot_be_kept_is_refused_when_it_is_wrapped() -> None:
    class Mine:
        def state_dict(self) -> dict[str, object]:
            return {"when": object()}

        def load_state_dict(self, state: dict[str, object]) -> None:
            pass

    with pytest.raises(
        TwinhullError, match=r"Mine cannot be wrapped: its state\['when'\] is a builtins.object"
    ):
        Run.alone().wrap(Mine())


def test_a_damaged_checkpoint_is_refused_and_the_run_goes_on_from_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for leave_at in (1, 3):
        with pytest.raises(SystemExit):
            train(Run.alone(directory=tmp_path), epochs=2, leave_at=leave_at)
    file = tmp_path / "checkpoints" / "alone" / "step-000000004" / "state.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert Run.alone(directory=tmp_path).step == 2
    assert "checkpoint refused" in caplog.messages


def test_what_a_function_draws_outside_its_loops_is_the_same_in_every_life(tmp_path: Path) -> None:
    def life(run: Run, *, leave_at: int | None = None) -> list[float]:
        drawn = [random.random()]
        train(run)
        drawn.append(random.random())
        train(run, leave_at=leave_at)
        return drawn

    with pytest.raises(SystemExit):
        life(Run.alone(directory=tmp_path), leave_at=4)
    resumed = Run.alone(directory=tmp_path)
    assert resumed.step == 5
    assert life(resumed) == life(Run.alone())


def test_a_function_that_cannot_be_loaded_is_told_in_one_line() -> None:
    with pytest.raises(UserCodeError, match="no_such:fit cannot be loaded: ModuleNotFoundError"):
        training_function("no_such:fit")


@pytest.mark.live
@pytest.mark.timeout(90)
def test_gradients_of_unequal_parts_equal_those_of_one_process() -> None:
    """Two ranks under plain torchrun with 3 and 2 samples, then with 1 and none."""
    script = str(APPS / "tail.py")
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    one = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, env=env)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    two = subprocess.run([*torchrun, script], check=True, capture_output=True, text=True, env=env)
    expected = dict(line.split(maxsplit=1) for line in one.stdout.splitlines())
    found = [line.split(maxsplit=1) for line in two.stdout.splitlines()]
    assert sorted(size for size, _ in found) == ["1", "1", "5", "5"]
    for size, gradients in found:
        for ours, theirs in zip(json.loads(gradients), json.loads(expected[size]), strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))


@pytest.mark.live
@pytest.mark.timeout(90)
def test_under_plain_torchrun_sigterm_saves_one_step_on_all_ranks(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(APPS)}
    script = [str(APPS / "by_torchrun.py"), str(tmp_path)]
    process = subprocess.Popen([*torchrun, *script], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as said:
        assert said.readline() == "step 20\n"
        process.terminate()
        said.read()
    process.wait(30)  # with 1, though all went well: the checkpoint must tell
    found = Store(tmp_path / "checkpoints" / "fit").newest()
    assert found is not None
    assert found.place.step >= 20
    assert found.world_size == 2


def test_publishing_needs_no_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(broker.VARIABLE, f"unix://{tmp_path}/nobody.sock")
    run = Run(Job(name="fit", system="shop", directory=tmp_path), Group(0, 1, torch.device("cpu")))
    model, _ = train(run)
    assert run.publish(model) == 1
    assert Registry(tmp_path / "registry").newest("fit") is not None


def test_a_loss_that_is_no_number_in_the_last_step_of_a_stream_is_not_saved(tmp_path: Path) -> None:
    run = Run.alone(name="fit", directory=tmp_path)
    with pytest.raises(TwinhullError, match=r"not finite: found after step 3; nothing was saved yet"):
        for numbers in run.steps(run.loader(iter(range(6)), batch_size=2, collate=list)):
            run.report(loss=float("nan") if 5 in numbers else 1.0)
    assert Store(tmp_path / "checkpoints" / "fit").newest() is None
