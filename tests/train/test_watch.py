from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from twinhull.train.supervise.live import Doing, Phase, Record
from twinhull.train.supervise.watch import LONGEST_LOOK_S, START_S, Hang, Records, Watch

LOOK_S = 0.5


def rank(step: int = 5, doing: Doing = Doing.STEPPING, step_s: float = 0.1, **facts: float) -> Record:
    return replace(Record(1, Phase.RUNNING, step, step, 0, doing, step_s), **facts)


def silent(watch: Watch, records: Records, for_s: float, since: float = 0.0) -> Hang | None:
    """The first hang in so many seconds without a change."""
    for look in range(int(for_s / LOOK_S) + 1):
        if hang := watch.look(since + look * LOOK_S, records):
            return hang
    return None


def test_a_stopped_step_hangs_after_twenty_usual_ones() -> None:
    hang = silent(Watch(300.0, 2), {0: rank(step_s=1.0), 1: rank(step_s=1.0)}, 30.0)
    assert hang is not None
    assert (hang.deadline_s, hang.silent_s, hang.step, hang.doing) == (20.0, 20.5, 5, "in a step")


def test_short_steps_may_pause_for_five_seconds() -> None:
    assert Watch(300.0, 1).deadline_s({0: rank(step_s=0.001)}) == 5.0


def test_no_step_may_take_longer_than_the_hang_timeout() -> None:
    assert Watch(30.0, 1).deadline_s({0: rank(step_s=10.0)}) == 30.0


def test_the_first_step_of_a_loop_and_code_outside_may_take_the_hang_timeout() -> None:
    for doing in (Doing.FIRST, Doing.BETWEEN):
        assert Watch(300.0, 1).deadline_s({0: rank(doing=doing)}) == 300.0


def test_a_start_may_take_two_minutes_whatever_the_timeout() -> None:
    starting = {0: rank(phase=Phase.STARTING), 1: rank()}
    assert Watch(10.0, 2).deadline_s(starting) == START_S
    assert Watch(10.0, 3).deadline_s({0: rank(), 1: rank()}) == START_S  # one has not spoken yet


def test_a_save_may_take_ten_times_the_longest_so_far() -> None:
    watch = Watch(300.0, 1)
    saving = {0: rank(doing=Doing.SAVING)}
    assert watch.deadline_s(saving) == 60.0
    for look in range(17):  # eight seconds, with a sign of life at each look
        watch.look(look * LOOK_S, {0: rank(doing=Doing.SAVING, beats=look)})
    assert watch.deadline_s(saving) == 80.0


def test_a_save_that_hangs_does_not_make_its_own_deadline_longer() -> None:
    hang = silent(Watch(300.0, 1), {0: rank(doing=Doing.SAVING)}, 70.0)
    assert hang is not None
    assert (hang.deadline_s, hang.doing) == (60.0, "waiting for a checkpoint")


def test_the_rank_that_others_wait_for_is_named() -> None:
    hang = silent(Watch(300.0, 3), {0: rank(waits=1), 1: rank(), 2: rank(waits=1)}, 10.0)
    assert hang is not None
    assert hang.ranks == (1,)


def test_a_rank_that_has_completed_less_is_named() -> None:
    hang = silent(Watch(300.0, 2), {0: rank(6), 1: rank(5, waits=1)}, 10.0)
    assert hang is not None
    assert (hang.ranks, hang.step) == ((1,), 5)


def test_ranks_that_have_left_are_not_waited_for() -> None:
    hang = silent(Watch(300.0, 2), {0: rank(4, phase=Phase.STOPPED), 1: rank()}, 10.0)
    assert hang is not None
    assert hang.ranks == (1,)


def test_who_is_seen_at_work_is_spared_until_the_next_sign() -> None:
    watch, records = Watch(60.0, 1), {0: rank()}
    assert silent(watch, records, 10.0)
    watch.spare()
    assert silent(watch, records, 40.0, since=10.0) is None
    assert silent(watch, {0: rank(6)}, 10.0, since=50.0)


def test_a_step_that_has_hung_before_is_given_longer() -> None:
    assert Watch(300.0, 1, hangs=1).deadline_s({0: rank()}) == 20.0
    assert Watch(300.0, 1, hangs=5).deadline_s({0: rank()}) == 300.0


