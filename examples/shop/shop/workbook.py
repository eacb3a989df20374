"""Which sales are in the Excel workbook "Online Retail", and which of its lines count?

A workbook is a zip file of XML, so the standard library reads it. A line counts if it has a customer and a
description and neither its quantity nor its price is zero or below; the others are returns and corrections.
"""

import io
import logging
import zipfile
import zlib
from array import array
from collections.abc import Iterator, Sequence
from typing import IO
from xml.etree import ElementTree

import numpy as np

from shop.sales import LARGEST, MINUTES_PER_DAY, Sales, SalesError

DAY_ZERO = 40_513  # 1 December 2010 as Excel counts days
FIRST_CUSTOMER = 12_346  # becomes customer 0
COLUMNS = ("Description", "Quantity", "InvoiceDate", "UnitPrice", "CustomerID")

_NAMESPACE = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
_SHEET = "xl/worksheets/sheet1.xml"
_TEXTS = "xl/sharedStrings.xml"

log = logging.getLogger(__name__)


def read(content: bytes, *, source: str) -> Sales:
    """The sales of a workbook, or of the one workbook in a zip file.

    Raises SalesError if it is none, lacks a column, or has nothing that counts.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as outer:
            inner = [name for name in outer.namelist() if name.endswith(".xlsx")]
            if not inner:
                return _sales(outer, source)
            with zipfile.ZipFile(io.BytesIO(outer.read(inner[0]))) as book:
                return _sales(book, source)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise SalesError(f"not the workbook of Online Retail: {error}") from error
    except (ElementTree.ParseError, ValueError, IndexError, OverflowError) as error:
        raise SalesError(f"the workbook of Online Retail cannot be read: {error}") from error


def _sales(book: zipfile.ZipFile, source: str) -> Sales:
    texts: list[str] = []
    if _TEXTS in book.namelist():
        with book.open(_TEXTS) as file:
            texts = [_text(entry) for entry in _each(file, "si")]
    with book.open(_SHEET) as file:
        return _cleaned(_rows(file, texts), source)


def _cleaned(rows: Iterator[dict[str, str]], source: str) -> Sales:
    header = next(rows, dict[str, str]())
    letter_of = {name: letter for letter, name in header.items()}
    for name in COLUMNS:
        if name not in letter_of:
            raise SalesError(f"the workbook has no column {name!r}; it has {', '.join(letter_of) or 'none'}")
    letters = [letter_of[name] for name in COLUMNS]
    minute, customer, quantity, said = array("q"), array("q"), array("q"), list[str]()
    for number, row in enumerate(rows, 2):
        if number % 100_000 == 0:
            log.info("reading the workbook", extra={"lines": number})
        description, count, day, price, who = (row.get(letter, "").strip() for letter in letters)
        if not (description and who) or float(count or 0) <= 0 or float(price or 0) <= 0:
            continue
        minute.append(round((float(day) - DAY_ZERO) * MINUTES_PER_DAY))
        customer.append(int(float(who)) - FIRST_CUSTOMER)
        quantity.append(min(int(float(count)), LARGEST))
        said.append(description)
    return _sorted(minute, customer, quantity, said, source)


def _sorted(
    minute: Sequence[int], customer: Sequence[int], quantity: Sequence[int], said: list[str], source: str
) -> Sales:
    if not said:
        raise SalesError("the workbook has no line that counts")
    if min(minute) < 0 or min(customer) < 0 or max(customer) > LARGEST:
        raise SalesError(
            f"the workbook has a sale before December 2010, or a customer outside {FIRST_CUSTOMER}.."
        )
    names = sorted(set(said))
    number_of = {name: number for number, name in enumerate(names)}
    order = np.argsort(np.asarray(minute), kind="stable")
    item = np.array([number_of[name] for name in said], np.int32)
    when, who, count = (np.asarray(column, np.int32)[order] for column in (minute, customer, quantity))
    return Sales(source, True, when, who, item[order], count, names)


def _rows(sheet: IO[bytes], texts: list[str]) -> Iterator[dict[str, str]]:
    """Each row as what stands in its cells, by the letter of the column; empty cells are left out."""
    for row in _each(sheet, "row"):
        yield {
            cell.get("r", "").rstrip("0123456789"): value
            for cell in row.iter(f"{_NAMESPACE}c")
            if (value := _value(cell, texts))
        }


def _value(cell: ElementTree.Element, texts: list[str]) -> str:
    kind = cell.get("t", "n")
    if kind == "inlineStr":
        return _text(cell)
    value = cell.findtext(f"{_NAMESPACE}v", "")
    return texts[int(value)] if kind == "s" and value else value


def _text(element: ElementTree.Element) -> str:
    """The text of an entry, which may be cut into runs of different fonts."""
    return "".join(piece.text or "" for piece in element.iter(f"{_NAMESPACE}t"))


def _each(file: IO[bytes], name: str) -> Iterator[ElementTree.Element]:
    """All elements of a name, one after the other, each emptied when it was seen."""
    for _, element in ElementTree.iterparse(file):
        if element.tag == _NAMESPACE + name:
            yield element
            element.clear()
