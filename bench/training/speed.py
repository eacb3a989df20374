"""What does our loop cost? A step and a checkpoint, each in turns with what a hand would write."""

import statistics
from pathlib import Path

from report import Result
from training import pairs


def loop(_: Path) -> list[Result]:
    """A step of ours against the same step by hand, in turns on the same two ranks."""
    seconds = pairs.turns()
    low, middle, high = pairs.ratio(seconds["ours"], seconds["hand"])
    _low, self_middle, _high = pairs.ratio(seconds["hand again"], seconds["hand"])
    spread = pairs.spread(seconds["hand again"], seconds["hand"])
    step_ms = 1000 * statistics.median(seconds["hand"])
    return [
        Result("step, ours to by hand, 95 % from", low, "ratio", None, f"{step_ms:.1f} ms a step by hand"),
        Result("step, ours to by hand", middle, "ratio", None, f"by hand to itself {self_middle:.4f}"),
        Result("step, ours to by hand, 95 % to", high, "ratio"),
        Result(
            "the interval less the spread of by hand",
            low - spread,
            "ratio",
            "<= 1.01",
            f"spread {spread:.4f}",
        ),
    ]


def stall(_: Path) -> list[Result]:
    """What a checkpoint of 214 MB costs the loop, beside torch.save of the same state in the same run."""
    from training.stall import measure, slow_down

    found = measure()
    ratios = [ours / plain for ours, plain in zip(found.stall, found.plain, strict=True)]
    all_ms = [1000 * statistics.median(s) for s in (found.plain, found.stall, found.quiet_step)]
    plain_ms, stall_ms, quiet_ms = all_ms
    return [
        Result("checkpoint stall", stall_ms, "ms", None, f"torch.save {plain_ms:.0f} ms"),
        Result("checkpoint stall, torch.save to ours", 1 / statistics.median(ratios), "times", ">= 20",
               f"worst {1 / max(ratios):.0f}, aim 60"),
        Result("a step while it is written", slow_down(found), "times", None,
               f"{len(found.writing_step)} steps, {quiet_ms:.0f} ms when quiet"),
    ]  # fmt: skip
