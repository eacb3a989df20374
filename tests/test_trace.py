import sqlite3
from pathlib import Path

import pytest

from twinhull import trace
from twinhull.errors import TwinhullError
from twinhull.trace import Journal


def test_what_a_journal_wrote_is_read_back_in_order_of_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.event(2.0, "resumed", "rank:fit-0", {"step": 120})
    journal.event(1.0, "lost", "up", {"exit": -9})
    journal.sample(1.5, "train.fit.loss", 6.5)
    journal.sample(2.5, "train.fit.loss", 6.0)
    journal.close()
    seen = trace.read(tmp_path / "journal.sqlite")
    assert [(e.t, e.kind, e.subject, e.fields) for e in seen.events] == [
        (1.0, "lost", "up", {"exit": -9}),
        (2.0, "resumed", "rank:fit-0", {"step": 120}),
    ]
    assert seen.samples == {"train.fit.loss": ((1.5, 6.5), (2.5, 6.0))}
    assert seen.last("train.fit.loss") == 6.0
    assert seen.last("unheard of") is None


def test_a_second_run_appends_to_the_same_journal(tmp_path: Path) -> None:
    for t in (1.0, 2.0):
        journal = Journal(tmp_path / "j")
        journal.event(t, "up", "up", {})
        journal.close()
    assert len(trace.read(tmp_path / "j").kinds("up")) == 2
    assert len(trace.read(tmp_path / "j", since=1.5).events) == 1


def test_a_journal_is_read_while_it_is_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.event(1.0, "up", "up", {})
    assert trace.read(tmp_path / "j").events == ()
    journal.flush()
    assert len(trace.read(tmp_path / "j").events) == 1
    journal.close()


def test_a_newer_format_is_refused_with_the_version_needed(tmp_path: Path) -> None:
    file = sqlite3.connect(tmp_path / "j")
    file.execute("PRAGMA user_version=9")
    file.commit()
    file.close()
    with pytest.raises(TwinhullError, match="format 9"):
        Journal(tmp_path / "j")


def test_a_file_that_is_no_journal_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b"not a database at all" * 100)
    with pytest.raises(TwinhullError, match="cannot be opened"):
        Journal(tmp_path / "j")
    with pytest.raises(TwinhullError, match="no journal"):
        trace.read(tmp_path / "absent")


def test_rows_that_cannot_be_written_are_counted_and_the_journal_goes_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    blocker = sqlite3.connect(tmp_path / "j")
    blocker.execute("DROP TABLE event")
    blocker.commit()
    journal.event(1.0, "up", "up", {})
    journal.flush()
    assert journal.lost == 1
    blocker.execute("CREATE TABLE event (t REAL, kind TEXT, subject TEXT, fields TEXT)")
    blocker.commit()
    blocker.close()
    journal.event(2.0, "down", "up", {})
    journal.close()
    assert [e.kind for e in trace.read(tmp_path / "j").events] == ["down"]
