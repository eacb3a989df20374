"""How are the real sales downloaded from the UCI Machine Learning Repository?

The data set is "Online Retail" (https://archive.ics.uci.edu/dataset/352), CC BY 4.0: D. Chen, S. L. Sain,
K. Guo, "Data mining for the online retail industry", Journal of Database Marketing & Customer Strategy
Management 19, 2012, doi:10.1057/dbm.2012.17.
"""

import logging
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse

from shop import workbook
from shop.sales import Sales, SalesError

URL = "https://archive.ics.uci.edu/static/public/352/online+retail.zip"

# `Sales.fingerprint` of the 397,884 lines that all our figures are from.
FINGERPRINT = "ec95a2fb63ddf93405a569154a3de2ab79790d7e98b9e5ab86ef75a63e3b8206"

CONNECT_S = 4.0  # without a network this is all that it costs
STALL_S = 4.0  # give up when nothing at all came for so long
LONGEST_S = 60.0
LARGEST_BYTES = 200_000_000  # the file has 23 MB
PIECE_BYTES = 1 << 16

log = logging.getLogger(__name__)


def download(url: str = URL) -> Sales:
    """Fetch and read the real sales; the log says how far it is.

    Raises SalesError, within a few seconds where there is no network.
    """
    content = fetch(url)
    log.info("reading the workbook, this takes a minute", extra={"megabytes": round(len(content) / 1e6, 1)})
    sales = workbook.read(content, source=f"UCI, downloaded from {url}")
    fingerprint = sales.fingerprint()
    if fingerprint != FINGERPRINT:
        log.warning("not the very sales that our figures are from", extra={"sha256": fingerprint})
    return sales


def fetch(url: str) -> bytes:
    """The bytes behind a URL. Raises SalesError when it cannot be reached, stalls, or is too large."""
    opening = _Opening(url)
    opening.start()
    opening.join(CONNECT_S)
    try:
        if opening.error is not None:
            raise opening.error
        if opening.answer is None:
            raise TimeoutError(f"no answer within {CONNECT_S:g} s")
        with opening.answer as answer:
            return b"".join(_pieces(answer))
    except (OSError, HTTPException, ValueError) as error:
        raise SalesError(f"{url} cannot be downloaded: {error}") from error


class _Opening(threading.Thread):
    """Opens a URL aside, because looking up the name of a host knows no time limit."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.answer: HTTPResponse | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            answer = urllib.request.urlopen(self._url, timeout=STALL_S)
            assert isinstance(answer, HTTPResponse)
            self.answer = answer
        except (OSError, HTTPException, ValueError) as error:
            self.error = error


def _pieces(answer: HTTPResponse) -> Iterator[bytes]:
    """The body piece by piece, with a line in the log every two seconds."""
    whole = answer.length
    begun = said = time.monotonic()
    size = 0
    while piece := answer.read1(PIECE_BYTES):
        size += len(piece)
        yield piece
        now = time.monotonic()
        if size > LARGEST_BYTES:
            raise ValueError(f"it is larger than {LARGEST_BYTES / 1e6:.0f} MB")
        if now - begun > LONGEST_S:
            raise TimeoutError(f"it took longer than {LONGEST_S:g} s")
        if now - said >= 2.0:
            said = now
            log.info(
                "downloading",
                extra={"megabytes": round(size / 1e6, 1), "of": whole and round(whole / 1e6, 1)},
            )
    if whole is not None and size < whole:
        raise OSError(f"it broke off after {size} of {whole} bytes")
