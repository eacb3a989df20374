"""Where do the sales come from, and are they what they should be?

A sale is one line of an invoice: when, who, what, how many. Looked for in this order: the file named by
`--data` or TWINHULL_SHOP_DATA; those downloaded earlier; a download from the UCI Machine Learning Repository;
a synthetic shop of the same shape. `Sales.source` always says which one it is; so does `python -m shop`.
"""

import fcntl
import hashlib
import logging
import os
import zipfile
import zlib
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from numpy.lib.npyio import NpzFile

from twinhull.errors import TwinhullError

DATA = "TWINHULL_SHOP_DATA"  # a path, or SYNTHETIC
SYNTHETIC = "synthetic"
CACHE = "TWINHULL_SHOP_CACHE"  # where the download is kept
RUN = "TWINHULL_RUN"  # twinhull names here the directory of the run that a process belongs to

MINUTES_PER_DAY = 1440
SPLIT = 335 * MINUTES_PER_DAY  # 1 November 2011, in minutes since 1 December 2010: learn before, test after
LARGEST = 32_767  # of customers, items and quantities: the file keeps them in 16 bits

log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int32]
Columns = dict[str, npt.NDArray[np.generic]]


class SalesError(TwinhullError):
    """Raised when sales cannot be had or are not what they should be: one line says why."""


@dataclass(frozen=True, slots=True)
class Sales:
    """Lines of sale in the order of time, as columns of equal length.

    `minute` counts from 1 December 2010; `item` is an index into `names`; `customer` is a small number.
    """

    source: str
    real: bool
    minute: Ints
    customer: Ints
    item: Ints
    quantity: Ints
    names: list[str]

    @property
    def num_items(self) -> int:
        """How many different items were ever sold."""
        return len(self.names)

    def __len__(self) -> int:
        return len(self.minute)

    def fingerprint(self) -> str:
        """A sha256 of what was sold: the same whatever the order of the names or of lines in a minute."""
        by_name = sorted(range(len(self.names)), key=self.names.__getitem__)
        place = np.empty(len(self.names), np.int32)
        place[by_name] = np.arange(len(self.names), dtype=np.int32)
        columns = (self.minute, self.customer, place[self.item], self.quantity)
        order = np.lexsort(columns[::-1])
        digest = hashlib.sha256("\n".join(sorted(self.names)).encode())
        for column in columns:
            digest.update(column[order].astype("<i4").tobytes())
        return digest.hexdigest()


def find(given: str | Path | None = None) -> Sales:
    """The sales to work with, and a log line that says which. Never fails for want of a network.

    Raises SalesError if a file is named, by `given` or the environment, and is missing or not right.
    """
    named = os.environ.get(DATA, "") if given is None else str(given)
    if named == SYNTHETIC:
        found = _synthetic()
    elif named:
        found = load(Path(named), source=named)
    else:
        with _alone():
            found = _look()
    log.info("sales from", extra={"source": found.source, "lines": len(found), "items": found.num_items})
    return found


def take_option(arguments: list[str]) -> None:
    """Take `--data PATH` out of a command's arguments and put it where this and all child processes look."""
    if "--data" in arguments:
        at = arguments.index("--data")
        if at + 1 >= len(arguments):
            raise SalesError(f"--data needs the path of a file, or {SYNTHETIC!r}.")
        os.environ[DATA] = arguments[at + 1]
        del arguments[at : at + 2]


def load(path: Path, *, source: str, real: bool = True) -> Sales:
    """Sales from an .npz file with the arrays minute (steps), customer, item, quantity and names.

    Raises SalesError, which names the file and the first thing that is wrong with it.
    """
    try:
        with path.open("rb") as raw, NpzFile(raw, allow_pickle=False) as file:
            columns: Columns = {name: np.asarray(file[name]) for name in file.files}
    except FileNotFoundError:
        raise SalesError(f"{path}: there is no such file. Name another with --data or {DATA}.") from None
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise SalesError(f"{path}: not a readable .npz file ({_first_line(error)}).") from error
    problem = _shape_problem(columns) or _value_problem(columns)
    if problem:
        raise SalesError(f"{path}: {problem}.")
    customer, item, quantity = (columns[name].astype(np.int32) for name in ("customer", "item", "quantity"))
    minute = np.cumsum(columns["minute"], dtype=np.int64).astype(np.int32)
    return Sales(source, real, minute, customer, item, quantity, str(columns["names"]).split("\n"))


