"""What is learned: two towers, one for a customer as the items bought so far, one for each item to buy next.

Shape letters: B batch, L length of a history, D features, I items, T targets of the whole batch.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

FEATURES = 64


class Batch(NamedTuple):
    """Baskets: what was bought before each, and the items in them that were new to their customer."""

    bought_BL: Tensor  # item numbers, filled up with the number of items
    basket_T: Tensor  # the basket that a target is in
    item_T: Tensor
    weight_T: Tensor


class TwoTower(nn.Module):
    """Scores every item for a customer. Knows customers by their history only, so it serves new ones too."""

    def __init__(self, num_items: int = 3_866, features: int = FEATURES) -> None:
        super().__init__()
        self.bought = nn.EmbeddingBag(num_items + 1, features, mode="sum", padding_idx=num_items)
        self.item = nn.Parameter(torch.empty(num_items, features))
        self.bias = nn.Parameter(torch.zeros(num_items))
        nn.init.normal_(self.item, std=0.05)
        nn.init.normal_(self.bought.weight, std=0.3)
        with torch.no_grad():
            self.bought.weight[num_items] = 0.0

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, npt.NDArray[Any]]
    ) -> "TwoTower":  # Any: of any kind of number
        """The model of a published version, of whatever size."""
        model = cls(*tensors["item"].shape)
        model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in tensors.items()})
        return model

    def forward(self, bought_BL: Tensor) -> Tensor:
        """The score of every item for each customer."""
        num_items = len(self.item)
        length_B = (bought_BL < num_items).sum(1).clamp(min=1)
        customer_BD = self.bought(bought_BL) / length_B.sqrt()[:, None]
        return customer_BD @ self.item.T + self.bias

    def loss(self, batch: Batch) -> Tensor:
        """How surprising the new items of these baskets are among all not bought before, a mean."""
        num_baskets, num_items = len(batch.bought_BL), len(self.item)
        known_BI = torch.zeros(num_baskets, num_items + 1).scatter_(1, batch.bought_BL, -1e9)[:, :num_items]
        likely_BI = torch.log_softmax(self(batch.bought_BL) + known_BI, dim=1)
        return -(likely_BI[batch.basket_T, batch.item_T] * batch.weight_T).sum() / max(1, num_baskets)
