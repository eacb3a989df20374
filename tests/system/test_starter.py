import os
import subprocess
import sys
from pathlib import Path

import pytest

from twinhull.errors import TwinhullError
from twinhull.system.load import load
from twinhull.system.runnable import missing
from twinhull.system.starter import init


def test_the_starter_is_ready_for_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert init(tmp_path / "new" / "one") == 0
    assert missing(load(tmp_path / "new" / "one" / "delivery.yaml").system) == []
    assert "twinhull up delivery.yaml" in capsys.readouterr().out


@pytest.mark.timeout(120)
@pytest.mark.live
def test_the_tests_of_the_starter_pass(tmp_path: Path):
    init(tmp_path)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:valkey",
        "-W",
        "error",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "3 passed" in done.stdout) == (0, True), done.stdout + done.stderr


def test_nothing_is_ever_overwritten(tmp_path: Path):
    (tmp_path / "app.py").write_text("mine")
    with pytest.raises(TwinhullError, match=r"has app\.py already, and nothing is overwritten"):
        init(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["app.py"]
    assert (tmp_path / "app.py").read_text() == "mine"


def test_a_directory_that_cannot_be_made_is_one_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TwinhullError, match="cannot be written"):
        init(tmp_path / "file" / "inside")
