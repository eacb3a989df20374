"""Which items suit a customer best? The trained model in numpy, for serving and for its evaluation alike.

Shape letters: B batch, D features, I items.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TOP = 10
LONGEST = (
    128  # the last items bought are what describes a customer; older ones are only not recommended again
)

Floats = npt.NDArray[np.float32]
Histories = (
    Sequence[list[int]] | Sequence[npt.NDArray[np.int32]]
)  # the items each has bought, the last at the end


@dataclass(frozen=True, slots=True)
class Ranker:
    """A version of the model: for each item a vector as a thing bought, one as a thing to buy, and a bias."""

    bought_ID: Floats  # has one row more, for nothing
    item_ID: Floats
    bias_I: Floats

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, npt.NDArray[np.generic]]) -> "Ranker":
        """A ranker of the tensors of a published version. Raises ValueError if they do not fit together."""
        bought, item, bias = (tensors[name].astype(np.float32) for name in ("bought.weight", "item", "bias"))
        if bought.shape != (len(item) + 1, *item.shape[1:]) or bias.shape != item.shape[:1]:
            raise ValueError(
                f"shapes do not fit: bought {bought.shape}, item {item.shape}, bias {bias.shape}"
            )
        return cls(bought, item, bias)

    def scores(self, bought: Histories) -> Floats:
        """How much each customer, known by the items bought, would like each item: one row a customer."""
        last = [items[-LONGEST:] for items in bought]
        customer_BD = np.zeros((len(last), self.item_ID.shape[1]), np.float32)
        for number, items in enumerate(last):
            if len(items):
                customer_BD[number] = self.bought_ID[items].sum(0) / np.sqrt(len(items))
        return customer_BD @ self.item_ID.T + self.bias_I

    def top(self, bought: Histories, *, again: bool = False) -> list[list[int]]:
        """The best items for each customer, best first; items bought before only if `again`."""
        scores_BI = self.scores(bought)
        if not again:
            for number, items in enumerate(bought):
                if len(items):
                    scores_BI[number, items] = -np.inf
        return [best(scores) for scores in scores_BI]


def best(scores: Floats, count: int = TOP) -> list[int]:
    """The indices of the highest scores, highest first; without those that are minus infinity."""
    count = min(count, len(scores))
    found = np.argpartition(scores, -count)[-count:]
    found = found[np.argsort(-scores[found], kind="stable")]
    return found[np.isfinite(scores[found])].tolist()
