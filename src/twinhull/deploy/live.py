"""The live view of a run: training above, serving below, the beams between, events at the foot."""

import math
import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from twinhull.deploy import plain
from twinhull.deploy.board import Board, Serving, Training
from twinhull.deploy.record import Record

TRAINING, SERVING, BEAM = "#7b7fe8", "#3aa6a0", "#d0a048"  # indigo, teal, amber
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 36  # columns of a bar
_LINE = 62  # columns of the metrics
_MARK = {"warning": ("!", BEAM), "error": ("✗", "red"), "critical": ("✗", "red")}


def view(
    board: Board, *, name: str, url: str, deadlines: dict[str, float], height: int, now: float
) -> RenderableType:
    """The whole view. `deadlines` are the endpoints' promises in seconds; `height` the terminal's rows."""
    parts: list[RenderableType] = [_head(name, url), Text()]
    parts += [_training(job, training, now) for job, training in board.trainings.items()]
    parts.append(_beams(board))
    if board.servings or deadlines:
        parts.append(_serving(board, deadlines))
    room = max(1, min(6, height - 18))
    parts += [_event(record) for record in list(board.recent)[-room:]]
    parts += [Text(), Text("q stop   Ctrl-C stop", style="dim")]
    return Group(*parts)


def sparkline(points: Sequence[float], width: int = 24) -> str:
    """The last points as a line of blocks, the least at the bottom."""
    shown = [p for p in points if math.isfinite(p)][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    spread = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, int((p - low) / spread * 8))] for p in shown)


def bar(parts: Sequence[tuple[float, str]], width: int = _WIDTH) -> Text:
    """A stacked bar of shares; what is left of the width stays empty. Widths add up whatever is rounded."""
    total = sum(share for share, _ in parts)
    text, done, sum_so_far = Text(), 0, 0.0
    for share, style in parts:
        sum_so_far += share
        end = round(width * sum_so_far / total) if total > 0 else 0
        text.append("█" * (end - done), style=style)
        done = end
    return text.append(" " * (width - done))


def _head(name: str, url: str) -> Text:
    head = Text.assemble(("twinhull", "bold"), " up  ", (name, "bold"))
    return head.append(f"    {url}", style="dim") if url else head


def _training(job: str, training: Training, now: float) -> Panel:
    rows = _rows()
    left = _progress(training)
    rows.add_row("progress", left)
    if math.isfinite(training.step_s):
        load_s = training.data_s if math.isfinite(training.data_s) else 0.0
        rest_s = max(0.0, training.step_s - load_s)
        split = Text("  ").append("■", style=BEAM).append(f" load {load_s * 1000:.1f} ms  ")
        split.append("■", style=TRAINING).append(f" step {rest_s * 1000:.1f} ms")
        rows.add_row("step", bar([(load_s, BEAM), (rest_s, TRAINING)]).append_text(split))
    loss = Text(sparkline(training.loss), style=TRAINING)
    if training.loss:
        loss.append(f"  {training.loss[-1]:.4g}", style="bold default")
    rows.add_row("loss", loss)
    if training.metrics:
        rows.add_row("published", Text(f"v{training.version}   {_metrics(training)}"))
    if math.isfinite(training.saved_at):
        ago = Text(f"{max(0.0, now - training.saved_at):.0f} s ago")
        rows.add_row("checkpoint", ago.append(f"   saved in {training.saved_in_s:.2g} s", style="dim"))
    foot = f"{training.ranks} ranks · generation {training.generation} · torchrun"
    return _panel(rows, f"Training {job}", foot, TRAINING)


def _progress(training: Training) -> Text:
    if training.state != "training":
        return Text(training.state, style="dim")
    if not math.isfinite(training.steps_total) or training.steps_total <= 0:
        return Text(f"step {training.step:.0f}")
    share = min(1.0, training.step / training.steps_total)
    done = round(_WIDTH * share)
    text = Text("━" * done, style=TRAINING).append("━" * (_WIDTH - done), style="dim")
    text.append(f"  {share * 100:.0f} %", style="bold default")
    if math.isfinite(training.step_s):
        text.append(
            f"  {_duration((training.steps_total - training.step) * training.step_s)} left", style="dim"
        )
    return text


