"""What has a customer bought before a certain minute?"""

import numpy as np

from shop.sales import LARGEST, Ints, Sales


class Histories:
    """Per customer the items bought before `before`, each once, the one bought last at the end."""

    def __init__(self, sales: Sales, before: int) -> None:
        size = int(np.searchsorted(sales.minute, before))
        line = sales.customer[:size].astype(np.int64) * sales.num_items + sales.item[:size]
        _, from_end, times = np.unique(line[::-1], return_index=True, return_counts=True)
        last = size - 1 - from_end  # the last line of each customer with each item
        order = np.lexsort((last, sales.customer[last]))
        self._customer = sales.customer[last[order]]
        self._item = sales.item[last[order]]
        self._times = times[order].astype(np.int32)

    def customers(self) -> Ints:
        """Everybody who has bought something."""
        return np.unique(self._customer)

    def of(self, customer: int) -> Ints:
        """The items of one customer; none for somebody new."""
        return self._item[self._lines(customer)]

    def times(self, customer: int) -> Ints:
        """How often each item of `of` was bought."""
        return self._times[self._lines(customer)]

    def _lines(self, customer: int) -> slice:
        if not 0 <= customer <= LARGEST:
            return slice(0)
        return slice(*np.searchsorted(self._customer, (customer, customer + 1)).tolist())


def purchases(sales: Sales, begin: int, end: int) -> dict[int, Ints]:
    """Per customer the items bought from minute `begin` to before minute `end`, each once, in no order."""
    low, high = np.searchsorted(sales.minute, (begin, end))
    line = np.unique(sales.customer[low:high].astype(np.int64) * sales.num_items + sales.item[low:high])
    customer, item = line // sales.num_items, (line % sales.num_items).astype(np.int32)
    found, begins = np.unique(customer, return_index=True)
    return dict(zip(found.tolist(), np.split(item, begins[1:]), strict=True)) if len(found) else {}


def most_sold(sales: Sales, begin: int, end: int) -> Ints:
    """All items by the number of customers who bought them from minute `begin` to before `end`, most first.

    Ties go to the item that more customers bought ever before `end`.
    """
    return np.lexsort((-_buyers(sales, 0, end), -_buyers(sales, begin, end))).astype(np.int32)


def _buyers(sales: Sales, begin: int, end: int) -> Ints:
    low, high = np.searchsorted(sales.minute, (begin, end))
    line = np.unique(sales.customer[low:high].astype(np.int64) * sales.num_items + sales.item[low:high])
    return np.bincount(line % sales.num_items, minlength=sales.num_items).astype(np.int32)
