import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from twinhull.serve import wire
from twinhull.serve.function import NO_MODEL, Function


@dataclass
class Row:
    user: int
    taste: np.ndarray


class Model:
    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale


calls: list[int] = []


def add(left: int, right: int = 1) -> int:
    return left + right


def whole(**body: Any) -> int:
    return len(body)


def rank(rows: list[Row], *, model: Model) -> list[float]:
    calls.append(len(rows))
    if any(row.user == 13 for row in rows):
        raise ValueError("thirteen")
    return [row.user * model.scale for row in rows]


def short(rows: list[int]) -> list[int]:
    return rows[1:]


def texts(rows: list[int]) -> Any:
    return "x" * len(rows)


def arrays(rows: list[int]) -> np.ndarray:
    return np.ones((len(rows), 2))


def pairs(rows: list[tuple[int, int]]) -> list[int]:
    return [left * right for left, right in rows]


def unsendable(number: int) -> object:
    return object() if number == 13 else number


def leaves(number: int) -> int:
    if number == 13:
        sys.exit("bye")
    return number


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch):
    made = ModuleType("functions_under_test")
    made.__dict__.update(globals())
    monkeypatch.setitem(sys.modules, "functions_under_test", made)
    calls.clear()


def function(name: str, *, batch: bool = False) -> Function:
    return Function(f"functions_under_test:{name}", batch=batch)


def opened(
    name: str, rows: list[Any], outputs: int, model: object = None
) -> tuple[list[Any], dict[int, str]]:
    outcome = function(name).answer(rows, outputs, model)
    return [None if row is None else wire.decode(row) for row in outcome.rows], outcome.errors


def test_a_body_is_passed_as_keyword_arguments():
    assert opened("add", [{"left": 1}, {"left": 1, "right": 5}], 0) == ([2, 6], {})


def test_fields_that_another_task_of_the_stage_takes_are_left_out():
    assert opened("add", [{"left": 1, "other": 9}], 0) == ([2], {})
    assert opened("whole", [{"left": 1, "other": 9}], 0) == ([2], {})


def test_an_output_is_passed_as_the_first_argument_and_several_as_several():
    assert opened("add", [4], 1) == ([5], {})
    assert opened("add", [[4, 5]], 2) == ([9], {})


def test_rows_are_passed_together_as_the_type_that_is_asked_for():
    rows = [{"user": 1, "taste": np.ones(2)}, {"user": 2, "taste": np.ones(2)}]
    assert opened("rank", rows, 1, Model()) == ([2.0, 4.0], {})
    assert calls == [2]


def test_a_row_that_raises_fails_alone():
    rows = [{"user": user, "taste": np.ones(2)} for user in (1, 13, 3)]
    assert opened("rank", rows, 1, Model()) == ([2.0, None, 6.0], {1: "ValueError: thirteen"})


def test_a_row_of_a_wrong_type_fails_alone_and_its_neighbours_stay_together():
    rows = [
        {"user": 1, "taste": np.ones(2)},
        {"user": "x", "taste": np.ones(2)},
        {"user": 3, "taste": np.ones(2)},
    ]
    answers, errors = opened("rank", rows, 1, Model())
    assert answers == [2.0, None, 6.0]
    assert "Expected `int`, got `str` - at `$.user`" in errors[1]
    assert calls == [2]


def test_without_a_model_no_row_is_answered():
    rows = [{"user": 1, "taste": np.ones(2)}]
    assert opened("rank", rows, 1, None) == ([None], {0: NO_MODEL})


def test_a_list_of_another_length_fails_every_row():
    answers, errors = opened("short", [1, 2], 1)
    assert answers == [None, None]
    assert errors[0] == "ValueError: functions_under_test:short returned 0 answers for 1 rows"


def test_a_text_is_no_list_of_answers():
    assert "returned a str, not a list" in opened("texts", [1, 2], 1)[1][0]


def test_an_array_of_answers_is_one_per_row():
    answers, errors = opened("arrays", [1, 2], 1)
    assert [answer.tolist() for answer in answers] == [[1.0, 1.0], [1.0, 1.0]]
    assert errors == {}


def test_rows_of_several_outputs_are_tuples():
    assert opened("pairs", [[2, 3], [4, 5]], 2) == ([6, 20], {})


def test_an_answer_that_cannot_travel_fails_alone():
    answers, errors = opened("unsendable", [{"number": 1}, {"number": 13}], 0)
    assert answers == [1, None]
    assert errors == {1: "TypeError: a object cannot travel between tasks"}


def test_a_function_that_leaves_the_process_only_fails_its_row():
    assert opened("leaves", [{"number": 13}, {"number": 1}], 0) == ([None, 1], {0: "SystemExit: bye"})
