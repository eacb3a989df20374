import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinhull.system.quantities import Batch, Gpus, Network, Range, Retries, Span, Time

counts = st.integers(0, 10**9)
seconds = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
words = st.from_regex(r"[A-Za-z][A-Za-z0-9]{0,8}", fullmatch=True)
ranges = st.builds(
    lambda low, more: Range(low, None if more is None else low + more),
    st.integers(0, 10**8),
    st.none() | st.integers(0, 10**8),
)
gpus = st.builds(Gpus, counts, st.none() | words) | st.builds(Gpus, st.none(), words)
networks = st.builds(
    Network,
    st.integers(1, 999),
    st.integers(0, 10**9).map(lambda n: n * 125e3),
    st.none() | st.just("Ethernet") | words,
)
spans = (
    st.builds(Span, seconds | st.just(math.inf))
    | st.builds(Span, st.none(), counts)
    | st.just(Span(auto=True))
)
times = st.builds(
    lambda mean, each, more: Time(mean, each, None if more is None else mean + more),
    seconds.filter(lambda x: x < 1e200),
    st.none() | seconds,
    st.none() | seconds.filter(lambda x: x < 1e200),
)
batches = st.builds(Batch, st.integers(1, 10**9), seconds)
retries = st.builds(
    Retries, counts.map(float) | st.just(math.inf), st.none() | seconds, st.none() | st.floats(0, 1)
)


@given(ranges | gpus | networks | spans | times | batches | retries)
def test_what_is_written_reads_as_exactly_the_same(quantity):
    assert type(quantity).parse(str(quantity)) == quantity


@given(
    st.sampled_from([Range, Gpus, Network, Span, Time, Batch, Retries]),
    st.text() | st.integers() | st.none() | st.booleans(),
)
def test_anything_else_is_refused_with_an_example(kind, value):
    try:
        kind.parse(value)
    except ValueError as error:
        assert "write" in str(error)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Range, "3", Range(3, 3)),
        (Range, 3, Range(3, 3)),
        (Range, "3..9", Range(3, 9)),
        (Range, "3..", Range(3, None)),
        (Gpus, "8 x H100", Gpus(8, "H100")),
        (Gpus, "8", Gpus(8)),
        (Gpus, "H100", Gpus(None, "H100")),
        (Gpus, 0, Gpus(0)),
        (Network, "100 GbE", Network(1, 12.5e9, "Ethernet")),
        (Network, "8 x 400 Gb/s InfiniBand", Network(8, 50e9, "InfiniBand")),
        (Span, "10 min", Span(seconds=600.0)),
        (Span, "500 steps", Span(steps=500)),
        (Span, "never", Span(seconds=math.inf)),
        (Span, "auto", Span(auto=True)),
        (Time, "80 ms", Time(0.08)),
        (Time, "80 ms, p99 200 ms", Time(0.08, None, 0.2)),
        (Time, "5 ms + 0.1 ms each, p99 12 ms", Time(0.005, 0.0001, 0.012)),
        (Batch, "32 within 5 ms", Batch(32, 0.005)),
        (Retries, 2, Retries(2.0)),
        (Retries, "2 after 100 ms", Retries(2.0, 0.1)),
        (Retries, "3 after 2 s, budget 10 %", Retries(3.0, 2.0, 0.1)),
        (Retries, "unlimited", Retries(math.inf)),
    ],
)
def test_a_text_of_several_parts_is_one_quantity(kind, text, value):
    assert kind.parse(text) == value


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Range, "9..3"), (Range, "..3"), (Range, "1...3"), (Range, 3.0), (Range, True), (Range, -1),
        (Gpus, "8 H100"), (Gpus, ""), (Gpus, False),
        (Network, "100"), (Network, "0 x 1 GbE"), (Network, "1.2.3 GbE"), (Network, "100 GbE InfiniBand"),
        (Span, 5), (Span, "10 mins"),
        (Time, 5), (Time, False), (Time, "200 ms, p99 80 ms"), (Time, "80 ms + 1 ms"),
        (Batch, "32"), (Batch, "0 within 5 ms"), (Batch, "32 within never"),
        (Retries, 2.5), (Retries, "x"), (Retries, -1), (Retries, "3 after"),
    ],
)  # fmt: skip
def test_a_wrong_text_is_refused(kind, value):
    with pytest.raises(ValueError, match=r"write|has no unit"):
        kind.parse(value)


def test_a_node_has_the_bandwidth_of_all_its_ports():
    assert Network.parse("8 x 400 Gb/s InfiniBand").bandwidth == 400e9