def _beams(board: Board) -> Text:
    text = Text("      ").append("║ ", style=BEAM).append("events ↑ ", style=BEAM)
    count = sum(waiting for waiting, _ in board.waiting.values())
    oldest = max((age for _, age in board.waiting.values()), default=0.0)
    text.append(f"{count:.0f} waiting" + (f", oldest {_duration(oldest)}" if count else ""))
    text.append("          ").append("║ ", style=BEAM).append("models ↓ ", style=BEAM)
    if not board.versions:
        return text.append("none yet", style="dim")
    return text.append(", ".join(_version(model, by) for model, by in board.versions.items()))


def _version(model: str, by_worker: dict[str, int]) -> str:
    newest = max(by_worker.values())
    have = sum(version == newest for version in by_worker.values())
    where = "every worker" if have == len(by_worker) else f"{have} of {len(by_worker)} workers"
    return f"{model} v{newest} on {where}"


def _serving(board: Board, deadlines: dict[str, float]) -> Panel:
    rows = _rows()
    for name, deadline_s in deadlines.items():
        serving = board.servings.get(name, Serving())
        rows.add_row(name if len(deadlines) > 1 else "answers", _answers(serving))
        rows.add_row("made from", _made_from(serving))
        rows.add_row("latency", _latency(serving, deadline_s))
    workers = {role for role in board.expected if role.startswith("worker:")}
    text = Text(f"{sum(role in board.alive for role in workers)} of {len(workers)}")
    if math.isfinite(board.batch):
        text.append(f"   micro-batch {board.batch:.3g}", style="dim")
    rows.add_row("workers", text)
    return _panel(rows, "Serving", "Redis streams · Celery", SERVING)


def _answers(serving: Serving) -> Text:
    text = Text(sparkline(serving.rate), style=SERVING)
    rate = serving.rate[-1] if serving.rate else 0.0
    text.append(f"  {rate:,.0f}/s", style="bold default")
    return text.append(f"   {serving.failed:.0f} failed", style="red" if serving.failed else "dim")


def _made_from(serving: Serving) -> Text:
    total = serving.fresh + serving.cached + serving.default + serving.failed
    if not total:
        return Text("nothing asked yet", style="dim")
    shares = [
        (serving.fresh, SERVING),
        (serving.cached, "#2c6f6b"),
        (serving.default, BEAM),
        (serving.failed, "red"),
    ]
    text = bar(shares).append(f"  {serving.fresh / total * 100:.1f} % fresh", style="bold default")
    return text.append(f", {serving.cached:.0f} cached, {serving.default:.0f} default", style="dim")


def _latency(serving: Serving, deadline_s: float) -> Text:
    if not math.isfinite(serving.p99_s):
        return Text(f"promise {_duration(deadline_s)}", style="dim")
    text = Text(f"p50 {_duration(serving.p50_s)}   ")
    text.append(f"p99 {_duration(serving.p99_s)}", style="red" if serving.p99_s > deadline_s else "default")
    return text.append(f"   promise {_duration(deadline_s)}   {serving.late:.0f} late", style="dim")


def _event(record: Record) -> Text:
    mark, style = _MARK.get(record.level, ("✓", "green"))
    clock = time.strftime("%H:%M:%S", time.localtime(record.t))
    text = Text(f"{clock}  ", style="dim", no_wrap=True, overflow="ellipsis").append(f"{mark} ", style=style)
    return text.append(f"{record.role} {record.kind} ").append(
        plain.facts(record).split("\n")[0], style="dim"
    )


def _metrics(training: Training) -> str:
    shown = "  ".join(f"{k} {v:.3g}" for k, v in training.metrics.items() if isinstance(v, int | float))
    return shown if len(shown) <= _LINE else shown[: _LINE - 1] + "…"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    if seconds < 1.0:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _rows() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", width=11)
    table.add_column(no_wrap=True, overflow="ellipsis")
    return table


def _panel(rows: Table, title: str, foot: str, style: str) -> Panel:
    return Panel(
        rows,
        title=Text(title, style="bold"),
        title_align="left",
        subtitle=Text(foot, style="dim"),
        subtitle_align="right",
        border_style=style,
    )
