from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinhull import policy

instants = st.floats(0.0, 1e9)
spans = st.floats(0.0, 1e5)


def test_a_default_is_made_ready_at_a_share_of_the_deadline() -> None:
    assert policy.prepare_at(10.0, 0.2, 0.5) == 10.1


@given(instants, st.floats(1e-4, 3600.0))
def test_a_request_gives_up_before_its_deadline_by_the_smaller_reserve(asked_at: float, deadline_s: float):
    give_up = policy.give_up_at(asked_at, deadline_s, 0.020, 0.1)
    assert give_up <= asked_at + deadline_s
    assert give_up >= asked_at + deadline_s - 0.020 - 1e-6


def test_a_short_deadline_keeps_nine_tenths_of_its_time():
    assert policy.give_up_at(100.0, 0.05, 0.020, 0.1) == 100.045


def test_an_answer_at_exactly_the_deadline_is_in_time():
    start = 0.1 + 0.2
    assert not policy.is_expired(start + 1.0, start + 1.0)
    assert policy.is_expired(start + 1.0 + 1e-9, start + 1.0)


def test_a_request_is_admitted_as_long_as_the_queue_drains_in_time():
    assert policy.admits(10.0, 100.0, 1000.0, 10.1)
    assert not policy.admits(10.0, 101.0, 1000.0, 10.1)


@given(instants, st.floats(0.0, 1e9))
def test_with_nothing_ahead_a_bad_rate_keeps_nobody_out(now: float, rate: float):
    assert policy.admits(now, 0.0, rate, now)


def test_with_nothing_known_of_the_rate_a_request_is_let_in():
    assert policy.admits(0.0, 1e9, 0.0, 0.1)


def test_a_lone_row_never_waits():
    assert policy.flush_at(1, 32, 0, 5.0, 0.005) == -inf


def test_a_full_batch_leaves_at_once():
    assert policy.flush_at(32, 32, 3, 5.0, 0.005) == -inf


@given(st.integers(1, 31), instants, spans)
def test_a_batch_that_gathers_leaves_when_its_oldest_row_has_waited(waiting: int, at: float, window_s: float):
    assert policy.flush_at(waiting, 32, 1, at, window_s) == at + window_s


def test_an_idle_plane_only_says_how_much_it_can_do_at_least():
    assert policy.learn_rate(500.0, 1.0, 0.01, False, 0.2) == 500.0
    assert policy.learn_rate(50.0, 1.0, 0.01, False, 0.2) == 100.0


@given(st.floats(1.0, 1e6), st.floats(1.0, 1e4), st.floats(1e-4, 10.0))
def test_a_saturated_plane_moves_the_rate_towards_what_was_seen(rate: float, rows: float, busy_s: float):
    seen = rows / busy_s
    learned = policy.learn_rate(rate, rows, busy_s, True, 0.2)
    assert min(rate, seen) * (1 - 1e-9) <= learned <= max(rate, seen) * (1 + 1e-9)


def test_a_reading_without_time_or_rows_teaches_nothing():
    assert policy.learn_rate(7.0, 10.0, 0.0, True, 0.2) == 7.0
    assert policy.learn_rate(7.0, 0.0, 1.0, True, 0.2) == 7.0


def test_a_try_is_repeated_within_its_count_and_the_budget_of_all():
    assert policy.may_retry(0, 2, 0.0, 1.0, 0.1)
    assert not policy.may_retry(2, 2, 0.0, 1000.0, 0.1)
    assert policy.may_retry(0, 2, 9.0, 100.0, 0.1)
    assert not policy.may_retry(0, 2, 10.0, 100.0, 0.1)
    assert policy.may_retry(10**6, inf, 0.0, 1.0, 0.1)


@given(instants, st.integers(0, 1000), spans, st.floats(0.0, 1.0))
def test_a_retry_waits_no_longer_than_the_cap(now: float, attempt: int, base_s: float, u: float):
    assert now <= policy.retry_at(now, attempt, base_s, 30.0, u) <= now + 30.0


def test_the_pause_before_a_retry_doubles():
    assert [policy.retry_at(0.0, n, 0.5, 30.0, 1.0) for n in range(4)] == [0.5, 1.0, 2.0, 4.0]


