"""How does the shop learn? The first night from all sales, every later one from the purchases of the day.

`python -m shop.fit` does the first night with nothing around it; `torchrun -m shop.fit` with several ranks.
"""

import logging
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from shop import sales
from shop.baskets import Baskets, Purchases, log_popularity
from shop.evaluate import customers, measure, recall_new
from shop.model import TwoTower
from shop.ranker import Ranker
from shop.sales import SPLIT, Sales
from twinhull.train.run import Run

BATCH = 256  # baskets, over all ranks
EPOCHS = 12  # on October better than 6 (0.123 beside 0.117)
RATE = 3e-3
DECAY = 1.0  # of the vectors only: a bias is what its item is known to sell

log = logging.getLogger(__name__)


def fit(run: Run) -> None:
    """Train and publish one version."""
    known = sales.find()
    newest = run.latest(TwoTower) if run.cycle > 1 else None
    if newest is None:
        first_night(run, known)
    else:
        later_night(run, known, newest)


def first_night(run: Run, known: Sales, epochs: int = EPOCHS) -> dict[str, float]:
    """Learn from every sale before 1 November 2011, publish, and give the figures on those after it."""
    model = run.wrap(_beginning(known))
    vectors = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    bias = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": vectors, "weight_decay": DECAY}, {"params": bias, "weight_decay": 0.0}]
    optimizer = run.wrap(torch.optim.AdamW(groups, lr=RATE, fused=True))
    baskets = run.loader(Baskets(known, SPLIT), batch_size=BATCH)
    for batch in run.steps(baskets, epochs=epochs):
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=loss)
    metrics = measure(_ranker(model), known, SPLIT) if run.rank == 0 else {}
    metrics["real_sales"] = float(known.real)
    run.publish(model, metrics=metrics)
    return metrics


def later_night(run: Run, known: Sales, newest: TwoTower) -> None:
    """Go on from the newest version with the purchases since, each seen once; publish unless there were none.

    The new version is measured on what was bought after the last purchase it learned from, beside the version
    it began as, on the same.
    """
    if len(newest.item) != known.num_items:
        raise sales.SalesError(
            f"the newest version knows {len(newest.item)} items and these sales have {known.num_items}.",
            hint="Put the old sales back, or begin again in a new run directory.",
        )
    before = _ranker(newest)
    model = run.wrap(newest)
    optimizer = run.wrap(torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True))
    learned = run.wrap(Newest())
    purchases = run.loader(run.events("purchase"), batch_size=BATCH, collate=Purchases(known, SPLIT))
    for batch, minute in run.steps(purchases):
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learned.note(minute)
        run.report(loss=loss)
    if learned.minute < 0:
        if run.rank == 0:
            log.info("no purchases since, nothing to publish", extra={"cycle": run.cycle})
        return
    metrics: dict[str, float] = {}
    if run.rank == 0:
        metrics = measure(_ranker(model), known, learned.minute + 1)
        if metrics:
            metrics["recall_new_previous"] = recall_new(before, customers(known, learned.minute + 1))
    metrics["real_sales"] = float(known.real)
    run.publish(model, metrics=metrics)


class Newest:
    """The newest minute that any rank has learned from; -1 for none. Saved with the model."""

    def __init__(self) -> None:
        self.minute = -1

    def note(self, minute: int) -> None:
        """Take in the newest minute of this rank's part of a batch; all ranks call it at the same step."""
        together = torch.tensor([max(minute, self.minute)])
        if dist.is_initialized():
            dist.all_reduce(together, op=dist.ReduceOp.MAX)
        self.minute = int(together.item())

    def state_dict(self) -> dict[str, int]:
        """As it stands."""
        return {"minute": self.minute}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """As it stood."""
        self.minute = state["minute"]


def _beginning(known: Sales) -> TwoTower:
    model = TwoTower(known.num_items)
    with torch.no_grad():
        model.bias.copy_(torch.from_numpy(log_popularity(known, SPLIT)))
    return model


def _ranker(model: Any) -> Ranker:  # Any: TwoTower, as run.wrap gives it back
    return Ranker.from_tensors({name: tensor.detach().numpy() for name, tensor in model.state_dict().items()})


def main() -> None:
    """The first night in plain Python, or under plain torchrun."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        sales.take_option(sys.argv)
        known = sales.find()
    except sales.SalesError as error:
        sys.exit(str(error))
    run = Run.alone()
    begun = time.monotonic()
    metrics = first_night(run, known)
    if run.rank == 0:
        print(f"sales: {known.source}, {len(known):,} lines of {known.num_items:,} items")
        print(f"{run.step} steps on {run.world_size} ranks in {time.monotonic() - begun:.1f} s")
        for name, value in metrics.items():
            print(f"{name:26} {value:.4g}")


if __name__ == "__main__":
    main()
