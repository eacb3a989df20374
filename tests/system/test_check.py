import json
import subprocess
import sys
from pathlib import Path

import pytest

from twinhull.system.check import check
from twinhull.system.load import load_text
from twinhull.system.runnable import missing

FILES = Path(__file__).parent / "files"


def test_a_sound_file_is_told_in_one_line(capsys: pytest.CaptureFixture[str]):
    assert check(FILES / "shop.yaml") == 0
    promise = "recommend: 200 ms, 2000/s, fresh > cache > app:best_sellers"
    said = f"shop: 1 training job, 2 tasks, 1 endpoint ({promise}), 3 pools"
    assert capsys.readouterr().out == f"{FILES / 'shop.yaml'}: {said}\n"


def test_a_broken_file_is_told_problem_by_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "x.yaml").write_text("name: x\npool: {}\nbudget: 5")
    assert check(tmp_path / "x.yaml") == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.removeprefix(str(tmp_path)).split("  ")[0] for line in lines] == [
        "/x.yaml:2:1",
        "/x.yaml:3:9",
    ]


def test_json_has_the_places_of_all_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "x.yaml").write_text("name: x\npool: {}")
    assert check(tmp_path / "x.yaml", "json") == 2
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert [(one["line"], one["col"], one["path"]) for one in report["problems"]] == [(2, 1, "pool")]


def test_json_has_the_whole_system_with_its_origins(capsys: pytest.CaptureFixture[str]):
    assert check(FILES / "shop.yaml", "json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["system"]["components"]["fit"]["checkpoint"]["every"] == "10 min"
    assert report["origins"]["components.broker.replicas"]["how"] == "default"
    assert report["up_needs"] == []


def test_what_up_would_lack_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "x.yaml").write_text("name: x\nworkloads: {a: {task: m:a}}\nendpoints: {e: {path: [a]}}")
    assert check(tmp_path / "x.yaml") == 0
    assert "; up needs the pool that a runs in (and 1 more)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("name: x", ["a workload, for example rank: {task: app:rank, pool: web}"]),
        ("name: x\npools: {p: {}}\nworkloads: {a: {task: m:a, pool: p}}", []),
        ("name: x\npools: {p: {}}\nworkloads: {a: {train: m:a}}", ["the pool that a runs in"]),
        (
            "name: x\ncomponents: {a: {kind: task}}",
            ["the function of a, as module:function", "the pool that a runs in"],
        ),
        (
            "name: x\npools: {p: {}}\nworkloads: {a: {task: m:a, pool: p}}\n"
            "endpoints: {e: {deadline: never}}",
            ["the path of endpoint e", "a deadline, for example 200 ms, of endpoint e"],
        ),
        (
            "name: x\npools: {p: {}}\nworkloads: {a: {task: m:a, pool: p}}\n"
            "components: {s: {kind: service}}\nendpoints: {e: {deadline: 1 s, path: [s], fallback: [s]}}",
            [
                "a task instead of the service s in the path of endpoint e",
                "cache or module:function instead of s in the fallback of endpoint e",
            ],
        ),
    ],
)
def test_up_needs_a_function_a_pool_a_path_and_a_deadline(text: str, lacks: list[str]):
    assert missing(load_text(text, Path("x.yaml")).system) == lacks


def test_a_task_may_run_in_the_pool_of_its_host():
    parts = "w: {kind: worker, pool: p}, t: {kind: task, host: w, run: m:t}"
    text = f"name: x\npools: {{p: {{}}}}\ncomponents: {{{parts}}}"
    assert missing(load_text(text, Path("x.yaml")).system) == []


def test_a_name_that_the_terminal_cannot_show_is_escaped(tmp_path: Path):
    (tmp_path / "x.yaml").write_text("name: 売店", encoding="utf-8")
    code = "import sys, twinhull.system.check as c; from pathlib import Path; c.check(Path(sys.argv[1]))"
    environment = {"PYTHONIOENCODING": "ascii", "PATH": ""}
    command = [sys.executable, "-c", code, tmp_path / "x.yaml"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert '"\\u58f2\\u5e97" is not a name' in done.stdout


def test_checking_imports_no_engine():
    code = "import sys, twinhull.system.check as c; from pathlib import Path; c.check(Path(sys.argv[1]));" + (
        "print({'torch', 'numpy', 'redis', 'celery', 'networkx', 'starlette'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, FILES / "shop.yaml"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"
