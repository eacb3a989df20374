from twinhull.train.supervise.restarts import CRASHES, Ended, History, until_next


def after(*ended: Ended) -> History:
    history = History()
    for one in ended:
        history = history.after(one)
    return history


def crash(step: int, *, saved: bool = False, stepped_s: float = 1.0) -> Ended:
    return Ended("crash", step, 5, stepped_s, saved)


def loss(step: int = 5, *, steps: int = 5, saved: bool = False) -> Ended:
    return Ended("rank", step, steps, 1.0, saved)


def test_twenty_losses_in_a_row_cost_no_wait_and_never_end_the_run() -> None:
    history = after(*[loss(step=3)] * 20)
    assert history.wait_s == 0
    assert not history.is_hopeless


def test_losses_before_the_first_step_wait_longer_each_time_up_to_a_limit() -> None:
    waits = [after(*[loss(0, steps=0)] * count).wait_s for count in (1, 2, 3, 4, 50)]
    assert waits == [0, 0.5, 1.0, 2.0, 30.0]


def test_the_same_crash_three_times_ends_the_run() -> None:
    assert not after(*[crash(7)] * (CRASHES - 1)).is_hopeless
    assert after(*[crash(7)] * CRASHES).is_hopeless


def test_losses_between_crashes_do_not_hide_them() -> None:
    assert after(crash(7), loss(), crash(7), loss(), crash(7)).is_hopeless


def test_crashes_that_alternate_between_steps_end_the_run_too() -> None:
    assert after(crash(7), crash(5), crash(7), crash(5), crash(7)).is_hopeless


def test_a_new_checkpoint_forgives_earlier_crashes() -> None:
    assert not after(crash(7), crash(7), crash(9, saved=True), crash(9)).is_hopeless


def test_long_training_without_a_checkpoint_shortens_the_wait_and_forgives_nothing() -> None:
    history = after(crash(7), crash(7), crash(7, stepped_s=40.0))
    assert history.wait_s == 0
    assert history.is_hopeless


def test_what_was_asked_for_costs_no_wait_and_causes_are_counted_apart() -> None:
    history = after(loss(0, steps=0), Ended("growth", 9, 9, 1.0, True), Ended("preempted", 0, 0, 0.0, False))
    assert history.wait_s == 0
    assert history.by_cause == {"rank": 1, "growth": 1, "preempted": 1}


def test_hangs_at_one_step_are_counted_until_the_run_gets_beyond_it() -> None:
    def hang(step: int) -> Ended:
        return Ended("hang", step, 5, 1.0, False)

    assert after(hang(7), hang(7), loss(3), hang(7)).hangs == 3
    assert after(hang(7), hang(7), loss(8)).hangs == 0
    assert after(hang(7), hang(9)).hangs == 1


def test_a_clock_that_jumps_makes_no_wait_longer_than_a_cycle() -> None:
    assert until_next(started=1000.0, every_s=60.0, now=1010.0) == 50.0
    assert until_next(started=1000.0, every_s=60.0, now=999999.0) == 0.0  # it has jumped ahead
    assert until_next(started=1000.0, every_s=60.0, now=-999999.0) == 60.0  # and back
