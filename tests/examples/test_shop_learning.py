"""What the shop learns from, and how well."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from shop import fit, sales, synthetic
from shop.baskets import Baskets, Purchases, log_popularity
from shop.evaluate import customers, first_new, measure, most_bought, recall
from shop.history import Histories, most_sold, purchases
from shop.model import TwoTower
from shop.ranker import LONGEST, Ranker, best
from shop.sales import SPLIT, Sales

from twinhull.train.run import Run

SHOP = Path(__file__).parents[2] / "examples" / "shop"


def sold(*lines: tuple[int, int, int], items: int = 20) -> Sales:
    """Sales of these lines: minute, customer, item."""
    minute, customer, item = (np.array(column, np.int32) for column in zip(*lines, strict=True))
    names = [f"item {number}" for number in range(items)]
    return Sales("test", False, minute, customer, item, np.ones(len(lines), np.int32), names)


def small() -> Sales:
    return synthetic.make(customers=600, items=400, baskets=3_000, basket=10.0)


def shuffled_after(known: Sales, minute: int) -> Sales:
    """The same sales, with another future."""
    rng = np.random.default_rng(0)
    after = known.minute >= minute
    item, customer = known.item.copy(), known.customer.copy()
    item[after] = rng.integers(0, known.num_items, int(after.sum()))
    customer[after] = rng.permutation(customer[after])
    return replace(known, item=item, customer=customer)


def test_a_history_holds_each_item_once_the_last_bought_at_the_end() -> None:
    known = sold((1, 7, 3), (2, 7, 4), (2, 8, 4), (3, 7, 3), (4, 7, 5), (9, 7, 6))
    histories = Histories(known, before=9)
    assert histories.of(7).tolist() == [4, 3, 5]
    assert histories.times(7).tolist() == [1, 2, 1]


@pytest.mark.parametrize("stranger", [0, 6, 9, -1, 32_768, 2**40, 10**30])
def test_a_stranger_has_no_history(stranger: int) -> None:
    assert Histories(sold((1, 7, 3), (2, 8, 4)), before=9).of(stranger).tolist() == []


def test_purchases_are_those_of_the_span() -> None:
    known = sold((1, 7, 3), (2, 8, 4), (3, 8, 4), (3, 7, 5), (4, 7, 6))
    found = purchases(known, 2, 4)
    assert {customer: items.tolist() for customer, items in found.items()} == {7: [5], 8: [4]}
    assert purchases(known, 5, 9) == {}


def test_best_sellers_are_counted_by_customers_and_ties_go_to_the_older_success() -> None:
    known = sold(
        (1, 1, 2), (1, 2, 2), (8, 1, 0), (8, 1, 0), (8, 1, 1), (8, 2, 1), (9, 3, 2), (11, 1, 3), items=4
    )
    assert most_sold(known, 8, 11).tolist() == [1, 2, 0, 3]


def test_nothing_after_the_split_reaches_training_or_serving() -> None:
    known = small()
    other = shuffled_after(known, SPLIT)
    one, two = Baskets(known, SPLIT), Baskets(other, SPLIT)
    everything = list(range(len(one)))
    assert len(one) == len(two)
    for mine, theirs in zip(one.__getitems__(everything), two.__getitems__(everything), strict=True):
        assert torch.equal(mine, theirs)
    assert np.array_equal(log_popularity(known, SPLIT), log_popularity(other, SPLIT))
    assert np.array_equal(most_sold(known, 0, SPLIT), most_sold(other, 0, SPLIT))
    for customer in np.unique(known.customer).tolist():
        assert np.array_equal(Histories(known, SPLIT).of(customer), Histories(other, SPLIT).of(customer))


def test_a_basket_is_seen_with_what_came_before_it_and_teaches_what_was_new() -> None:
    known = sold((1, 7, 3), (1, 7, 4), (1, 8, 5), (2, 7, 3), (3, 7, 4), (3, 7, 6), (9, 7, 8))
    batch = Baskets(known, 9).__getitems__([0, 1, 2])
    assert [row[row < 20].tolist() for row in batch.bought_BL] == [[], [4, 3], []]
    assert batch.basket_T.tolist() == [0, 0, 1, 2]
    assert batch.item_T.tolist() == [3, 4, 6, 5]


def test_newer_baskets_weigh_more_and_all_together_one_each() -> None:
    known = sold((0, 7, 3), (20 * 1440, 8, 4), (40 * 1440, 9, 5))
    baskets = Baskets(known, 40 * 1440 + 1)
    weight = baskets.__getitems__([0, 1, 2]).weight_T
    assert weight[2] / weight[1] == pytest.approx(2.0, rel=1e-3)
    assert float(weight.sum()) == pytest.approx(3.0, rel=1e-6)


def test_an_event_teaches_only_what_is_new_to_its_customer() -> None:
    collate = Purchases(sold((1, 7, 3), (1, 7, 4)), before=9)
    bodies = [{"user": 7, "item": 3, "minute": 12}, {"user": 7, "item": 5, "minute": 11}]
    batch, newest = collate(bodies)
    assert batch.weight_T.tolist() == [0.0, 1.0]
    assert newest == 12


@pytest.mark.parametrize(
    "body",
    [None, 3, "x", [], {}, {"user": 7}, {"user": 7, "item": 20, "minute": 1},
     {"user": -1, "item": 2, "minute": 1}, {"user": 7, "item": "2", "minute": 1},
     {"user": 7, "item": 2.5, "minute": 1}, {"user": 7, "item": 2, "minute": None},
     {"user": 7, "item": 2, "minute": 2**63}],
)  # fmt: skip
def test_an_event_that_is_no_purchase_is_left_out_and_said_once(
    body: object, caplog: pytest.LogCaptureFixture
) -> None:
    collate = Purchases(sold((1, 7, 3)), before=9)
    batch, newest = collate([body, {"user": 7, "item": 5, "minute": 11}, body])
    assert (batch.item_T.tolist(), newest) == ([5], 11)
    assert len(caplog.records) == 1
    assert collate([])[1] == collate([body])[1] == -1


def test_a_batch_without_baskets_has_a_loss_of_zero_and_gradients() -> None:
    model = TwoTower(20, 4)
    loss = model.loss(Purchases(sold((1, 7, 3)), before=9)([])[0])
    loss.backward()
    assert loss.item() == 0.0
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_ranker_scores_as_the_model_does() -> None:
    torch.manual_seed(1)
    model = TwoTower(300, 8)
    torch.nn.init.normal_(model.bias)
    long = list(range(200))
    histories = [[], [5], [9, 3, 7], long]
    padded = torch.full((4, LONGEST), 300)
    for row, items in zip(padded, histories, strict=True):
        row[: min(len(items), LONGEST)] = torch.tensor(items[-LONGEST:], dtype=torch.int64)
    ranker = Ranker.from_tensors({name: tensor.numpy() for name, tensor in model.state_dict().items()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(ranker.scores(histories)), model(padded))


def test_a_model_comes_back_from_its_tensors_whatever_its_size() -> None:
    model = TwoTower(30, 4)
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    again = TwoTower.from_tensors(tensors)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_tensors_that_do_not_fit_together_make_no_ranker() -> None:
    tensors = {name: tensor.numpy() for name, tensor in TwoTower(30, 4).state_dict().items()}
    with pytest.raises(ValueError, match="shapes do not fit"):
        Ranker.from_tensors({**tensors, "bias": np.zeros(29)})


def test_what_was_bought_is_not_recommended_unless_again() -> None:
    ranker = Ranker(
        np.zeros((13, 1), np.float32), np.zeros((12, 1), np.float32), np.arange(12, dtype=np.float32)
    )
    assert ranker.top([[11, 9], []]) == [[10, 8, 7, 6, 5, 4, 3, 2, 1, 0], [11, 10, 9, 8, 7, 6, 5, 4, 3, 2]]
    assert ranker.top([list(range(5))]) == [[11, 10, 9, 8, 7, 6, 5]]
    assert ranker.top([[11]], again=True)[0][0] == 11


def test_the_best_of_fewer_than_ten_are_all() -> None:
    assert best(np.array([1.0, 3.0, 2.0], np.float32)) == [1, 2, 0]


def test_recall_by_hand() -> None:
    ten = list(range(10))
    many = np.arange(100, dtype=np.int32)  # all ten hit, of the ten that could
    two = np.array([3, 50], np.int32)  # one of two
    none = np.array([], np.int32)  # does not count
    assert recall([ten, ten, ten], [many, two, none]) == pytest.approx(0.75)
    assert recall([], []) == 0.0


def test_measure_by_hand() -> None:
    # Customer 1 buys 0 and 1, later 1 again and 2; customer 2 buys 2, later again; customer 3 comes later.
    known = sold(
        (10, 1, 0), (11, 1, 1), (11, 1, 1), (12, 2, 2), (20, 1, 1), (20, 1, 2), (21, 2, 2), (22, 3, 0)
    )
    ranker = Ranker(np.zeros((21, 1), np.float32), np.zeros((20, 1), np.float32), np.zeros(20, np.float32))
    ranker.bias_I[2] = 1.0
    everybody = customers(known, 20)
    assert [(one.before.tolist(), one.new.tolist()) for one in everybody] == [([0, 1], [2]), ([2], [])]
    assert most_bought(everybody[0], np.arange(20, dtype=np.int32)) == [1, 0, *range(2, 10)]
    figures = measure(ranker, known, 20)
    assert figures["recall_new"] == 1.0
    assert figures["recall_best_sellers"] == 1.0
    assert figures["recall_any_history"] == 1.0
    assert figures["test_customers"] == 1.0
    ranker.bias_I[2] = -1.0
    assert measure(ranker, known, 20)["recall_new"] == 0.0
    assert measure(ranker, known, 22) == {}


def test_the_first_new_of_an_order_leave_out_what_was_bought() -> None:
    assert first_new(np.arange(20, dtype=np.int32), np.array([0, 2, 19], np.int32), 3) == [1, 3, 4]


@pytest.mark.timeout(60)
def test_a_short_training_beats_best_sellers_on_the_synthetic_shop() -> None:
    figures = fit.first_night(Run.alone(), synthetic.make(), epochs=4)
    assert figures["recall_new"] >= 1.5 * max(
        figures["recall_best_sellers"], figures["recall_best_sellers_week"]
    )
    assert figures["real_sales"] == 0.0


def test_a_version_for_other_sales_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        sales.SalesError, match=r"knows 30 items and these sales have 20\. Put the old sales back"
    ):
        fit.later_night(Run.alone(), sold((1, 7, 3)), TwoTower(30, 4))


def test_without_purchases_a_later_night_publishes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = Run.alone(directory=tmp_path)
    fit.later_night(run, sold((1, 7, 3)), TwoTower(20, 4))
    assert "no purchases since, nothing to publish" in caplog.text
    assert run.latest(TwoTower) is None


def test_the_same_sales_and_seed_give_the_same_figures() -> None:
    first, second = (fit.first_night(Run.alone(seed=3), small(), epochs=1) for _ in range(2))
    assert first == second


@pytest.mark.live
@pytest.mark.timeout(120)
def test_two_ranks_reach_the_bar_on_the_real_sales() -> None:
    named = os.environ.get(sales.DATA, sales.SYNTHETIC)
    if named == sales.SYNTHETIC:
        pytest.skip(f"{sales.DATA} names no real sales")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "shop.fit",
    ]
    done = subprocess.run(command, cwd=SHOP, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    figures = {
        words[0]: float(words[-1]) for line in done.stdout.splitlines() if len(words := line.split()) == 2
    }
    assert figures["real_sales"] == 1.0
    assert figures["recall_new"] >= 0.070
    assert figures["recall_new"] >= 1.75 * figures["recall_best_sellers"]
    assert figures["recall_new"] >= 1.2 * figures["recall_best_sellers_week"]
