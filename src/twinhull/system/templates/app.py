"""How many minutes does a delivery take? `fit` learns it, `estimate` answers, `usual` stands in for it.

Plain functions: which of them runs where, how often and by when is said in delivery.yaml.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from twinhull.train.run import Run


@dataclass(frozen=True)
class Order:
    """What a request says; its fields are checked before it comes here."""

    km: float
    rush: bool = False


class Minutes:
    """The model as serving needs it: numbers and numpy, no PyTorch."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray) -> None:
        self.weight, self.bias = weight, bias

    @classmethod
    def from_tensors(cls, tensors: dict[str, np.ndarray]) -> "Minutes":
        """Made of the tensors of a published version."""
        return cls(tensors["weight"], tensors["bias"])

    def of(self, orders: list[Order]) -> list[float]:
        """Minutes for each order."""
        rows = np.array([features(order.km, order.rush) for order in orders])
        return (rows @ self.weight.T + self.bias)[:, 0].round(1).tolist()


def features(km: float, rush: bool) -> tuple[float, float, float]:
    """What the model sees of an order."""
    far = (km - 6) / 3
    return far, float(rush), far * rush


def fit(run: "Run") -> None:
    """Learn from past orders and publish what was learned."""
    import torch
    from torch.utils.data import TensorDataset

    rows, minutes = (torch.from_numpy(part) for part in past_orders(1000))
    model = run.wrap(torch.nn.Linear(3, 1))
    optimizer = run.wrap(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for row, target in run.steps(run.loader(TensorDataset(rows, minutes), batch_size=64), epochs=20):
        loss = torch.nn.functional.mse_loss(model(row), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=loss)
    with torch.no_grad():
        error = torch.nn.functional.l1_loss(model(rows), minutes).item()
    run.publish(model, metrics={"minutes_off": error})


def estimate(rows: list[Order], *, model: Minutes) -> list[float]:
    """Minutes for each of a batch of orders, by the newest model."""
    return model.of(rows)


def usual(km: float, rush: bool = False) -> float:
    """Minutes by a rule of thumb."""
    return 15 + 4 * km if rush else 12 + 3 * km


def past_orders(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Made-up orders: what the model sees of each, and how many minutes it took. Put your own data here."""
    random = np.random.default_rng(seed=1)
    km, rush = random.uniform(0.5, 12, count), random.random(count) < 0.3
    minutes = 12 + 3 * km + 4 * rush + 1.5 * km * rush + random.normal(0, 2, count)
    rows = np.array([features(*order) for order in zip(km, rush, strict=True)], dtype=np.float32)
    return rows, minutes[:, None].astype(np.float32)