def test_the_breaker_opens_at_the_tripping_failure():
    state, failures, opened_at = policy.CLOSED, 0, 0.0
    states = []
    for now in (1.0, 2.0, 3.0):
        state, failures, opened_at = policy.breaker_hears(state, failures, opened_at, now, False, 3)
        states.append(state)
    assert states == [policy.CLOSED, policy.CLOSED, policy.OPEN]
    assert opened_at == 3.0


def test_one_success_closes_the_breaker_and_forgets_the_failures():
    assert policy.breaker_hears(policy.OPEN, 9, 3.0, 4.0, True, 3)[:2] == (policy.CLOSED, 0)


def test_an_open_breaker_lets_one_probe_through_each_cool_down():
    assert not policy.breaker_allows(policy.OPEN, 3.0, 3.9, 1.0)
    assert policy.breaker_allows(policy.OPEN, 3.0, 4.0, 1.0)
    opened_at = policy.breaker_asks(policy.OPEN, 3.0, 4.0)
    assert not policy.breaker_allows(policy.OPEN, opened_at, 4.9, 1.0)


def test_a_probe_that_is_never_heard_of_is_followed_by_another():
    opened_at = policy.breaker_asks(policy.OPEN, 3.0, 4.0)
    assert policy.breaker_allows(policy.OPEN, opened_at, 5.0, 1.0)


def test_a_closed_breaker_is_not_touched_by_requests():
    assert policy.breaker_asks(policy.CLOSED, 3.0, 4.0) == 3.0
    assert policy.breaker_allows(policy.CLOSED, 3.0, 3.0, 1.0)


def test_a_cached_answer_is_young_then_stale_then_gone():
    ages = [0.0, 10.0, 10.1, 60.0, 60.1]
    states = [policy.cache_state(100.0 + age, 100.0, 10.0, 60.0) for age in ages]
    assert states == [policy.YOUNG, policy.YOUNG, policy.STALE, policy.STALE, policy.GONE]


def test_no_cached_answer_is_gone():
    assert policy.cache_state(100.0, -inf, 10.0, 60.0) == policy.GONE


def test_an_answer_that_never_gets_old_stays_young():
    assert policy.cache_state(1e9, 0.0, inf, inf) == policy.YOUNG


def test_the_ladder_is_cached_then_default_then_failed():
    assert policy.fallback(policy.STALE, True, False) == policy.CACHED
    assert policy.fallback(policy.GONE, True, False) == policy.DEFAULT
    assert policy.fallback(policy.GONE, False, False) == policy.FAILED


def test_a_ladder_that_names_the_default_first_prefers_it():
    assert policy.fallback(policy.YOUNG, True, True) == policy.DEFAULT
    assert policy.fallback(policy.YOUNG, False, True) == policy.CACHED


def test_work_is_poison_after_its_last_delivery():
    assert not policy.is_poison(3, 3)
    assert policy.is_poison(4, 3)


@given(instants, st.integers(0, 10**9))
def test_restarts_back_off_without_end_but_within_the_cap(now: float, failures: int):
    at = policy.restart_at(now, failures, 0.2, 10.0)
    assert now <= at <= now + 10.0
    assert at <= policy.restart_at(now, failures + 1, 0.2, 10.0)


def test_the_first_restart_is_at_once_and_then_the_pause_doubles():
    assert [policy.restart_at(0.0, n, 0.5, 10.0) for n in range(4)] == [0.0, 0.5, 1.0, 2.0]


def test_checkpoints_come_as_often_as_young_and_daly_say() -> None:
    assert policy.checkpoint_interval(4.0, 1.8 * 3600) == pytest.approx(227.7, abs=0.1)
    assert policy.checkpoint_interval(0.0, 3600.0) == 0.0


def test_work_comes_between_two_checkpoints_however_often_it_fails() -> None:
    assert policy.checkpoint_interval(60.0, 10.0) == 60.0


def test_no_other_interval_costs_less_in_expectation() -> None:
    cost_s, mtbf_s = 5.0, 86400.0
    best = policy.checkpoint_interval(cost_s, mtbf_s)

    def lost(interval_s: float) -> float:
        return cost_s / interval_s + interval_s / (2.0 * mtbf_s)

    assert lost(best) <= min(lost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))
