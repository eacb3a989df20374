"""What does training see? Baskets and what came before them, from the sales and the events of the day."""

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from shop.history import Histories
from shop.model import Batch
from shop.ranker import LONGEST
from shop.sales import MINUTES_PER_DAY, Ints, Sales

HALF_LIFE = 20 * MINUTES_PER_DAY  # a basket this old counts half: what a shop sells changes
HALF_LIFE_OF_POPULARITY = 7 * MINUTES_PER_DAY

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]


def log_popularity(sales: Sales, before: int) -> Floats:
    """The logarithm of how much each item sold before a minute, lately above all: where its bias begins."""
    size = int(np.searchsorted(sales.minute, before))
    weight = 0.5 ** ((before - sales.minute[:size]) / HALF_LIFE_OF_POPULARITY)
    popular = np.log(np.bincount(sales.item[:size], weights=weight, minlength=sales.num_items) + 1.0)
    return popular - popular.max()


class Baskets:
    """All baskets before a minute in which something was new to its customer: a dataset for `run.loader`.

    A basket is what a customer bought in one minute; the sales have no number of an invoice.
    """

    def __init__(self, sales: Sales, before: int) -> None:
        minutes, bought, new = zip(*_baskets(sales, before), strict=True)
        self._bought = _padded(bought, sales.num_items)
        self._new: tuple[list[int], ...] = new
        weight = 0.5 ** ((before - np.array(minutes)) / HALF_LIFE)
        sizes = np.array([len(items) for items in new])
        self._weight = weight / (weight * sizes).mean()  # an average basket weighs 1

    def __len__(self) -> int:
        return len(self._new)

    def __getitem__(self, number: int, /) -> Batch:
        return self.__getitems__([number])

    def __getitems__(self, numbers: list[int]) -> Batch:
        """These baskets as one batch."""
        new = [self._new[number] for number in numbers]
        sizes = [len(items) for items in new]
        return _batch(
            self._bought[numbers],
            np.repeat(np.arange(len(numbers)), sizes),
            np.concatenate(new),
            np.repeat(self._weight[numbers], sizes),
        )


class Purchases:
    """Makes batches of the events that `POST /events/purchase` took: a collate function for `run.loader`.

    Each is a basket of one item, after the history that serving knew. An item that is not new to its customer
    has nothing to teach, and neither has a body that is none of ours; such a body is said once and left out.
    """

    def __init__(self, sales: Sales, before: int) -> None:
        self._histories = Histories(sales, before)
        self._num_items = sales.num_items
        self._complained = False

    def __call__(self, bodies: Sequence[object]) -> tuple[Batch, int]:
        """A batch, and the newest minute in it, -1 for none."""
        found = [(user, item, minute) for user, item, minute in map(self._read, bodies) if minute >= 0]
        bought = [self._histories.of(user) for user, _, _ in found]
        items = np.array([item for _, item, _ in found], np.int32)
        new = np.array([item not in known for item, known in zip(items, bought, strict=True)], np.float64)
        batch = _batch(_padded(bought, self._num_items), np.arange(len(found)), items, new)
        return batch, max((minute for _, _, minute in found), default=-1)

    def _read(self, body: object) -> tuple[int, int, int]:
        values = [body.get(name) for name in ("user", "item", "minute")] if isinstance(body, dict) else []
        numbers = [value for value in values if isinstance(value, int) and 0 <= value < 2**31]
        if len(numbers) == 3 and numbers[1] < self._num_items:
            return numbers[0], numbers[1], numbers[2]
        if not self._complained:
            self._complained = True
            log.warning("events left out that are no purchases", extra={"first": repr(body)[:200]})
        return 0, 0, -1


def _baskets(sales: Sales, before: int) -> Iterator[tuple[int, list[int], list[int]]]:
    """Each basket with something new in it: its minute, the items bought before, the new ones."""
    size = int(np.searchsorted(sales.minute, before))
    order = np.lexsort((sales.minute[:size], sales.customer[:size]))
    customer, minute, item = (column[order].tolist() for column in (sales.customer, sales.minute, sales.item))
    bought: dict[int, None] = {}
    begin = 0
    for end in range(1, size + 1):
        if end < size and customer[end] == customer[begin] and minute[end] == minute[begin]:
            continue
        items = dict.fromkeys(item[begin:end])
        new = [number for number in items if number not in bought]
        if new:
            yield minute[begin], list(bought)[-LONGEST:], new
        for number in items:  # what was bought last stands at the end
            bought.pop(number, None)
            bought[number] = None
        if end < size and customer[end] != customer[begin]:
            bought = {}
        begin = end


def _padded(bought: Sequence[Sequence[int] | Ints], nothing: int) -> Ints:
    padded = np.full((len(bought), LONGEST), nothing, np.int32)
    for row, items in zip(padded, bought, strict=True):
        if len(items):
            row[: min(len(items), LONGEST)] = items[-LONGEST:]
    return padded


def _batch(bought: Ints, basket: npt.NDArray[np.int64], item: Ints, weight: Floats) -> Batch:
    return Batch(
        bought_BL=torch.from_numpy(bought.astype(np.int64)),
        basket_T=torch.from_numpy(basket),
        item_T=torch.from_numpy(item.astype(np.int64)),
        weight_T=torch.from_numpy(weight.astype(np.float32)),
    )
