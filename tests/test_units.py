import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinhull.units import BYTES, FLOW, NUMBER, RATE, SECONDS, SHARE, USD, Measure, closest, quoted

MEASURES = [SECONDS, BYTES, FLOW, RATE, USD, NUMBER]
numbers = st.floats(min_value=0, allow_nan=False) | st.integers(0, 10**12).map(float)
tenths = st.integers(0, 10**7).map(lambda n: n / 1000)


@given(st.sampled_from(MEASURES), numbers | tenths)
def test_what_is_shown_reads_as_exactly_the_same_number(measure: Measure, number: float):
    assert measure.parse(measure.show(number)) == number


@given(st.floats(min_value=0, max_value=1))
def test_a_share_that_is_shown_reads_as_exactly_the_same_share(share: float):
    assert SHARE.parse(SHARE.show(share)) == share


@given(
    st.sampled_from([*MEASURES, SHARE]), st.text() | st.integers() | st.floats() | st.none() | st.booleans()
)
def test_anything_else_is_refused_with_an_example(measure: Measure, value: object):
    try:
        number = measure.parse(value)
    except ValueError as error:
        assert "write" in str(error) or "more than" in str(error)
    else:
        assert number >= 0


@pytest.mark.parametrize(
    ("measure", "text", "number"),
    [
        (SECONDS, "30 ms", 0.03),
        (SECONDS, "4 h", 14400.0),
        (SECONDS, "never", math.inf),
        (SECONDS, "1.5min", 90.0),
        (BYTES, "64 MB", 64e6),
        (BYTES, "1 GiB", 2.0**30),
        (FLOW, "25 Gb/s", 3.125e9),
        (FLOW, "2 GB/s", 2e9),
        (RATE, "2000/s", 2000.0),
        (RATE, "30 /min", 0.5),
        (SHARE, "99.9 %", 0.999),
        (USD, "2.10 USD/h", 2.1 / 3600),
        (USD, "730 USD/month", 1 / 3600),
        (NUMBER, "70 B", 70e9),
        (NUMBER, "unlimited", math.inf),
    ],
)
def test_a_text_with_a_unit_is_an_si_number(measure: Measure, text: str, number: float):
    assert measure.parse(text) == number


@pytest.mark.parametrize(
    ("measure", "number", "text"),
    [
        (SECONDS, 0.1, "100 ms"),
        (SECONDS, 5400.0, "90 min"),
        (SECONDS, 14400.0, "4 h"),
        (SECONDS, 0.0, "0"),
        (BYTES, 988e9, "988 GB"),
        (RATE, 2000.0, "2000/s"),
        (SHARE, 0.999, "99.9 %"),
        (USD, USD.parse("50000 USD/month"), "50000 USD/month"),
        (NUMBER, 1.2e9, "1.2 B"),
    ],
)
def test_the_shortest_spelling_is_shown(measure: Measure, number: float, text: str):
    assert measure.show(number) == text


@pytest.mark.parametrize(
    ("measure", "value", "message"),
    [
        (SECONDS, "10 mins", '"10 mins" is not a time; write for example 30 ms. Did you mean "min"?'),
        (SECONDS, 5, "5 has no unit; write for example 30 ms"),
        (SECONDS, "5", '"5" has no unit; write for example 30 ms'),
        (SECONDS, "-5 s", '"-5 s" is negative; write for example 30 ms'),
        (SECONDS, "1e999 s", '"1e999 s" is too large for a time; write "never" if that is meant'),
        (SECONDS, True, "true is not a time; write for example 30 ms"),
        (SHARE, "101 %", '"101 %" is more than 100 %'),
        (RATE, "3 Hz", '"3 Hz" is not a rate; write for example 2000/s. Units: /s, /min, /h, /day'),
        (NUMBER, math.nan, "nan is not a number; write for example 3"),
    ],
)
def test_a_wrong_text_is_answered_with_the_rule_and_an_example(measure: Measure, value: object, message: str):
    with pytest.raises(ValueError) as caught:
        measure.parse(value)
    assert str(caught.value) == message


def test_nothing_at_all_needs_no_unit():
    assert [measure.parse(0) for measure in [*MEASURES, SHARE]] == [0.0] * 7


def test_a_quoted_value_is_short_and_printable():
    assert quoted("a\n\x00b") == '"a??b"'
    assert len(quoted("x" * 1000)) == 42
    assert [quoted(value) for value in (None, True, {}, [])] == ["nothing", "true", "a mapping", "a list"]


def test_only_a_near_word_is_offered():
    assert closest("Web", ["web", "scorers"]) == ' Did you mean "web"?'
    assert closest("zzz", ["web", "scorers"]) == ""