def save(sales: Sales, path: Path) -> None:
    """Write sales in the form that `load` reads; the file is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez_compressed(
                file,
                minute=np.diff(sales.minute, prepend=np.int32(0)),
                customer=sales.customer.astype(np.int16),
                item=sales.item.astype(np.int16),
                quantity=sales.quantity.astype(np.int16),
                names=np.array("\n".join(sales.names)),
            )
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _shape_problem(columns: Columns) -> str:
    numbers = ("minute", "customer", "item", "quantity")
    for name in (*numbers, "names"):
        if name not in columns:
            return f"the column {name!r} is missing; it holds {', '.join(sorted(columns)) or 'nothing'}"
    for name in numbers:
        column = columns[name]
        if column.ndim != 1 or column.dtype.kind not in "iu":
            return f"{name} must be a row of whole numbers, not {column.dtype} of shape {column.shape}"
        if len(column) != len(columns["minute"]):
            return f"{name} has {len(column)} lines and minute has {len(columns['minute'])}"
    if columns["names"].ndim or columns["names"].dtype.kind != "U":
        return "names must be one text, a name a line"
    return "" if len(columns["minute"]) else "it holds no sales"


def _value_problem(columns: Columns) -> str:
    steps, customer, item = (columns[name].astype(np.int64) for name in ("minute", "customer", "item"))
    num_names = str(columns["names"]).count("\n") + 1
    if steps.min() < 0:
        return "minute holds the steps since the line before, and one of them is negative"
    if steps.sum() > np.iinfo(np.int32).max:
        return "minute holds the steps since the line before, and theirs is more than 4,000 years"
    if customer.min() < 0 or customer.max() > LARGEST:
        return f"customers must be numbers from 0 to {LARGEST}"
    if item.min() < 0 or item.max() >= num_names:
        return f"items must be numbers from 0 to {num_names - 1}, one for each name"
    return "" if columns["quantity"].astype(np.int64).min() > 0 else "quantities must be above 0"


def _look() -> Sales:
    """The first there is of: this run's synthetic shop, the earlier download, a new one, a synthetic shop.

    A run that began without the real sales stays without them: its model and its history must fit together.
    """
    from shop import uci

    run = os.environ.get(RUN)
    own = Path(run) / "shop" / "synthetic.npz" if run else None
    if own is not None and own.exists():
        return load(own, source=SYNTHETIC, real=False)
    kept = _cache() / "online_retail.npz"
    try:
        if kept.exists():
            return load(kept, source=f"UCI, downloaded earlier: {kept}")
    except SalesError as error:
        log.warning("the earlier download is broken", extra={"reason": str(error)})
    try:
        found = uci.download()
    except SalesError as error:
        log.warning("no real sales, using a synthetic shop", extra={"reason": str(error)})
        return _kept(_synthetic(), own)
    return _kept(found, kept)


def _kept(sales: Sales, path: Path | None) -> Sales:
    try:
        if path is not None:
            save(sales, path)
    except OSError as error:
        log.warning("sales not kept", extra={"path": str(path), "reason": _first_line(error)})
    return sales


def _synthetic() -> Sales:
    from shop import synthetic

    return synthetic.make()


def _cache() -> Path:
    named = os.environ.get(CACHE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twinhull"


@contextmanager
def _alone() -> Generator[None]:
    """Hold a lock that a run's processes share: one looks, the others find what it found."""
    with ExitStack() as stack:
        run = os.environ.get(RUN)
        directory = Path(run) / "shop" if run else _cache()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((directory / "sales.lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # nothing can be kept there either: each process looks for itself
            log.debug("no lock", extra={"reason": _first_line(error)})
        yield


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0] or type(error).__name__
