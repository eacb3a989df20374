from hypothesis import given
from hypothesis import strategies as st

from twinhull.serve import cache
from twinhull.serve.cache import OVERHEAD, Kept, Memory


def test_what_was_put_is_found_and_what_was_not_is_nothing():
    memory = Memory(1e6)
    assert memory.put(b"a", Kept(b"1", 5.0, 3))
    assert memory.get(b"a") == Kept(b"1", 5.0, 3)
    assert memory.get(b"b") is cache.NOTHING


def test_the_least_recently_used_is_dropped_first():
    memory = Memory(1e6, most=2)
    memory.put(b"a", Kept(b"1", 1.0))
    memory.put(b"b", Kept(b"2", 1.0))
    memory.get(b"a")
    memory.put(b"c", Kept(b"3", 1.0))
    assert memory.get(b"b") is cache.NOTHING
    assert memory.get(b"a") is not cache.NOTHING


def test_an_older_answer_does_not_replace_a_newer_one():
    memory = Memory(1e6)
    memory.put(b"a", Kept(b"new", 9.0))
    assert not memory.put(b"a", Kept(b"old", 5.0))
    assert memory.get(b"a").value == b"new"


def test_an_answer_larger_than_the_memory_is_not_kept():
    memory = Memory(300.0)
    assert not memory.put(b"a", Kept(b"x" * 1000, 1.0))
    assert (len(memory), memory.num_bytes) == (0, 0)


@given(st.lists(st.tuples(st.binary(max_size=1), st.integers(0, 600), st.floats(0, 10)), max_size=60))
def test_it_never_holds_more_bytes_than_it_may(puts: list[tuple[bytes, int, float]]):
    memory = Memory(2000.0)
    kept: dict[bytes, Kept] = {}
    for key, size, at in puts:
        one = Kept(b"x" * size, at)
        if memory.put(key, one):
            kept[key] = one
    found = {key: one for key, one in kept.items() if memory.get(key) is not cache.NOTHING}
    assert memory.num_bytes == sum(len(one.value) + OVERHEAD for one in found.values()) <= 2000.0
    assert all(memory.get(key) == one for key, one in found.items())


def test_what_the_broker_kept_comes_back_and_rubbish_is_nothing():
    kept = Kept(b'{"a":1}', 12.5, 7)
    assert cache.unpack(cache.pack(kept)) == kept
    for rubbish in (None, b"", b"rubbish", b"\x80", 3):
        assert cache.unpack(rubbish) is cache.NOTHING
