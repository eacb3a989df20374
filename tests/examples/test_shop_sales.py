"""Where the shop's sales come from."""

import functools
import http.server
import io
import os
import socket
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import pytest
from shop import sales, synthetic, uci, workbook
from shop.sales import SalesError

HEADER = [
    "InvoiceNo",
    "StockCode",
    "Description",
    "Quantity",
    "InvoiceDate",
    "UnitPrice",
    "CustomerID",
    "Country",
]
DAY = 40513.0  # 1 December 2010
LINES: list[list[str | float | None]] = [
    ["536366", "22633", "HAND WARMER", 6, DAY + 510 / 1440, 1.85, 17850, "United Kingdom"],
    ["536365", "85123A", " WHITE LIGHT & HOLDER ", 6, DAY + 506 / 1440, 2.55, 17850, "United Kingdom"],
    ["536365", "71053", "HAND WARMER", 40_000, DAY + 506 / 1440, 3.39, 12346, "United Kingdom"],
    ["536367", "22745", None, 6, DAY + 511 / 1440, 2.1, 13047, "United Kingdom"],
    ["536367", "22748", "POPPY", 6, DAY + 511 / 1440, 2.1, None, "United Kingdom"],
    ["C536379", "D", "DISCOUNT", -1, DAY + 512 / 1440, 27.5, 14527, "United Kingdom"],
    ["536367", "22749", "FELT DOLL", 8, DAY + 513 / 1440, 0, 13047, "United Kingdom"],
    ["536400", "20713", 20713, 1, DAY + 1 + 480 / 1440, 0.5, 13448, "France"],
]


def book(rows: list[list[str | float | None]], *, inline: bool = False) -> bytes:
    """A small workbook, its texts shared as Excel does or in the cells."""
    texts: list[str] = []

    def cell(value: str | float | None, column: int, row: int) -> str:
        place = f"{'ABCDEFGH'[column]}{row}"
        if value is None:
            return ""
        if not isinstance(value, str):
            return f'<c r="{place}"><v>{value!r}</v></c>'
        if inline:
            return f'<c r="{place}" t="inlineStr"><is><t>{escape(value)}</t></is></c>'
        texts.append(value)
        return f'<c r="{place}" t="s"><v>{len(texts) - 1}</v></c>'

    space = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
    body = "".join(
        f'<row r="{r}">{"".join(cell(value, c, r) for c, value in enumerate(row))}</row>'
        for r, row in enumerate(rows, 1)
    )
    entries = "".join(
        f"<si><r><t>{escape(text[:2])}</t></r><r><t>{escape(text[2:])}</t></r></si>" for text in texts
    )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr(
            "xl/worksheets/sheet1.xml", f"<worksheet {space}><sheetData>{body}</sheetData></worksheet>"
        )
        if not inline:
            file.writestr("xl/sharedStrings.xml", f"<sst {space}>{entries}</sst>")
    return out.getvalue()


