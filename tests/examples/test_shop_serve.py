"""How the shop answers."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from shop import replay, sales
from shop.ranker import Ranker
from shop.sales import MINUTES_PER_DAY, SPLIT, Sales

from twinhull.system.load import load

SHOP = Path(__file__).parents[2] / "examples" / "shop"
LAST_WEEK = SPLIT - 3 * MINUTES_PER_DAY
NUM_ITEMS = 30


@pytest.fixture
def known() -> Sales:
    """20 to 29 sold in the last week, 20 best; 0 to 9 long ago; customer 1 bought 5, 20 and 5 again."""
    lines = [(10, 100 + n, item) for item in range(10) for n in range(20 - item)]
    lines += [(LAST_WEEK, 200 + n, item) for item in range(20, 30) for n in range(40 - item)]
    lines += [(5, 1, 5), (8, 1, 20), (9, 1, 5), (SPLIT, 1, 7), (SPLIT, 2, 8), (SPLIT + 1, 1, 9)]
    minute, customer, item = (np.array(column, np.int32) for column in zip(*sorted(lines), strict=True))
    names = [f"item {number}" for number in range(NUM_ITEMS)]
    return Sales("test", True, minute, customer, item, np.ones(len(lines), np.int32), names)


@pytest.fixture
def serve(known: Sales, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as a fresh process of a run has it."""
    sales.save(known, tmp_path / "sales.npz")
    monkeypatch.setenv(sales.DATA, str(tmp_path / "sales.npz"))
    monkeypatch.setenv(sales.RUN, str(tmp_path / "run"))
    return importlib.reload(importlib.import_module("shop.serve"))


def test_features_are_what_was_bought_before_the_test_period(serve: ModuleType) -> None:
    assert serve.features(1) == [20, 5]
    assert serve.features(user=2) == []


def test_a_new_purchase_is_the_last_one_bought(serve: ModuleType) -> None:
    assert serve.features(1, [7, 20, 7]) == [5, 20, 7]
    assert serve.features(2, [3, -1, NUM_ITEMS, 10**30]) == [3]


@pytest.mark.parametrize("stranger", [77, -5, 10**30])
def test_a_stranger_gets_an_answer(serve: ModuleType, stranger: int) -> None:
    assert serve.features(stranger) == []
    assert len(serve.best_sellers(stranger)) == 10


def test_rank_answers_each_row(serve: ModuleType) -> None:
    items = np.zeros((NUM_ITEMS, 1), np.float32)
    bias = np.arange(NUM_ITEMS, dtype=np.float32)
    ranker = Ranker(np.zeros((NUM_ITEMS + 1, 1), np.float32), items, bias)
    answers = serve.rank([[29], []], model=ranker)
    assert answers == [list(range(28, 18, -1)), list(range(29, 19, -1))]
    assert serve.rank([], model=ranker) == []


def test_best_sellers_are_those_of_the_week_that_the_customer_has_not_bought(serve: ModuleType) -> None:
    assert serve.best_sellers(2) == list(range(20, 30))
    assert serve.best_sellers(1, [21]) == [*range(22, 30), 0, 1]


def test_the_nightly_list_is_taken_as_soon_as_it_is_there(serve: ModuleType, tmp_path: Path) -> None:
    before = serve.best_sellers(2)
    path = tmp_path / "run" / "shop" / "best_sellers.json"
    assert serve.rebuild_best_sellers() == NUM_ITEMS
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert serve.best_sellers(2) == before
    other = path.with_suffix(".new")
    other.write_text(json.dumps(list(range(NUM_ITEMS))))
    os.utime(other, (1, 1))
    other.replace(path)
    assert serve.best_sellers(2) == list(range(10))


@pytest.mark.parametrize("content", ["", "[1, 2", '{"a": 1}', '"text"'])
def test_a_broken_nightly_list_does_not_cost_the_answer(
    serve: ModuleType, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "run" / "shop" / "best_sellers.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert serve.best_sellers(2) == list(range(20, 30))


def test_outside_a_run_the_nightly_job_keeps_nothing(
    serve: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(sales.RUN)
    assert serve.rebuild_best_sellers() == NUM_ITEMS
    assert serve.best_sellers(2) == list(range(20, 30))


def test_serving_and_replay_import_no_torch() -> None:
    code = "import sys; import shop.serve, shop.replay; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=SHOP, check=False).returncode == 0


def test_the_replay_is_the_test_period_at_the_stated_pace(known: Sales) -> None:
    lines = list(replay.requests(known, rate=2.0, seconds=100.0))
    assert [line["at"] for line in lines] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert [line["body"] for line in lines if line["path"] == "/recommend"] == [
        {"user": 1},
        {"user": 2},
        {"user": 1},
    ]
    assert lines[-1] == {
        "at": 2.5,
        "path": "/events/purchase",
        "body": {"user": 1, "item": 9, "minute": SPLIT + 1},
    }
    assert len(list(replay.requests(known, rate=2.0, seconds=1.0))) == 2


def test_asks_and_purchases_can_be_had_apart(known: Sales) -> None:
    asks, bought = replay.purchases(known)
    assert [json.loads(shot.body) for shot in asks] == [{"user": 1}, {"user": 2}, {"user": 1}]
    assert [json.loads(shot.body)["item"] for shot in bought] == [7, 8, 9]


def test_the_replay_prints_what_the_load_generator_reads(serve: ModuleType) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shop.replay", "--rate", "4/s", "--seconds", "1"],
        cwd=SHOP, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [json.loads(line)["path"] for line in done.stdout.splitlines()] == [replay.ASK, replay.TELL] * 2
    assert "4 requests and events from" in done.stderr


def test_the_system_file_names_functions_that_are_there() -> None:
    described = load(SHOP / "shop.yaml")
    for component in described.system.components.values():
        run = getattr(component, "run", None)
        if run is not None:
            module, _, name = run.partition(":")
            assert callable(getattr(importlib.import_module(module), name))
