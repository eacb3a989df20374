import json

from hypothesis import given
from hypothesis import strategies as st

from twinhull.deploy import plain, record
from twinhull.deploy.record import Record


def test_a_json_line_becomes_an_event_with_its_facts() -> None:
    said = {"t": 5.0, "role": "rank:fit-1", "event": "resumed", "level": "info", "step": 120}
    found = record.read("train:fit", json.dumps(said).encode())
    assert found == Record(5.0, "rank:fit-1", "resumed", "info", {"step": 120})


def test_a_sample_line_carries_numbers_and_no_event() -> None:
    found = record.read("gateway", b'{"t": 5.0, "sample": {"serve.batch": 3, "odd": "text"}}')
    assert found is not None
    assert (found.role, found.kind, found.sample) == ("gateway", "", {"serve.batch": 3.0})


def test_a_line_that_is_no_record_is_kept_as_said() -> None:
    for line in (
        b"plain print",
        b'{"t": 1}',
        b'{"broken',
        b'{"t": "x", "event": "y"}',
        b"[1, 2]",
        b'{"sample": 3}',
        b'{"loss": 0.1, "sample": "text"}',
        b'{"t": 1, "sample": null}',
        b'{"t": 1, "sample": {"a": 1' + b"0" * 400 + b"}}",
        b'{"t": NaN, "event": "x"}',
        b'{"t": 1e400, "event": "x"}',
        b'{"t": 1, "event": "\\ud800"}',
        b'{"t": 1, "event": "x", "fact": ["\\udfff"]}',
        b'{"a":' * 100_000,
        b"\xff\xfe",
    ):
        found = record.read("worker:web-0", line)
        assert found is not None
        assert found.kind == record.SAID
        assert found.role == "worker:web-0"


def test_a_sample_that_the_journal_could_not_hold_is_left_out() -> None:
    found = record.read("rank:fit-0", b'{"t": 5, "sample": {"loss": NaN, "grad": -Infinity, "step": 7}}')
    assert found is not None
    assert found.sample == {"step": 7.0}


def test_an_empty_line_is_nothing() -> None:
    assert record.read("gateway", b"  \r") is None


@given(st.binary(max_size=200))
def test_no_line_breaks_the_reader_or_the_printer(line: bytes) -> None:
    found = record.read("x", line)
    if found is not None:
        assert plain.line(found, "console")
        assert json.loads(plain.line(found, "json"))["event"] == found.kind


def test_a_console_line_names_time_role_event_and_facts() -> None:
    said = Record(0.0, "up", "lost", "warning", {"process": "gateway", "exit": -9, "lived_s": 12.34567})
    line = plain.line(said, "console")
    assert line.endswith("! up                 lost                 process=gateway exit=-9 lived_s=12.35")


def test_a_traceback_stands_on_lines_of_its_own() -> None:
    said = Record(0.0, "gateway", "failed", "error", {"exception": "Traceback ...\nValueError: no"})
    assert plain.line(said, "console").split("\n")[1:] == ["Traceback ...", "ValueError: no"]
