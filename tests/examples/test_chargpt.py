"""The character GPT: its text, and what it learns of it on two ranks under FSDP."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chargpt.text import WINDOW, Text, Windows, bigram_loss, made_up

CHARGPT = Path(__file__).parents[2] / "examples" / "chargpt"
SHAKESPEARE = Path(__file__).parents[3] / "shared" / "data" / "tinyshakespeare.txt"


def test_a_window_is_so_many_characters_and_the_one_after_each() -> None:
    text = Text.of("abcd" * 500)
    windows = Windows(text.train)
    first = windows[0]
    assert len(first) == WINDOW + 1
    assert "".join(text.alphabet[number] for number in first) == ("abcd" * 99)[: WINDOW + 1]
    assert windows.__getitems__([0, 1]).shape == (2, WINDOW + 1)
    assert len(windows[len(windows) - 1]) == WINDOW + 1


def test_pairs_tell_nothing_of_characters_that_come_by_chance_and_all_of_a_pattern() -> None:
    assert bigram_loss(Text.of("ab" * 50_000)) < 0.001
    assert bigram_loss(Text.of(made_up(num_words=5_000))) > 1.0


@pytest.mark.parametrize(("content", "told"), [(None, "cannot be read"), ("too short", "has 9 characters")])
def test_a_text_that_will_not_do_is_told_in_one_line(tmp_path: Path, content: str | None, told: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match=told):
        Text.read(path)


@pytest.mark.live
@pytest.mark.timeout(120)
@pytest.mark.skipif(not SHAKESPEARE.exists(), reason=f"{SHAKESPEARE.name} is not at hand")
def test_a_hundred_steps_under_fsdp_beat_the_best_guess_from_one_character(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["-m", "chargpt.fit", "--text", str(SHAKESPEARE), "--steps", "100", "--engine", "fsdp"]
    env = {**os.environ, "PYTHONPATH": str(CHARGPT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*torchrun, *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    first, second = done.stdout.strip().splitlines()[-2:]
    loss, pairs = float(first.split()[1]), float(second.split()[0])
    assert math.isclose(pairs, 2.48, abs_tol=0.01)
    assert loss < pairs
