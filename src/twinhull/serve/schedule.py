"""When does a task with `every` run next, and when did it run last?"""

import json
import logging
import os
import time
from datetime import UTC, datetime, timedelta
from math import inf, isfinite
from pathlib import Path
from typing import Any

from celery.beat import ScheduleEntry, Scheduler, SchedulingError

from twinhull.broker import Keys
from twinhull.system.model import System, Task

log = logging.getLogger(__name__)

_RETRY_S = 1.0


def entries(system: System) -> dict[str, dict[str, Any]]:  # Any: Celery's beat_schedule
    """Celery's schedule of all tasks with `every`. A run that nobody takes is dropped by the next."""
    parts = system.components.items()
    tasks = {name: part for name, part in parts if isinstance(part, Task) and isfinite(part.every or inf)}
    return {
        name: {
            "task": name,
            "schedule": timedelta(seconds=task.every or 0.0),
            "options": {
                "queue": Keys(system.name).jobs(task.pool or ""),
                "expires": min(task.every or 0.0, task.expires or inf),
            },
        }
        for name, task in tasks.items()
    }


class FileScheduler(Scheduler):
    """Celery's scheduler with its memory in a JSON file that is whole or absent.

    Celery's own keeps a pickle that a kill can tear, waits a full interval before the first run, and skips a
    run that the broker did not take. Here what never ran is due at once, and a due run waits for the broker.
    """

    sync_every_tasks = 1

    def __init__(
        self, *args: Any, schedule_filename: str, **kwargs: Any
    ) -> None:  # Any: Celery's own arguments
        self._file = Path(schedule_filename)
        super().__init__(*args, sync_every_tasks=1, **kwargs)

    def setup_schedule(self) -> None:
        """Merge the file's tasks with what is remembered of them."""
        self.merge_inplace(self.app.conf.beat_schedule)
        ran_at = _read(self._file)
        for name, entry in self.schedule.items():
            # A clock that went back must not put a run off: what ran in the future ran now.
            ran = min(ran_at.get(name, 0.0), time.time())
            entry.last_run_at = datetime.fromtimestamp(ran, UTC)
        log.info("schedule read", extra={"tasks": len(self.schedule), "known": len(ran_at)})

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:  # Any: kombu's producer
        """Send a due run; while the broker is away, wait for it."""
        told = False
        while True:
            try:
                self.apply_async(entry, producer=producer, advance=False)
            except SchedulingError as error:
                if not told:
                    log.warning("scheduled job waits", extra={"task": entry.task, "reason": str(error)})
                    told = True
                time.sleep(_RETRY_S)
            else:
                log.info("scheduled job sent", extra={"task": entry.task})
                return

    def sync(self) -> None:
        """Write down when each task ran last."""
        if self.schedule is not None:
            ran_at = {name: entry.last_run_at.timestamp() for name, entry in self.schedule.items()}
            try:
                _write(self._file, ran_at)
            except OSError as error:  # a full disk must not stop, nor repeat, what is remembered in memory
                log.warning("schedule not written", extra={"file": str(self._file), "reason": str(error)})


def _read(file: Path) -> dict[str, float]:
    """When each task ran last, in unix seconds; nothing of a file that is absent or not ours."""
    try:
        known = json.loads(file.read_text())
        return {str(name): float(at) for name, at in known["ran_at"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("schedule forgotten", extra={"file": str(file), "reason": str(error)})
        return {}


def _write(file: Path, ran_at: dict[str, float]) -> None:
    new = file.with_name(f"{file.name}.new")
    with new.open("w") as out:
        json.dump({"format": 1, "ran_at": ran_at}, out)
        out.flush()
        os.fsync(out.fileno())
    new.replace(file)
