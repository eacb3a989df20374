import pytest

from twinhull.deploy.board import Board
from twinhull.deploy.record import Record


def test_jobs_whose_names_end_in_numbers_are_not_taken_for_each_other() -> None:
    board = Board()
    board.hear(Record(0.0, "train:fit", "generation started", facts={"generation": 1, "ranks": 2}))
    board.hear(Record(1.0, "train:fit-2", "generation started", facts={"generation": 5, "ranks": 4}))
    board.hear(Record(2.0, "rank:fit-2-0", "published", facts={"version": 7}))
    assert {name: (t.generation, t.version) for name, t in board.trainings.items()} == {
        "fit": (1, None),
        "fit-2": (5, 7),
    }


def test_a_rank_that_speaks_first_is_heard_as_its_job() -> None:
    board = Board()
    board.hear(Record(0.0, "rank:fit-0", "checkpoint saved", facts={"took_s": 0.5}))
    assert board.trainings["fit"].saved_in_s == 0.5


@pytest.mark.parametrize(
    "kind", ["published", "swapped", "started", "generation started", "checkpoint saved"]
)
@pytest.mark.parametrize("role", ["rank:fit-0", "worker:web-0", "up", "train:fit", "gateway"])
@pytest.mark.parametrize(
    "facts", [{}, {"version": "new", "model": None, "process": 3, "pid": [], "took_s": {}}]
)
def test_a_user_s_event_with_our_words_but_not_our_facts_is_shown_and_harms_nothing(
    kind: str, role: str, facts: dict[str, object]
) -> None:
    board = Board()
    board.hear(Record(0.0, role, kind, "warning", facts))
    assert [record.kind for record in board.recent] == [kind]


def test_who_was_started_and_not_lost_is_alive() -> None:
    board = Board()
    for process in ("gateway", "worker:web-0"):
        board.hear(Record(0.0, "up", "started", facts={"process": process, "pid": 1}))
    board.hear(Record(1.0, "up", "lost", facts={"process": "gateway", "exit": -9}))
    assert (set(board.alive), board.expected) == ({"worker:web-0"}, {"gateway", "worker:web-0"})
