"""The step clock: every moment belongs to one part, and sums and percentiles are those of the steps."""

from time import perf_counter

import pytest

from twinhull.profile.clock import KEPT, PARTS, Part, StepClock, Times


def parts(**seconds: float) -> list[float]:
    return [seconds.get(part.name.lower(), 0.0) for part in Part]


def busy(until_s: float = 0.002) -> None:
    end = perf_counter() + until_s
    while perf_counter() < end:
        pass


def test_the_parts_add_up_to_the_whole_time():
    clock = StepClock()
    began = perf_counter()
    clock.start()
    started = perf_counter()
    for _ in range(3):
        clock.mark(Part.DATA)
        clock.mark(Part.COPY)
        clock.own()
        clock.computed()
        clock.mark(Part.CHECKPOINT)
        clock.mark(Part.OPTIMIZER)
        stopping = perf_counter()
        clock.stop()
    stopped = perf_counter()
    assert stopping - started <= sum(clock.times.totals().seconds) <= stopped - began


def test_what_follows_the_handing_over_is_communication():
    clock = StepClock()
    clock.start()
    clock.mark(Part.COPY)
    busy()
    clock.own()  # of a first bucket
    busy()
    clock.own()
    busy(0.004)
    clock.computed()
    clock.stop()
    times = clock.times
    assert times.last[Part.COMPUTE] >= 0.004
    assert times.last[Part.COMMUNICATION] >= 0.004
    assert times.own_s == sum(times.last[: Part.COMMUNICATION])
    assert times.own_s + times.last[Part.COMMUNICATION] <= times.step_s


def test_without_handing_over_all_is_computation():
    clock = StepClock()
    clock.start()
    busy()
    clock.stop()
    assert clock.times.last[Part.COMPUTE] >= 0.002
    assert clock.times.last[Part.COMMUNICATION] == 0.0


def test_a_handing_over_of_the_step_before_says_nothing():
    clock = StepClock()
    clock.start()
    clock.own()
    clock.computed()
    clock.stop()
    busy()
    clock.computed()
    clock.stop()
    assert clock.times.last[Part.COMPUTE] >= 0.002
    assert clock.times.last[Part.COMMUNICATION] == 0.0


def test_micro_batches_of_a_step_add_up():
    clock = StepClock()
    clock.start()
    for _ in range(2):
        clock.mark(Part.COPY)
        busy()
        clock.own()
        clock.computed()
    clock.stop()
    assert clock.times.last[Part.COMPUTE] >= 0.004
    assert clock.times.totals().steps == 1


def test_what_was_before_a_loop_belongs_to_no_step():
    clock = StepClock()
    busy(0.05)
    clock.start()
    clock.stop()
    assert clock.times.step_s < 0.05


def test_sums_are_of_all_steps_and_percentiles_of_the_last():
    times = Times()
    for number in range(3 * KEPT):
        times.add(parts(data=float(number), other=1.0))
    totals = times.totals()
    assert totals.steps == 3 * KEPT
    assert totals.mean_s(Part.DATA) == pytest.approx((3 * KEPT - 1) / 2)
    assert totals.mean_s(Part.OTHER) == 1.0
    assert totals.step_s == pytest.approx(totals.mean_s(Part.DATA) + 1.0)
    assert times.percentile_s(Part.DATA, 50) == 2 * KEPT + KEPT // 2
    assert times.percentile_s(Part.DATA, 100) == 3 * KEPT - 1
    assert times.last == parts(data=3.0 * KEPT - 1, other=1.0)


def test_totals_tell_what_was_added_since():
    times = Times()
    times.add(parts(compute=1.0))
    earlier = times.totals()
    times.add(parts(compute=2.0, data=1.0))
    times.add(parts(compute=4.0))
    since = times.totals().since(earlier)
    assert (since.steps, since.mean_s(Part.COMPUTE), since.mean_s(Part.DATA)) == (2, 3.0, 0.5)


def test_before_the_first_step_all_is_zero():
    times = Times()
    assert times.last == [0.0] * PARTS
    assert times.totals().step_s == times.totals().mean_s(Part.DATA) == times.percentile_s(Part.DATA, 95) == 0
