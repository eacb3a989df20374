import os
import tempfile
from pathlib import Path

import pytest

from twinhull.train.supervise import scratch


def test_what_a_killed_one_has_left_goes_and_what_is_held_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, held = scratch.make()
    left, let_go = scratch.make()
    young, let_go_too = scratch.make()
    for one in (first, left):
        os.utime(one / "lock", (0, 0))
    let_go.close()
    let_go_too.close()
    last, held_too = scratch.make()
    assert sorted(tmp_path.iterdir()) == sorted([first, young, last])
    assert not left.exists()
    held.close()
    held_too.close()
