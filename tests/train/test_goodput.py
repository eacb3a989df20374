"""Goodput against its closed form, and the law that the parts add up to the wall."""

import math

from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from twinhull.train.supervise.goodput import Ledger, Spent

seconds = st.floats(0, 1e6)
spents = st.builds(Spent, seconds, seconds, st.integers(0, 10**6), st.integers(-5, 10**6), seconds, seconds)


def parts(ledger: Ledger) -> list[float]:
    return [
        ledger.useful_s, ledger.repeated_s, ledger.stalled_s, ledger.starting_s, ledger.restarting_s,
        ledger.waiting_s, ledger.outside_s,
    ]  # fmt: skip


def test_an_undisturbed_run_loses_its_start_and_its_checkpoints():
    ledger = Ledger().after(
        Spent(wall_s=120, started_s=4, steps=1000, new_steps=1000, worked_s=110, stalled_s=6)
    )
    assert ledger.goodput == approx(110 / 120)
    assert (ledger.starting_s, ledger.restarting_s, ledger.stalled_s, ledger.outside_s) == (4, 0, 6, 0)
    assert ledger.restarts == {}


def test_goodput_under_failures_is_that_of_the_closed_form():
    """A failure every F steps, which costs R s and L repeated steps: (F - L) s / (F s + R)."""
    between, lost, step_s, restart_s = 400, 30, 0.25, 8.0
    ledger = Ledger()
    for number in range(50):
        spent = Spent(
            wall_s=restart_s + between * step_s,
            started_s=restart_s,
            steps=between,
            new_steps=between - lost,
            worked_s=between * step_s,
            stalled_s=0.0,
        )
        ledger = ledger.after(spent, restarted_for="rank" if number else "")
    assert ledger.goodput == approx((between - lost) * step_s / (between * step_s + restart_s))
    assert ledger.restarts == {"rank": 49}
    assert ledger.repeated_steps == 50 * lost
    assert ledger.repeated_s == approx(50 * lost * step_s)
    assert ledger.restarting_s == approx(49 * restart_s)


def test_a_generation_that_never_stepped_is_all_lost():
    ledger = Ledger().after(
        Spent(wall_s=9, started_s=5, steps=0, new_steps=0, worked_s=0, stalled_s=0), restarted_for="crash"
    )
    assert (ledger.goodput, ledger.restarting_s, ledger.outside_s) == (0, 5, 4)


def test_a_generation_under_way_can_be_seen_before_it_ends():
    before = Ledger().after(Spent(10, 0, 10, 10, 10, 0))
    now = before.after(Spent(10, 10, 0, 0, 0, 0), restarted_for="hang")
    assert (before.goodput, now.goodput) == (1.0, 0.5)
    assert before.restarts == {}


def test_waiting_for_hosts_is_no_training():
    assert Ledger().after(Spent(10, 0, 10, 10, 10, 0)).waited(30).goodput == approx(0.25)


def test_facts_are_plain_and_rounded():
    facts = Ledger().after(Spent(3, 1, 3, 2, 1.00001, 0.5), restarted_for="host").waited(1).as_facts()
    assert facts == {
        "goodput": 0.1667, "wall_s": 4.0, "useful_s": 0.667, "repeated_s": 0.333, "stalled_s": 0.5,
        "starting_s": 0.0, "restarting_s": 1.0, "waiting_s": 1.0, "outside_s": 0.5, "steps": 3,
        "repeated_steps": 1, "restarts": {"host": 1},
    }  # fmt: skip


@given(st.lists(st.tuples(spents, st.sampled_from(["", "rank", "hang"])), max_size=5), seconds)
def test_the_parts_add_up_to_the_wall(generations: list[tuple[Spent, str]], wait_s: float):
    ledger = Ledger().waited(wait_s)
    for spent, cause in generations:
        ledger = ledger.after(spent, restarted_for=cause)
    assert all(part >= 0 for part in parts(ledger))
    assert math.isclose(sum(parts(ledger)), ledger.wall_s, rel_tol=1e-9, abs_tol=1e-6)
    assert 0 <= ledger.goodput <= 1
