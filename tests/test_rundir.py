import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from twinhull.errors import RunInUse, TwinhullError
from twinhull.rundir import RunDirectory, default_for, write_whole

HOLDER = """
import subprocess, sys
from pathlib import Path
from twinhull.rundir import RunDirectory
with RunDirectory(Path(sys.argv[1])).held():
    child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    sys.stdin.read()
child.kill()
child.wait()
"""


@contextmanager
def holder(run: RunDirectory) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """Another process that holds the run and has a child, as a supervisor does."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, run.root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    try:
        yield process, child
    finally:
        process.kill()
        process.communicate()
        if child.is_running():
            child.kill()


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def test_a_run_is_made_with_all_its_places_and_nothing_else(run):
    run.create()
    assert {path.name for path in run.root.iterdir()} == {
        "broker",
        "checkpoints",
        "registry",
        "logs",
        "holds",
    }


def test_everything_a_run_knows_lies_under_its_root(run):
    places = [
        getattr(run, name) for name in vars(RunDirectory) if isinstance(vars(RunDirectory)[name], property)
    ]
    assert len(places) >= 9
    assert len(set(places)) == len(places)
    assert all(place.parent == run.root for place in places)


@pytest.mark.parametrize("below", [".", "below", "broker"])
def test_a_file_in_place_of_a_directory_is_one_clear_error(tmp_path, below):
    root = tmp_path / "run"
    if below == "broker":
        root.mkdir()
        (root / "broker").write_text("")
    else:
        root.write_text("mine")
    with pytest.raises(TwinhullError, match=r"cannot be written: .*Choose another with --run DIR"):
        RunDirectory(root if below != "below" else root / "below").create()
    assert below == "broker" or root.read_text() == "mine"


def test_a_link_to_nowhere_is_one_clear_error(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "nowhere" / "at" / "all")
    with pytest.raises(TwinhullError, match="cannot be written"):
        RunDirectory(tmp_path / "run").create()


def test_a_directory_that_even_root_cannot_write_is_one_clear_error():
    with pytest.raises(TwinhullError, match="cannot be written"):
        RunDirectory(Path("/proc/twinhull")).create()


def test_a_name_too_long_is_one_clear_error(tmp_path):
    with pytest.raises(TwinhullError, match="File name too long"):
        RunDirectory(tmp_path / ("x" * 300)).create()


def test_a_disk_without_room_is_noticed_at_the_start(tmp_path):
    code = """
import resource, sys
from pathlib import Path
from twinhull.errors import TwinhullError
from twinhull.rundir import RunDirectory
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    RunDirectory(Path(sys.argv[1])).create()
except TwinhullError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "run"], capture_output=True, text=True, check=True
    )
    assert "cannot be written: File too large" in done.stdout


@pytest.mark.live
def test_a_second_holder_is_told_who_the_first_is(run):
    with holder(run) as (first, _):
        with pytest.raises(RunInUse, match=f"is in use by process {first.pid}") as caught, run.held():
            pass
        assert caught.value.exit_code == 2
        first.communicate("")
        with run.held():
            assert run.lock.read_text() == str(os.getpid())


@pytest.mark.live
def test_a_holder_killed_with_children_left_holds_no_more(run):
    with holder(run) as (first, child):
        first.kill()
        first.wait()
        assert child.is_running()
        assert run.lock.read_text() == str(first.pid)
        with run.held():
            assert run.lock.read_text() == str(os.getpid())


def test_a_process_cannot_hold_a_run_twice_and_still_holds_it_after_trying(run):
    with run.held():
        for _ in range(2):
            with pytest.raises(RunInUse), run.held():
                pass


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_a_run_is_let_go_and_names_nobody_however_the_block_ends(run, error):
    if error is None:
        with run.held():
            pass
    else:
        with pytest.raises(error), run.held():
            raise error
    assert run.lock.read_text() == ""
    with run.held():
        pass


def test_a_lock_file_full_of_junk_is_as_good_as_any(run):
    run.lock.write_bytes(b"\xff\xfe junk" * 1000)
    with run.held():
        assert run.lock.read_text() == str(os.getpid())
        run.lock.write_bytes(b"\xff\xfe")
        with pytest.raises(RunInUse, match="is in use by process"), run.held():
            pass


def test_a_lock_that_cannot_be_opened_is_one_clear_error(run):
    run.lock.mkdir()
    with pytest.raises(TwinhullError, match="cannot be locked"), run.held():
        pass


def test_holding_a_run_that_was_never_made_is_one_clear_error(tmp_path):
    with pytest.raises(TwinhullError, match="cannot be locked"), RunDirectory(tmp_path / "none").held():
        pass


def test_the_default_lies_beside_the_file_wherever_one_stands(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert default_for(Path("../shop.yaml"), "shop").root == tmp_path / ".twinhull" / "shop"


def test_a_small_file_is_replaced_whole(tmp_path):
    path = tmp_path / "up.json"
    write_whole(path, "old")
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
