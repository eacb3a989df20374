import io

import pytest
from inline_snapshot import snapshot
from rich.console import Console

from twinhull.deploy.board import Board
from twinhull.deploy.live import bar, sparkline, view
from twinhull.deploy.record import Record


def drawn(board: Board, width: int = 92) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    with console.capture() as capture:
        console.print(
            view(
                board,
                name="shop",
                url="http://127.0.0.1:7474",
                deadlines={"recommend": 0.2},
                height=40,
                now=9.0,
            )
        )
    return "\n".join(line.rstrip() for line in capture.get().split("\n"))


def board_after(*records: Record) -> Board:
    board = Board()
    started = [Record(0.0, "up", "started", facts={"process": f"worker:web-{n}", "pid": n}) for n in (0, 1)]
    for record in (*started, Record(0.0, "up", "lost", facts={"process": "worker:web-1"}), *records):
        board.hear(record)
    return board


def test_before_anything_happened_the_view_says_so() -> None:
    board = board_after()
    board.recent.clear()
    assert drawn(board) == snapshot("""\
twinhull up  shop    http://127.0.0.1:7474

      ║ events ↑ 0 waiting          ║ models ↓ none yet
╭─ Serving ────────────────────────────────────────────────────────────────────────────────╮
│ answers        0/s   0 failed                                                            │
│ made from    nothing asked yet                                                           │
│ latency      promise 200 ms                                                              │
│ workers      1 of 2                                                                      │
╰───────────────────────────────────────────────────────────────── Redis streams · Celery ─╯

q stop   Ctrl-C stop
""")


def test_a_running_system_shows_both_planes_and_the_beams() -> None:
    training = {"train.fit.step": 600, "train.fit.steps_total": 1200, "train.fit.step_s": 0.02}
    board = board_after(
        Record(0.0, "train:fit", "generation started", facts={"generation": 2, "ranks": 2}),
        Record(1.0, "rank:fit-0", "", sample={**training, "train.fit.data_s": 0.005, "train.fit.loss": 7.0}),
        Record(2.0, "rank:fit-0", "", sample={"train.fit.loss": 6.5}),
        Record(
            3.0, "rank:fit-0", "published", facts={"model": "fit", "version": 3, "metrics": {"recall": 0.077}}
        ),
        Record(4.0, "worker:web-0", "swapped", facts={"model": "fit", "version": 3}),
        Record(5.0, "gateway", "", sample={"serve.recommend.asked": 0}),
        Record(6.0, "gateway", "", sample={"serve.recommend.asked": 150, "serve.recommend.fresh": 140}),
        Record(6.0, "gateway", "", sample={"serve.recommend.cached": 10, "serve.recommend.p50_s": 0.004}),
        Record(6.0, "gateway", "", sample={"serve.recommend.p99_s": 0.02, "events.purchase.waiting": 18}),
    )
    board.recent.clear()  # the clock of events is local time
    assert drawn(board) == snapshot("""\
twinhull up  shop    http://127.0.0.1:7474

╭─ Training fit ───────────────────────────────────────────────────────────────────────────╮
│ progress     ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  50 %  12 s left                       │
│ step         ████████████████████████████████████  ■ load 5.0 ms  ■ step 15.0 ms         │
│ loss         █▁  6.5                                                                     │
│ published    v3   recall 0.077                                                           │
╰────────────────────────────────────────────────────── 2 ranks · generation 2 · torchrun ─╯
      ║ events ↑ 18 waiting, oldest 0 ms          ║ models ↓ fit v3 on every worker
╭─ Serving ────────────────────────────────────────────────────────────────────────────────╮
│ answers      ▁  150/s   0 failed                                                         │
│ made from    ████████████████████████████████████  93.3 % fresh, 10 cached, 0 default    │
│ latency      p50 4 ms   p99 20 ms   promise 200 ms   0 late                              │
│ workers      1 of 2                                                                      │
╰───────────────────────────────────────────────────────────────── Redis streams · Celery ─╯

q stop   Ctrl-C stop
""")


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [("ended", 0, "done"), ("ended", 75, "stopped and saved"), ("ended", 1, "failed"), ("lost", -9, "lost")],
)
def test_the_view_says_what_has_become_of_training(kind: str, code: int, said: str) -> None:
    end = Record(1.0, "up", kind, facts={"process": "train:fit", "exit": code})
    assert f"progress     {said}" in drawn(board_after(end))


def test_the_parts_of_a_bar_always_fill_its_width() -> None:
    for parts in ([(1.0, "red")] * 3, [(0.0, "red")], [(1e-9, "red"), (1.0, "blue")], []):
        assert len(bar(parts, 10).plain) == 10


def test_a_sparkline_spans_least_to_most_and_takes_anything() -> None:
    assert sparkline([1.0, 2.0, 3.0]) == "▁▅█"
    assert sparkline([5.0]) == "▁"
    assert sparkline([]) == ""
    assert sparkline([float("nan"), float("inf")]) == ""