def test_a_launcher_that_was_stopped_itself_sees_no_hang() -> None:
    watch, records = Watch(300.0, 1), {0: rank()}
    watch.look(0.0, records)
    assert watch.look(100.0, records) is None


steps = st.lists(
    st.tuples(st.floats(0.01, LONGEST_LOOK_S), st.sampled_from(Doing), st.booleans()), min_size=1, max_size=60
)


@given(steps, st.floats(0.001, 20.0), st.floats(6.0, 600.0))
def test_a_group_that_progresses_never_hangs(
    looks: list[tuple[float, Doing, bool]], step_s: float, timeout_s: float
) -> None:
    watch, now, beats, silent_s = Watch(timeout_s, 2), 0.0, 0, 0.0
    for gap_s, doing, beat in looks:
        now += gap_s
        silent_s += gap_s
        if beat or silent_s > 5.0:
            beats, silent_s = beats + 1, 0.0
        assert watch.look(now, {r: rank(beats, doing, step_s, beats=beats) for r in (0, 1)}) is None


@given(steps, st.floats(0.001, 20.0), st.floats(6.0, 600.0))
def test_a_group_that_stops_hangs_within_its_deadline_and_one_look(
    looks: list[tuple[float, Doing, bool]], step_s: float, timeout_s: float
) -> None:
    watch, now = Watch(timeout_s, 2), 0.0
    records: Records = {}
    for beats, (gap_s, doing, _) in enumerate(looks):
        now += gap_s
        records = {r: rank(beats, doing, step_s, beats=beats) for r in (0, 1)}
        watch.look(now, records)
    deadline_s, hang, looked = watch.deadline_s(records), None, 0
    while hang is None:
        looked += 1
        hang = watch.look(now + looked * LOOK_S, records)
        assert looked * LOOK_S <= deadline_s + 2 * LOOK_S
    assert hang.silent_s > deadline_s


def straggling(watch: Watch, for_s: float, since: float = 0.0, **slow: float) -> list[tuple[int, str]]:
    """Who was told to hold up the others, in so many seconds of steps."""
    told: list[tuple[int, str]] = []
    for look in range(int(for_s / LOOK_S)):
        step = int(since / LOOK_S) + look
        records = {r: rank(step, own_s=0.02, data_s=0.005) for r in (0, 1)}
        records[2] = replace(rank(step, own_s=0.02, data_s=0.005), **slow)
        if found := watch.straggler(since + look * LOOK_S, records):
            told.append((found.rank, found.phase))
    return told


def test_a_rank_that_needs_much_longer_is_told_once_a_minute() -> None:
    watch = Watch(300.0, 3)
    assert straggling(watch, 50.0, own_s=0.04) == [(2, "compute")]
    assert straggling(watch, 50.0, since=50.0, own_s=0.04) == [(2, "compute")]


def test_a_rank_that_waits_for_data_is_told_so() -> None:
    assert straggling(Watch(300.0, 3), 10.0, own_s=0.04, data_s=0.02) == [(2, "data")]


def test_a_straggler_for_another_reason_is_told_again() -> None:
    watch = Watch(300.0, 3)
    assert straggling(watch, 10.0, own_s=0.04) == [(2, "compute")]
    assert straggling(watch, 10.0, since=10.0, own_s=0.04, data_s=0.02) == [(2, "data")]


def test_a_slow_moment_is_no_straggler() -> None:
    watch = Watch(300.0, 3)
    assert straggling(watch, 4.0, own_s=0.04) == []
    assert straggling(watch, 4.0, since=4.0) == []
    assert straggling(watch, 4.0, since=8.0, own_s=0.04) == []


def test_noise_is_no_straggler() -> None:
    assert straggling(Watch(300.0, 3), 20.0, own_s=0.025) == []
    watch = Watch(300.0, 2)
    for step in range(40):
        tiny = {0: rank(step, own_s=0.001), 1: rank(step, own_s=0.0025)}
        assert watch.straggler(step * LOOK_S, tiny) is None


def test_looks_without_a_new_step_prove_nothing() -> None:
    watch, records = Watch(300.0, 2), {0: rank(own_s=0.02), 1: rank(own_s=0.2)}
    assert not any(watch.straggler(look * LOOK_S, records) for look in range(40))
