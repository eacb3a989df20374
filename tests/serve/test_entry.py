import json
import subprocess
import sys
from pathlib import Path

import pytest

from twinhull.errors import UserCodeError
from twinhull.serve import entry

CODE = """
from dataclasses import dataclass, field
from typing import Optional, TYPE_CHECKING
if TYPE_CHECKING:
    from nowhere import Ghost

print("hello from the user's module")

class Model: ...

@dataclass
class Row:
    user: int
    tags: list[str] = field(default_factory=list)

def scalars(
    a: int, b: float, c: str, d: bool, e: Optional[int] = None, f: list[int] = [], g: dict[str, float] = {}
): ...
def rank(rows: list[Row], *, model: Model) -> list: ...
def bare(rows): ...
def users(users: list[int]): ...
def anything(**body): ...
def ghost(thing: "Ghost"): ...
def either(a: "int | str", b: "int | list[int] | None", c: "list[int] | list[str]"): ...
def no_class(rows, model): ...
async def later(a: int): ...
number = 3
"""


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "user_code.py").write_text(CODE)
    (tmp_path / "user_breaks.py").write_text("import json\n1 / 0\n")
    (tmp_path / "user_imports.py").write_text("import not_installed_at_all\n")
    (tmp_path / "user_types.py").write_text("def (:\n")
    (tmp_path / "user_leaves.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("user_")]:
        del sys.modules[name]


def types(run: str) -> dict[str, object]:
    return {p["name"]: p["type"] for p in entry.describe(run)["parameters"] or []}


def test_parameters_are_told_with_type_and_need():
    told = entry.describe("user_code:scalars")
    assert types("user_code:scalars") == {
        "a": "int", "b": "float", "c": "str", "d": "bool",
        "e": ["either", "int", "null"], "f": ["list", "int"], "g": ["dict", "float"],
    }  # fmt: skip
    assert [p["name"] for p in told["parameters"] or [] if p["required"]] == ["a", "b", "c", "d"]
    assert (told["rows"], told["model"]) == (False, None)


def test_a_function_of_rows_tells_the_fields_of_a_row_and_its_model():
    told = entry.describe("user_code:rank")
    assert told["rows"] is True
    assert told["row"] == [
        {"name": "user", "type": "int", "required": True},
        {"name": "tags", "type": ["list", "str"], "required": False},
    ]
    assert told["model"] == "user_code:Model"


@pytest.mark.parametrize("run", ["user_code:bare", "user_code:users"])
def test_whether_it_takes_rows_may_depend_on_the_file(run: str):
    assert entry.describe(run)["rows"] is None
    parameters = entry.parameters_of(run, entry.load(run))
    assert entry.takes_rows(parameters, batch=True)
    assert not entry.takes_rows(parameters, batch=False)


def test_a_function_of_any_keywords_accepts_any_object():
    assert entry.describe("user_code:anything")["parameters"] is None


def test_a_type_that_is_not_there_at_run_time_is_any():
    assert types("user_code:ghost") == {"thing": "any"}


def test_unions_are_kept_where_json_can_tell_the_members_apart():
    assert types("user_code:either") == {
        "a": ["either", "int", "str"],
        "b": ["either", "int", ["list", "int"], "null"],
        "c": "any",
    }


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (
            "user_nowhere:f",
            "there is no module 'user_nowhere'. Modules are looked for beside the system file.",
        ),
        ("user_code:rnak", "user_code has no 'rnak'."),
        ("user_code:number", "number is a int, not a function."),
        ("user_code:later", "later is not a plain function."),
        ("user_code:no_class", "the class of its parameter model is not known (not annotated)."),
        ("user_breaks:f", "importing user_breaks raised ZeroDivisionError: division by zero. See"),
        ("user_imports:f", "importing user_imports failed: No module named 'not_installed_at_all'. See"),
        ("user_types:f", "importing user_types raised SyntaxError"),
        ("user_leaves:f", "importing user_leaves raised SystemExit: 3. See"),
    ],
)
def test_what_cannot_be_a_task_is_one_clear_error(run: str, said: str):
    with pytest.raises(UserCodeError) as caught:
        entry.describe(run)
    assert said in str(caught.value)


@pytest.mark.live
def test_the_command_prints_one_json_object_whatever_the_user_prints(tmp_path: Path):
    command = [sys.executable, "-m", "twinhull.serve.entry", "--run", str(tmp_path), "user_code:rank"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert list(json.loads(done.stdout)) == ["user_code:rank"]


@pytest.mark.live
def test_the_command_ends_with_2_and_the_place_of_the_users_mistake(tmp_path: Path):
    command = [sys.executable, "-m", "twinhull.serve.entry", "--run", str(tmp_path), "user_breaks:f"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 2
    assert json.loads(done.stdout)["hint"] == f"See {tmp_path}/user_breaks.py:2."
