"""What did the customers of the test period do? The same, as requests for the load generator, at any pace.

`python -m shop.replay --rate 150/s > FILE`, then `twinhull load URL --requests FILE --arrivals file`: for
each purchase from 1 November 2011 on, in the order of time, a request and then the event of the purchase.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import TypedDict

import numpy as np

from shop import sales
from shop.sales import SPLIT, Sales
from twinhull.serve.load_generator import Shot

ASK, TELL = "/recommend", "/events/purchase"


class Body(TypedDict, total=False):
    """Of a request (only the user) or of an event."""

    user: int
    item: int
    minute: int


class Request(TypedDict):
    """One line of the file: `at` so many seconds after the start, what is posted where."""

    at: float
    path: str
    body: Body


def requests(known: Sales, rate: float, seconds: float) -> Iterator[Request]:
    """The first requests of the test period, evenly `rate` a second for so many seconds; fewer if it ends."""
    for number, (path, body) in enumerate(islice(_traffic(known), round(rate * seconds))):
        yield Request(at=round(number / rate, 6), path=path, body=body)


def purchases(known: Sales | None = None) -> tuple[Iterator[Shot], Iterator[Shot]]:
    """All requests of the test period, and all purchases, each in the order of time, for a `Generator`."""
    known = known or sales.find()
    asks = (Shot(path, _json(body)) for path, body in _traffic(known) if path == ASK)
    bought = (Shot(path, _json(body)) for path, body in _traffic(known) if path == TELL)
    return asks, bought


def _json(value: Body | Request) -> bytes:
    return json.dumps(value).encode()


def _traffic(known: Sales) -> Iterator[tuple[str, Body]]:
    begin = int(np.searchsorted(known.minute, SPLIT))
    columns = (column[begin:].tolist() for column in (known.customer, known.item, known.minute))
    for user, item, minute in zip(*columns, strict=True):
        yield ASK, Body(user=user)
        yield TELL, Body(user=user, item=item, minute=minute)


def _rate(text: str) -> float:
    rate = float(text.removesuffix("/s"))
    if not 0 < rate <= 1e6:
        raise ValueError(text)
    return rate


def main() -> None:
    """Print the requests, one JSON object a line; what they are from goes to standard error."""
    parser = argparse.ArgumentParser(prog="python -m shop.replay", description=__doc__)
    parser.add_argument(
        "--rate", type=_rate, default=150.0, metavar="150/s", help="requests and events together"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="how long the replay takes")
    parser.add_argument("--data", default=None, metavar="PATH", help=f"sales, or {sales.SYNTHETIC!r}")
    options = parser.parse_args()
    try:
        known = sales.find(options.data)
    except sales.SalesError as error:
        sys.exit(str(error))
    count = 0
    for count, request in enumerate(requests(known, options.rate, options.seconds), 1):  # noqa: B007
        sys.stdout.write(json.dumps(request) + "\n")
    print(f"{count:,} requests and events from {known.source}", file=sys.stderr)


if __name__ == "__main__":
    main()
