"""How good are the recommendations, beside what needs no model at all?

Everybody who has bought before a certain minute is given ten items; how many of them are bought after it?
Recall is the share of hits among as many as there could have been (ten, or fewer if fewer were bought),
averaged over customers. On *new* items everything a customer has ever bought is left out, of lists and count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shop.history import Histories, most_sold, purchases
from shop.ranker import TOP, Ranker
from shop.sales import MINUTES_PER_DAY, Ints, Sales

WEEK = 7 * MINUTES_PER_DAY
END = 2**31 - 1
AT_ONCE = 256  # customers


@dataclass(frozen=True, slots=True)
class Customer:
    """What somebody bought before the minute, how often each, what after it, and what of that is new."""

    before: Ints
    times: Ints
    after: Ints
    new: Ints


def customers(sales: Sales, minute: int) -> list[Customer]:
    """Everybody who bought something before the minute and something from it on."""
    known = Histories(sales, minute)
    return [
        Customer(before, known.times(number), after, np.setdiff1d(after, before))
        for number, after in purchases(sales, minute, END).items()
        if len(before := known.of(number))
    ]


def recall(lists: Sequence[Sequence[int]], wanted: Sequence[Ints]) -> float:
    """The recall of lists, averaged over the customers who wanted anything; 0 if there are none."""
    shares = [
        len(set(items) & set(want.tolist())) / min(TOP, len(want))
        for items, want in zip(lists, wanted, strict=True)
        if len(want)
    ]
    return sum(shares) / len(shares) if shares else 0.0


def recall_new(ranker: Ranker, everybody: list[Customer]) -> float:
    """The recall of a model on items that are new to the customer."""
    return recall(_by_model(ranker, everybody, again=False), [customer.new for customer in everybody])


def measure(ranker: Ranker, sales: Sales, minute: int) -> dict[str, float]:
    """The figures of a model that has seen nothing of `minute` and after, beside what needs no model.

    `recall_new` beside the best sellers, of all time and of the week before, that the customer has not
    bought; `recall_any`, on all items, beside what the customer bought most often. Empty if nobody came back.
    """
    everybody = customers(sales, minute)
    new, after = [customer.new for customer in everybody], [customer.after for customer in everybody]
    if not any(len(items) for items in new):
        return {}
    ever, week = most_sold(sales, 0, minute), most_sold(sales, minute - WEEK, minute)
    return {
        "recall_new": recall_new(ranker, everybody),
        "recall_best_sellers": recall([first_new(ever, one.before) for one in everybody], new),
        "recall_best_sellers_week": recall([first_new(week, one.before) for one in everybody], new),
        "recall_any": recall(_by_model(ranker, everybody, again=True), after),
        "recall_any_history": recall([most_bought(one, ever) for one in everybody], after),
        "test_customers": float(sum(len(items) > 0 for items in new)),
    }


def first_new(order: Ints, bought: Ints, count: int = TOP) -> list[int]:
    """The first items of an order that are not among those bought."""
    head = order[: count + len(bought)]
    return head[~np.isin(head, bought)][:count].tolist()


def most_bought(customer: Customer, order: Ints) -> list[int]:
    """What the customer bought most often, filled up with the first of an order."""
    own = customer.before[np.argsort(-customer.times, kind="stable")][:TOP]
    return [*own.tolist(), *first_new(order, own, TOP - len(own))]


def _by_model(ranker: Ranker, everybody: list[Customer], *, again: bool) -> list[list[int]]:
    bought = [customer.before for customer in everybody]
    parts = [bought[begin : begin + AT_ONCE] for begin in range(0, len(bought), AT_ONCE)]
    return [items for part in parts for items in ranker.top(part, again=again)]
