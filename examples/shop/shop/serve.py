"""How does the shop answer? Plain functions on numbers and lists; nothing here needs torch.

`features` and `rank` are the path of a request, `best_sellers` is what it falls back to, and
`rebuild_best_sellers` is the nightly job that keeps that fresh.
"""

import json
import logging
import os
from functools import lru_cache
from pathlib import Path

import numpy as np

from shop import sales
from shop.evaluate import WEEK, first_new
from shop.history import Histories, most_sold
from shop.ranker import Ranker
from shop.sales import SPLIT, Ints

log = logging.getLogger(__name__)

# Read when a process begins: the first customer must not wait for it.
SALES = sales.find()
HISTORIES = Histories(SALES, SPLIT)
BEST_SELLERS = most_sold(SALES, SPLIT - WEEK, SPLIT)


def features(user: int, recent: list[int] | None = None) -> list[int]:
    """The items a customer has bought, each once, the last at the end; `recent` are those since the night.

    Somebody unknown has bought nothing; an unknown item says nothing.
    """
    return bought(user, recent).tolist()


def rank(rows: list[list[int]], *, model: Ranker) -> list[list[int]]:
    """Ten items for each customer, new to them, that suit what they bought before; best first."""
    return model.top(rows)


def best_sellers(user: int, recent: list[int] | None = None) -> list[int]:
    """Ten best sellers of the week that the customer has not bought yet, best first."""
    return first_new(_best_sellers_now(), bought(user, recent))


def rebuild_best_sellers() -> int:
    """Count the best sellers anew and put them where `best_sellers` finds them; gives how many."""
    order = most_sold(sales.find(), SPLIT - WEEK, SPLIT).tolist()
    path = _file()
    if path is None:
        log.warning("best sellers not kept, this is no run")
        return len(order)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(order))
    temporary.replace(path)  # a reader sees the old list or the new one
    log.info("best sellers rebuilt", extra={"items": len(order), "first": order[0]})
    return len(order)


def bought(user: int, recent: list[int] | None) -> Ints:
    """What a customer has bought, as `features` describes it."""
    before = HISTORIES.of(user)
    if not recent:
        return before
    num_items = SALES.num_items
    known = list(dict.fromkeys(item for item in reversed(recent) if 0 <= item < num_items))[::-1]
    return np.concatenate([before[~np.isin(before, known)], np.array(known, np.int32)])


def _best_sellers_now() -> Ints:
    """What the nightly job has left, or what was counted here at the start."""
    path = _file()
    try:
        return BEST_SELLERS if path is None else _read(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        return BEST_SELLERS
    except (OSError, ValueError, TypeError) as error:
        log.warning("best sellers cannot be read, counted here instead", extra={"reason": str(error)})
        return BEST_SELLERS


@lru_cache(maxsize=1)
def _read(path: Path, _changed_at: int) -> Ints:
    return np.array(json.loads(path.read_bytes()), np.int32)


def _file() -> Path | None:
    run = os.environ.get(sales.RUN)
    return Path(run) / "shop" / "best_sellers.json" if run else None
