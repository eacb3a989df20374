"""What would a shop look like whose sales we may not have? A seeded one of the same shape as the real one.

Every item belongs to a taste and has a season; every customer has two tastes and a few items bought again and
again. So popularity is skewed and drifts, purchases repeat, and what was bought says what comes next.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shop.sales import MINUTES_PER_DAY, SYNTHETIC, Ints, Sales

DAYS = 374
HIGHEST_CUSTOMER = 5_941
TASTES = 60
STAPLES = 30  # items that a customer comes back for
SHARE_OF_STAPLES, SHARE_OF_TASTE = 0.30, 0.50  # of the lines; the rest is whatever sells now
SHARE_OF_FIRST_TASTE = 0.75

Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def make(
    *,
    seed: int = 2011,
    customers: int = 4_338,
    items: int = 3_866,
    baskets: int = 18_500,
    basket: float = 21.5,
) -> Sales:
    """A shop with so many customers, items and baskets of `basket` lines on average; one seed, one shop."""
    rng = np.random.default_rng(seed)
    busy = rng.pareto(1.5, customers) + 0.3
    again_k = rng.choice(customers, max(0, baskets - customers), p=busy / busy.sum())
    customer_k = np.concatenate([np.arange(customers), again_k])[:baskets]  # everybody came once
    day_k = np.floor(DAYS * rng.beta(2.0, 1.0, baskets))  # trade grows towards the end of the year
    minute_k = (day_k * MINUTES_PER_DAY).astype(np.int64) + rng.integers(7 * 60, 20 * 60, baskets)
    lines_k = np.maximum(1, rng.lognormal(np.log(basket) - 0.5, 1.0, baskets)).astype(np.int64)
    customer, minute = np.repeat(customer_k, lines_k), np.repeat(minute_k, lines_k)
    item = _items(rng, _shelf(rng, items), customer, minute // (7 * MINUTES_PER_DAY), customers)
    order = np.lexsort((item, customer, minute))
    numbers = np.sort(rng.choice(max(HIGHEST_CUSTOMER + 1, customers), customers, replace=False))
    quantity = rng.geometric(0.15, len(item))

    def column(values: Longs) -> Ints:
        return values[order].astype(np.int32)

    names = [f"ITEM {number:04d}" for number in range(items)]
    minute, who, item, quantity = map(column, (minute, numbers[customer], item, quantity))
    return Sales(SYNTHETIC, False, minute, who, item, quantity, names)


@dataclass(frozen=True, slots=True)
class _Shelf:
    """Items in the order of their tastes. `upto_WI`: per week the share of sales up to and with an item."""

    upto_WI: Floats
    begin_T: Longs
    end_T: Longs

    def draw(self, rng: np.random.Generator, week: Longs, taste: Longs | None) -> Longs:
        """One item for each week, of its taste if one is given, as likely as it sells in that week."""
        num_items = self.upto_WI.shape[1]
        low, high = np.zeros(len(week)), np.ones(len(week))
        if taste is not None:
            low = np.where(self.begin_T[taste] > 0, self.upto_WI[week, self.begin_T[taste] - 1], 0.0)
            high = self.upto_WI[week, self.end_T[taste] - 1]
        point = low + rng.random(len(week)) * (high - low)
        # All weeks in one sorted row: week w lies between w and w + 1.
        row = (self.upto_WI + np.arange(len(self.upto_WI))[:, None]).ravel()
        found = np.searchsorted(row, week + point, side="right") - week * num_items
        return np.clip(found, 0, num_items - 1)


def _shelf(rng: np.random.Generator, items: int) -> _Shelf:
    taste_I = np.sort(np.arange(items) % TASTES)
    peak_I = rng.uniform(-10, DAYS / 7 + 15, items)  # some seasons are past, some still to come
    width_I = rng.uniform(5, 40, items)
    liked_I = rng.pareto(1.1, items) + 0.15
    week_W = np.arange(DAYS // 7 + 1)
    weight_WI = np.minimum(liked_I, 30) * (0.05 + np.exp(-0.5 * ((week_W[:, None] - peak_I) / width_I) ** 2))
    upto_WI = np.cumsum(weight_WI, axis=1)
    tastes = np.arange(TASTES)
    begin_T, end_T = (np.searchsorted(taste_I, tastes, side) for side in ("left", "right"))
    return _Shelf(upto_WI / upto_WI[:, -1:], begin_T.astype(np.int64), end_T.astype(np.int64))


def _items(rng: np.random.Generator, shelf: _Shelf, customer: Longs, week: Longs, customers: int) -> Longs:
    """What is on each line, given who buys and when."""
    tastes = np.flatnonzero(shelf.end_T > shelf.begin_T)
    taste_U2 = rng.choice(tastes, (customers, 2))
    second = (rng.random(len(customer)) > SHARE_OF_FIRST_TASTE).astype(np.int64)
    staple_of = np.repeat(np.arange(customers), STAPLES)
    begun = rng.integers(0, len(shelf.upto_WI), customers)[staple_of]
    staple_US = shelf.draw(rng, begun, taste_U2[staple_of, 0]).reshape(customers, STAPLES)
    favourite = np.minimum(rng.geometric(0.12, len(customer)) - 1, STAPLES - 1)
    kind = rng.random(len(customer))
    return np.select(
        [kind < SHARE_OF_STAPLES, kind < SHARE_OF_STAPLES + SHARE_OF_TASTE],
        [staple_US[customer, favourite], shelf.draw(rng, week, taste_U2[customer, second])],
        shelf.draw(rng, week, None),
    )
