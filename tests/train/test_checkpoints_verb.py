"""`twinhull checkpoints ls|verify|prune`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from twinhull.errors import TwinhullError
from twinhull.rundir import RunDirectory, default_for
from twinhull.train.checkpoints.inventory import main
from twinhull.train.checkpoints.keep import Keeper
from twinhull.train.checkpoints.manifest import Place
from twinhull.train.checkpoints.remote import Remote
from twinhull.train.group import Group
from twinhull.train.job import Job

SYSTEM = "name: shop\nworkloads: {fit: {train: app:fit}, tune: {train: app:tune}}\n"


def save(run: Path, *steps: int, train: str = "fit", url: str = "") -> None:
    for step in steps:
        job = Job(name=train, directory=run, keep=99, checkpoints=url)
        keeper = Keeper(job, Group(0, 1, torch.device("cpu")))
        keeper.add(torch.nn.Linear(8, 8), "Linear")
        keeper.save(Place(step=step), required=True)
        keeper.settle()


def damage(run: Path, step: int, file: str = "__0_0.distcp") -> None:
    path = run / "checkpoints" / "fit" / f"step-{step:09d}" / file
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def verb(action: Any, run: Path | None, file: Path | None = None, **said: Any) -> int:
    defaults: dict[str, Any] = {"train": None, "keep": None, "fmt": "text"}
    return main(action, file, run=run, **(defaults | said))


def test_ls_shows_what_is_there_newest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1, 2)
    assert verb("ls", tmp_path) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["train", "step", "cycle", "age", "size", "ranks", "took", "whole"]
    assert [(line[0], line[1], line[-1]) for line in lines[1:]] == [("fit", "2", "yes"), ("fit", "1", "yes")]


def test_ls_sees_what_is_missing_without_reading_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1)
    (tmp_path / "checkpoints/fit/step-000000001/state.pt").unlink()
    assert verb("ls", tmp_path) == 0
    assert "state.pt is missing" in capsys.readouterr().out


def test_json_has_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 7)
    verb("ls", tmp_path, fmt="json")
    [found] = json.loads(capsys.readouterr().out)
    assert (found["train"], found["step"], found["ranks"], found["whole"]) == ("fit", 7, 1, True)
    assert found["bytes"] > 256


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "state.pt", "manifest.json"])
def test_verify_names_the_damaged_file_and_why_and_leaves_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    save(tmp_path, 1, 2)
    assert verb("verify", tmp_path) == 0
    damage(tmp_path, 1, file)
    capsys.readouterr()
    assert verb("verify", tmp_path) == 1
    good, bad = capsys.readouterr().out.splitlines()[1:]
    assert good.endswith("yes")
    assert file in bad


def test_prune_leaves_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1, 2, 3)
    assert verb("prune", tmp_path, keep=2) == 0
    assert "fit step-000000001: removed" in capsys.readouterr().out
    assert sorted(path.name[-1] for path in (tmp_path / "checkpoints/fit").glob("step-*")) == ["2", "3"]


def test_prune_never_removes_the_newest_that_verifies(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    damage(tmp_path, 3)
    verb("prune", tmp_path, keep=1)
    assert sorted(path.name[-1] for path in (tmp_path / "checkpoints/fit").glob("step-*")) == ["2", "3"]


def test_prune_needs_a_number(tmp_path: Path) -> None:
    with pytest.raises(TwinhullError, match="--keep N"):
        verb("prune", tmp_path)


def test_a_system_file_finds_its_run_directory_and_all_its_workloads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text(SYSTEM)
    run = default_for(file, "shop").root
    save(run, 1)
    save(run, 2, train="tune")
    verb("ls", None, file)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["fit", "tune"]
    verb("ls", None, file, train="tune")
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["tune"]
    with pytest.raises(TwinhullError, match=r"no training workload tone .* Known: fit, tune"):
        verb("ls", None, file, train="tone")


def test_without_a_file_or_a_run_directory_nobody_knows_whose(tmp_path: Path) -> None:
    with pytest.raises(TwinhullError, match="whose checkpoints"):
        verb("ls", None)


def test_all_of_it_works_behind_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/away"
    run = RunDirectory(tmp_path / "run")
    run.root.mkdir()
    run.system.write_text(f"{SYSTEM}components: {{checkpoints: {{url: '{url}'}}}}\n")
    save(run.root, 1, 2, 3, url=url)
    assert (verb("ls", run.root), verb("verify", run.root)) == (0, 0)
    Remote(f"{url}/fit").write("step-000000003", "__0_0.distcp", b"x")
    assert verb("verify", run.root) == 1
    verb("prune", run.root, keep=1)
    assert Remote(f"{url}/fit").names() == ["step-000000003", "step-000000002"]
    assert "__0_0.distcp has 1 bytes instead of" in capsys.readouterr().out


def test_no_checkpoints_are_said_to_be_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb("ls", tmp_path) == 0
    assert capsys.readouterr().out == "There are no checkpoints.\n"


def test_listing_needs_no_engine(tmp_path: Path) -> None:
    save(tmp_path, 1)
    code = "import sys\nfrom twinhull.cli import app\napp(sys.argv[1:])\nprint('torch' in sys.modules)"
    argv = [sys.executable, "-c", code, "checkpoints", "verify", "--run", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
