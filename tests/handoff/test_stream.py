from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinhull.errors import TwinhullError
from twinhull.handoff import stream
from twinhull.handoff.stream import START, Found, Offset


@dataclass
class Model:
    """A stream in memory that does what the broker's does: numbers its entries, drops the oldest."""

    born: str = ""
    added: int = 0
    held: list[int] = field(default_factory=list)

    def append(self, count: int) -> None:
        self.held += range(self.added + 1, self.added + count + 1)
        self.added += count
        self.born = self.born or "7-0"

    def drop(self, count: int) -> list[int]:
        gone, self.held = self.held[:count], self.held[count:]
        return gone

    def look(self, after: Offset, limit: int, unsettled: int = 0) -> Found:
        settled = self.held[: len(self.held) - unsettled]
        entries = [number for number in settled if (number, 0) > stream.order(after.id)][:limit]
        newest = f"{self.added}-0" if self.added else "0-0"
        return Found(self.born, self.added, newest, [(f"{number}-0", entry(number)) for number in entries])


def entry(number: int) -> dict[bytes, bytes]:
    body = msgspec.msgpack.encode(number)
    return {b"id": b"k/%d" % number, b"at": b"1.5", b"n": b"%d" % number, b"body": body}


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 9)),
        st.tuples(st.just("drop"), st.integers(0, 9)),
        st.tuples(st.just("read"), st.integers(0, 9), st.integers(1, 9)),
        st.tuples(st.just("forget"), st.just(0)),
    ),
    max_size=60,
)


@given(steps)
def test_every_event_is_read_once_or_counted_lost_once_whatever_is_dropped(steps):
    model, offset, saved = Model(), START, (START, 0)
    read: list[int] = []
    dropped: set[int] = set()
    for name, *numbers in [*steps, ("read", 0, 1000)]:
        if name == "append":
            model.append(*numbers)
        elif name == "drop":
            dropped |= set(model.drop(*numbers))
        elif name == "forget":  # the reader dies and comes back with what it saved
            offset, count = saved
            del read[count:]
        else:
            unsettled, limit = numbers
            look = model.look(offset, limit, min(unsettled, len(model.held)))
            assert stream.corrected(offset, look) == offset
            events, offset, broken = stream.advance(offset, look)
            assert broken == 0
            read += [event.body for event in events]
            saved = (offset, len(read)) if limit % 2 else saved
    assert read == sorted(set(read))
    assert offset.lost == offset.index - len(read)
    assert set(range(1, offset.index + 1)) - set(read) <= dropped
    assert offset.index == model.added or set(range(offset.index + 1, model.added + 1)) <= dropped


def test_another_stream_of_the_same_name_is_read_from_its_beginning():
    model = Model(born="9-0")
    model.append(3)
    before = Offset("500-0", 500, "7-0", lost=2)
    begin = stream.corrected(before, model.look(before, 10))
    assert begin == Offset("0-0", 0, "9-0", lost=2)
    events, offset, _ = stream.advance(begin, model.look(begin, 10))
    assert [event.body for event in events] == [1, 2, 3]
    assert offset == Offset("3-0", 3, "9-0", lost=2)


def test_a_stream_that_is_gone_is_read_from_the_beginning_of_the_next_one():
    before = Offset("500-0", 500, "7-0", lost=2)
    assert stream.corrected(before, Model().look(before, 10)) == Offset(lost=2)


def test_a_stream_shorter_than_what_was_read_is_read_on_from_its_end():
    model = Model()
    model.append(3)
    before = Offset("5-0", 5, "7-0")
    begin = stream.corrected(before, model.look(before, 10))
    assert begin == Offset("3-0", 3, "7-0")
    model.append(1)
    assert [event.body for event in stream.advance(begin, model.look(begin, 10))[0]] == [4]


@pytest.mark.parametrize("broken", [{b"body": b"\xc1"}, {b"at": b"soon"}, {b"id": b"\xff"}])
def test_an_entry_that_is_no_event_is_counted_lost_and_the_next_one_read(broken):
    pairs = [("1-0", entry(1) | broken), ("2-0", entry(2)), ("3-0", {})]
    events, offset, count = stream.advance(START, Found("1-0", 3, "3-0", pairs))
    assert [event.body for event in events] == [2]
    assert (count, offset.lost, offset.index) == (2, 2, 3)


def test_a_stream_in_a_newer_format_is_refused():
    with pytest.raises(TwinhullError, match="format 2 and this Twinhull reads up to 1"):
        stream.found([b"1-0", b"1", b"2", b"1-0", []])


def test_ids_compare_as_numbers():
    assert stream.order("9-10") > stream.order("9-9")
    assert stream.order("10-0") > stream.order("9-99")
    assert stream.order("10") == (10, 0)