def zipped(content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("Online Retail.xlsx", content)
    return out.getvalue()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The URL of a folder with the archive in it."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "retail.zip").write_bytes(zipped(book([list(HEADER), *LINES])))
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/retail.zip"
        server.shutdown()
        thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def nothing_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that names no sales, with a cache and a run directory of its own."""
    monkeypatch.delenv(sales.DATA, raising=False)
    monkeypatch.setenv(sales.CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv(sales.RUN, str(tmp_path / "run"))
    return tmp_path


@pytest.mark.parametrize("inline", [False, True])
def test_a_workbook_becomes_clean_sales_in_the_order_of_time(inline: bool) -> None:
    found = workbook.read(book([list(HEADER), *LINES], inline=inline), source="test")
    assert found.names == ["20713", "HAND WARMER", "WHITE LIGHT & HOLDER"]
    assert found.minute.tolist() == [506, 506, 510, 1920]
    assert found.customer.tolist() == [5504, 0, 5504, 1102]
    assert [found.names[item] for item in found.item] == [
        "WHITE LIGHT & HOLDER",
        "HAND WARMER",
        "HAND WARMER",
        "20713",
    ]
    assert found.quantity.tolist() == [6, 32_767, 6, 1]


def test_columns_may_stand_in_any_order() -> None:
    rows = [list(HEADER), *LINES]
    turned = [[row[i] for i in (6, 0, 5, 2, 1, 7, 3, 4)] for row in rows]
    expected = workbook.read(book(rows), source="test")
    assert workbook.read(zipped(book(turned)), source="test").fingerprint() == expected.fingerprint()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not the workbook"),
        (b"<html>moved</html>", "not the workbook"),
        (book([["Date", "Item"], ["today", "tea"]]), "no column 'Description'; it has Date, Item"),
        (book([]), "no column 'Description'; it has none"),
        (book([list(HEADER)]), "no line that counts"),
        (book([list(HEADER), ["1", "2", "TEA", "many", DAY, 1, 12346, "UK"]]), "could not convert"),
        (book([list(HEADER), ["1", "2", "TEA", 1, DAY - 1, 1, 12346, "UK"]]), "before December 2010"),
        (book([list(HEADER), *LINES])[:-300], "not the workbook"),
    ],
)
def test_what_is_no_workbook_is_refused_with_the_reason(content: bytes, said: str) -> None:
    with pytest.raises(SalesError, match=said):
        workbook.read(content, source="test")


def test_saved_sales_are_loaded_equal(tmp_path: Path) -> None:
    made = workbook.read(book([list(HEADER), *LINES]), source="test")
    sales.save(made, tmp_path / "a" / "sales.npz")
    loaded = sales.load(tmp_path / "a" / "sales.npz", source="file")
    assert loaded.fingerprint() == made.fingerprint()
    assert loaded.minute.tolist() == made.minute.tolist()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["sales.npz"]


GOOD = {
    "minute": np.array([506, 0, 4], np.int16),
    "customer": np.array([0, 1, 0], np.int16),
    "item": np.array([0, 1, 1], np.int16),
    "quantity": np.array([1, 2, 3], np.int16),
    "names": np.array("tea\npot"),
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"item": None}, "column 'item' is missing; it holds customer, minute, names, quantity"),
        ({"item": np.array([0, 1], np.int16)}, "item has 2 lines and minute has 3"),
        ({"item": np.array([0, 1, 2], np.int16)}, "items must be numbers from 0 to 1"),
        ({"customer": np.array([0.5, 1, 0])}, "customer must be a row of whole numbers, not float64"),
        ({"customer": np.array([0, -1, 0], np.int16)}, "customers must be numbers from 0"),
        ({"minute": np.array([506, -1, 4], np.int16)}, "one of them is negative"),
        ({"minute": np.array([2**40, 0, 4])}, "more than 4,000 years"),
        ({"quantity": np.array([0, 1, 1], np.int16)}, "quantities must be above 0"),
        ({"names": np.array([1, 2])}, "names must be one text"),
        ({name: np.array([], np.int16) for name in ("minute", "customer", "item", "quantity")}, "no sales"),
        ({"item": np.array(["a", "b", "c"], object)}, "not a readable"),
    ],
)
def test_a_file_with_wrong_columns_is_refused_with_its_name_and_the_reason(
    tmp_path: Path, change: dict[str, np.ndarray | None], said: str
) -> None:
    path = tmp_path / "sales.npz"
    np.savez(path, allow_pickle=True, **{k: v for k, v in {**GOOD, **change}.items() if v is not None})
    with pytest.raises(SalesError, match=said) as caught:
        sales.find(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"a,b\n1,2\n", b"\x93NUMPY\x01\x00"])
def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "sales.npz"
    path.write_bytes(content)
    with pytest.raises(SalesError, match=r"not a readable \.npz file"):
        sales.find(path)


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sales.npz"
    np.savez_compressed(path, **GOOD)
    content = bytearray(path.read_bytes())
    content[60:70] = b"x" * 10
    path.write_bytes(content)
    with pytest.raises(SalesError, match="not a readable"):
        sales.find(path)


def test_a_single_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sales.npy"
    np.save(path, np.arange(3))
    with pytest.raises(SalesError, match="not a readable"):
        sales.find(path)


def test_a_missing_file_that_was_named_is_an_error_not_a_download(
    nothing_named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sales.DATA, str(nothing_named / "none.npz"))
    with pytest.raises(SalesError, match=r"none\.npz: there is no such file"):
        sales.find()


def test_a_download_is_kept_and_found_again_without_the_network(
    nothing_named: Path, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uci.download, "__defaults__", (served,))
    first = sales.find()
    monkeypatch.setattr(uci.download, "__defaults__", ("http://127.0.0.1:9/none.zip",))
    again = sales.find()
    assert first.source == f"UCI, downloaded from {served}"
    assert again.source.startswith("UCI, downloaded earlier")
    assert again.real
    assert again.fingerprint() == first.fingerprint()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/retail.zip", "http://nowhere.invalid/retail.zip"])
def test_without_a_network_there_is_a_synthetic_shop_and_the_run_keeps_it(
    nothing_named: Path,
    served: str,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(uci.download, "__defaults__", (url,))
    first = sales.find()
    assert (first.source, first.real) == ("synthetic", False)
    assert "no real sales, using a synthetic shop" in caplog.text
    monkeypatch.setattr(
        uci.download, "__defaults__", (served,)
    )  # the network is back in the middle of the run
    again = sales.find()
    assert (again.source, again.real) == ("synthetic", False)
    assert again.fingerprint() == first.fingerprint()


def test_a_server_that_says_nothing_costs_seconds_only(
    nothing_named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uci, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/retail.zip"
        with pytest.raises(SalesError, match=r"no answer within 0\.2 s"):
            uci.fetch(url)


def test_a_broken_download_of_earlier_is_replaced(
    nothing_named: Path, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uci.download, "__defaults__", (served,))
    kept = nothing_named / "cache" / "online_retail.npz"
    kept.parent.mkdir()
    kept.write_bytes(b"torn")
    assert sales.find().source.startswith("UCI, downloaded from")
    assert sales.load(kept, source="cache").real


def test_sales_are_found_where_nothing_can_be_kept(
    nothing_named: Path, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (nothing_named / "file").touch()
    monkeypatch.setenv(sales.CACHE, str(nothing_named / "file" / "cache"))
    monkeypatch.setenv(sales.RUN, str(nothing_named / "file" / "run"))
    monkeypatch.setattr(uci.download, "__defaults__", (served,))
    assert sales.find().real


def test_the_option_names_the_sales_for_child_processes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sales.DATA, "before")
    arguments = ["demo", "--data", "sales.npz", "--json"]
    sales.take_option(arguments)
    assert arguments == ["demo", "--json"]
    assert os.environ[sales.DATA] == "sales.npz"


def test_an_option_without_a_path_is_an_error() -> None:
    with pytest.raises(SalesError, match="--data needs the path"):
        sales.take_option(["demo", "--data"])


def test_one_seed_makes_one_synthetic_shop_of_the_real_shape() -> None:
    made = synthetic.make()
    assert made.fingerprint() == synthetic.make().fingerprint()
    assert made.fingerprint() != synthetic.make(seed=1).fingerprint()
    assert not made.real
    assert made.num_items == 3_866
    assert len(np.unique(made.customer)) == 4_338
    assert 350_000 < len(made) < 450_000
    assert (np.diff(made.minute) >= 0).all()
    assert 0.15 < (made.minute >= sales.SPLIT).mean() < 0.25


@pytest.mark.parametrize("size", [(1, 1, 1), (3, 2, 5), (50, 30, 200)])
def test_a_synthetic_shop_may_be_tiny(size: tuple[int, int, int]) -> None:
    customers, items, baskets = size
    made = synthetic.make(customers=customers, items=items, baskets=baskets, basket=2.0)
    assert len(made) >= baskets
    assert made.item.max() < items
