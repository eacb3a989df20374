from pathlib import Path

import pytest

from twinhull.train.supervise import grace, memory
from twinhull.train.supervise.crew import GATHER_S, GROW_STEPS, Size


def test_the_first_start_waits_a_while_for_all_hosts_and_later_ones_do_not() -> None:
    size = Size(1, 3)
    assert size.start_with(3, 0.0, is_first=True) == 3
    assert size.start_with(2, 0.0, is_first=True) == 0
    assert size.start_with(2, GATHER_S, is_first=True) == 2
    assert size.start_with(2, 0.0, is_first=False) == 2


def test_fewer_hosts_than_the_file_allows_never_start() -> None:
    assert Size(2, 3).start_with(1, 1e9, is_first=False) == 0
    assert Size(2, 2).start_with(5, 0.0, is_first=True) == 2


def test_a_gang_starts_only_when_all_are_there_and_goes_on_with_fewer() -> None:
    size = Size(1, 2, gang=True)
    assert size.start_with(1, 1e9, is_first=True) == 0
    assert size.start_with(1, 0.0, is_first=False) == 1


def test_it_grows_when_another_host_is_there_and_the_present_ones_have_got_somewhere() -> None:
    size = Size(1, 2)
    assert size.grows(1, 2, GROW_STEPS)
    assert not size.grows(1, 2, GROW_STEPS - 1)
    assert not size.grows(2, 3, 1000)
    assert not size.grows(1, 1, 1000)


@pytest.mark.parametrize(
    ("took_s", "warning_s", "fits"),
    [(None, None, True), (2.0, None, True), (4.0, None, False), (20.0, 30.0, True), (29.0, 30.0, False)],
)
def test_a_checkpoint_must_fit_into_the_grace_and_the_grace_into_the_warning(
    took_s: float | None, warning_s: float | None, fits: bool
) -> None:
    said = grace.problem(took_s, warning_s)
    assert (said == "") is fits
    assert fits or f"{took_s:.1f} s" in said


@pytest.mark.parametrize("warning_s", [0.5, 1.0, 10.0, 30.0, 120.0, 600.0])
def test_the_grace_leaves_time_to_end_what_does_not_leave(warning_s: float) -> None:
    assert 0.4 * warning_s < grace.grace_s(warning_s) < warning_s


def test_kills_for_want_of_memory_are_counted_by_either_kind_of_cgroup(tmp_path: Path) -> None:
    one, two, none = tmp_path / "one", tmp_path / "two", tmp_path / "none"
    (one / "memory" / "job").mkdir(parents=True)
    (one / "memory" / "job" / "memory.oom_control").write_text(
        "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
    )
    (two / "job").mkdir(parents=True)
    (two / "job" / "memory.events").write_text("low 0\nhigh 3\nmax 9\noom 4\noom_kill 3\n")
    mine = tmp_path / "mine"
    mine.write_text("9:memory:/job\n3:cpuset,cpu:/\n0::/\n")
    assert memory.kills(one, mine) == 2
    assert memory.kills(none, mine) == 0
    mine.write_text("0::/job\n")
    assert memory.kills(two, mine) == 3
    assert memory.kills(two, tmp_path / "nowhere") == 0
