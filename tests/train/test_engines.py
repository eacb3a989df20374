"""All engines train alike: by one loop, at any number of ranks, and from each other's checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRIAL = Path(__file__).parent / "apps" / "engines_trial.py"
OF_ZERO = ["zero-1", "zero-2", "zero-3"]
A_FEW = 26  # the end of an epoch and some gradients that are clipped among them
OF_TWO = ["ddp", "fsdp", *OF_ZERO]

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

Facts = dict[str, Any]


class Ranks:
    """What jobs of 1, 2 and 4 ranks have said. Each is started once, at the first question."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._said: dict[int, dict[str, Any]] = {}

    def of(self, world_size: int) -> dict[str, Any]:
        if world_size not in self._said:
            self._said[world_size] = self._start(world_size)
        return self._said[world_size]

    def _start(self, world_size: int) -> dict[str, Any]:
        if world_size != 2:
            self.of(2)  # has left the checkpoints
        asked = self._asked(world_size)
        answers = self._directory / f"of-{world_size}"
        answers.mkdir()
        ended = subprocess.run(
            [sys.executable, str(TRIAL), str(answers), str(world_size), json.dumps([*asked.values()])],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        said = {
            name: json.loads((answers / f"{number}.json").read_text()) for number, name in enumerate(asked)
        }
        return {**said, "noise": ended.stdout + ended.stderr}

    def _asked(self, world_size: int) -> dict[str, tuple[str, Facts]]:
        if world_size == 1:
            return {
                "single": ("agree", {}),
                "single in micro-batches": ("agree", {"micro_batch": 3, "steps": A_FEW}),
                "zero-3": ("agree", {"engine": "zero-3"}),
                "resumed zero": ("refused", self._saved("zero-1")),
            }
        if world_size == 4:
            hsdp = {"engine": "hsdp", "shard": 2}
            return {
                "hsdp": ("agree", {**hsdp, "steps": A_FEW}),
                "hsdp in micro-batches": ("agree", {**hsdp, "micro_batch": 1, "steps": A_FEW}),
                "resumed": ("resume", {**self._saved("fsdp"), **hsdp}),
            }
        micro, bf16 = {"micro_batch": 3, "steps": A_FEW}, {"precision": "bf16", "steps": 10}
        return {
            **{engine: ("agree", {"engine": engine}) for engine in OF_TWO},
            **{f"{engine} in micro-batches": ("agree", {"engine": engine, **micro}) for engine in OF_TWO},
            **{f"{engine} in bf16": ("agree", {"engine": engine, **bf16}) for engine in OF_TWO},
            **{
                f"resumed {engine}": ("resume", self._saved(engine))
                for engine in ("fsdp", "zero-1", "zero-3")
            },
            "recomputed": ("agree", {"engine": "fsdp", "recompute": True, "steps": A_FEW}),
            "offloaded zero-2": ("agree", {"engine": "zero-2", "offload": True, **micro}),
            "offloaded zero-3": ("agree", {"engine": "zero-3", "offload": True}),
            "offloaded": ("agree", {"engine": "fsdp", "offload": True, "steps": A_FEW}),
            "tied": ("unfit", {"engine": "fsdp", "how": "tied"}),
            "empty": ("unfit", {"engine": "fsdp", "how": "empty"}),
            "optimizer first, fsdp": ("optimizer_first", {"engine": "fsdp"}),
            "optimizer first, zero": ("optimizer_first", {"engine": "zero-1"}),
        }

    def _saved(self, engine: str) -> Facts:
        return {"engine": engine, "directory": str(self._directory / engine)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("engines"))


def agree(one: Any, other: Any) -> None:
    """Losses of all steps, norms of gradients and weights, to five digits."""
    steps = len(one["losses"])
    assert one["losses"] == pytest.approx(other["losses"][:steps], rel=1e-5)
    assert one["norms"] == pytest.approx(other["norms"], rel=1e-5)
    assert one["state"].keys() == other["state"].keys()
    for name, values in other["state"].items() if steps == len(other["losses"]) else ():
        assert one["state"][name] == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize("how", ["", " in micro-batches"])
@pytest.mark.parametrize("engine", OF_TWO)
def test_two_ranks_train_as_one_would(ranks: Ranks, engine: str, how: str) -> None:
    agree(ranks.of(2)[engine + how], ranks.of(1)["single"])


@pytest.mark.parametrize("engine", ["zero-2", "zero-3"])
def test_an_optimizer_in_cpu_memory_trains_as_one_rank_would(ranks: Ranks, engine: str) -> None:
    agree(ranks.of(2)[f"offloaded {engine}"], ranks.of(1)["single"])


@pytest.mark.parametrize("how", ["", " in micro-batches"])
def test_copies_of_shards_train_as_one_rank_would(ranks: Ranks, how: str) -> None:
    agree(ranks.of(4)["hsdp" + how], ranks.of(1)["single"])


@pytest.mark.parametrize("how", ["single in micro-batches", "zero-3"])
def test_one_rank_trains_alike_by_any_engine(ranks: Ranks, how: str) -> None:
    agree(ranks.of(1)[how], ranks.of(1)["single"])


@pytest.mark.parametrize("how", ["recomputed", "offloaded"])
def test_what_saves_memory_changes_no_number(ranks: Ranks, how: str) -> None:
    assert ranks.of(2)[how]["losses"] == ranks.of(2)["fsdp"]["losses"][:A_FEW]


@pytest.mark.parametrize("engine", OF_TWO)
def test_bf16_computes_roughly_and_keeps_weights_whole(ranks: Ranks, engine: str) -> None:
    rough, exact = ranks.of(2)[f"{engine} in bf16"], ranks.of(2)[engine]
    assert rough["losses"] != exact["losses"][:10]
    assert rough["losses"] == pytest.approx(exact["losses"][:10], rel=0.1, abs=0.02)
    assert set(rough["types"]) == {"torch.float32"}


@pytest.mark.parametrize("engine", ["fsdp", "zero-1", "zero-3"])
def test_a_checkpoint_is_gone_on_from_to_the_last_digit(ranks: Ranks, engine: str) -> None:
    said = ranks.of(2)[f"resumed {engine}"]
    assert said["resumed"] == said["gone_on"]


def test_a_checkpoint_of_two_shards_is_gone_on_from_by_two_copies_of_two(ranks: Ranks) -> None:
    assert ranks.of(4)["resumed"]["resumed"] == pytest.approx(
        ranks.of(2)["resumed fsdp"]["gone_on"], rel=1e-5
    )


def test_what_deepspeed_saved_is_refused_by_another_number_of_ranks(ranks: Ranks) -> None:
    assert "is of 2 ranks and does not fit 1" in ranks.of(1)["resumed zero"]


@pytest.mark.parametrize("engine", OF_TWO)
def test_the_end_of_own_computation_is_told_in_each_step(ranks: Ranks, engine: str) -> None:
    assert ranks.of(2)[engine]["steps_told"] == len(ranks.of(2)[engine]["losses"])


def test_an_optimizer_of_parameters_that_are_sharded_later_is_refused(ranks: Ranks) -> None:
    said = ranks.of(2)
    assert "22 of its 22 parameters are not those of a wrapped model" in said["optimizer first, fsdp"]
    assert "takes one model, then one optimizer" in said["optimizer first, zero"]


def test_what_fsdp_cannot_shard_is_refused(ranks: Ranks) -> None:
    said = ranks.of(2)
    assert "blocks.1.inner.weight is the same parameter as blocks.0.inner.weight" in said["tied"]
    assert "enter.weight has no values" in said["empty"]


def test_engines_say_nothing_of_their_own(ranks: Ranks) -> None:
    assert ranks.of(2)["noise"] == ""
