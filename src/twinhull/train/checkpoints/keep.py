"""What all ranks of a run keep together: saved while training goes on, given back when it starts again."""

import logging
import time

from twinhull.errors import CheckpointError, TwinhullError
from twinhull.train.checkpoints import snapshot
from twinhull.train.checkpoints.cost import Cost
from twinhull.train.checkpoints.failures import EXPECTED, OF_DISK_OR_DCP, reason
from twinhull.train.checkpoints.fence import Overtaken
from twinhull.train.checkpoints.find import find
from twinhull.train.checkpoints.manifest import Checkpoint, Place
from twinhull.train.checkpoints.peers import Peers
from twinhull.train.checkpoints.restore import read_skeletons, restore
from twinhull.train.checkpoints.skeleton import Tree, unfit
from twinhull.train.checkpoints.snapshot import Thing
from twinhull.train.checkpoints.staging import Torn
from twinhull.train.checkpoints.store import Store
from twinhull.train.checkpoints.writer import Writer, Writing
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.pace import Pace

log = logging.getLogger(__name__)


class Keeper:
    """Holds what was wrapped, gives it the state of the newest checkpoint and saves it.

    `place` is where the run takes up its work, `saved_at` (monotonic) when a save last began, `saved_step`
    the step of the last checkpoint that all ranks know of: it changes in `save`, `settle` and `finish` only,
    so it is the same on all ranks. One save is under way at a time.

    Parameters and state of wrapped optimizers are copied while the next step computes its gradients: `pace`
    announces the update, which waits for the copy. Without `pace`, and of all else, `save` makes the copy.
    """

    def __init__(self, job: Job, group: Group, pace: Pace | None = None) -> None:
        self._job, self._group = job, group
        store = Store.of(job)
        self._writer = Writer(store, Peers(group), group.device) if store else None
        self._cost = Cost(job)
        self._things: list[Thing] = []
        self._kinds: list[str] = []
        self._writing: Writing | None = None
        self._safe: Place | None = None  # not yet told
        self._announced = pace is not None
        if pace is not None:
            pace.before_update.append(self._before_update)
        self._last = find(self._writer.store, self._writer.peers) if self._writer else None
        self._restoring: list[Tree] | None = None
        self.place = self._take_up()
        self.saved_step = self._last.place.step if self._last else None
        self.saved_at = time.monotonic()

    @property
    def due_s(self) -> float | None:
        """How long after `saved_at` the next save is due; None: never by time."""
        return self._cost.due_s

    @property
    def cost_s(self) -> float | None:
        """What a save costs training, stall and slow-down together; None before the first."""
        return self._cost.cost_s

    def add(self, thing: Thing, kind: str) -> None:
        """One more thing to keep; gets its state back if there is one. Raises TwinhullError."""
        for where in () if snapshot.has_files(thing) else unfit(thing.state_dict(), "its state"):
            raise TwinhullError(
                f"{kind} cannot be wrapped: {where}, which a checkpoint cannot hold.",
                hint="Keep tensors, numbers and text in its state_dict.",
            )
        if self._restoring is not None and self._last is not None:
            _check_kind(self._last, len(self._things), kind)
            self._restore(thing, self._last, self._restoring)
        self._things.append(thing)
        self._kinds.append(kind)

    def stepped(self, step_s: float) -> None:
        """Tell how long a step took: what steps lose while a checkpoint is written is part of its cost."""
        self._cost.stepped(step_s, writing=self._writing is not None)

    def save(self, place: Place, *, required: bool) -> None:
        """Begin a save at `place` on all ranks; waits for one that is under way.

        `poll` and `settle` tell how it ended: a failure is logged, or raised if the save was required.
        """
        if self._writer is None:
            return
        self._wait()
        self.saved_at = began = time.monotonic()
        try:
            taken = self._snapshot(self._writer, place)
        except EXPECTED as error:
            self._failed(place, error, required=required)
            return
        self._writing = writing = Writing(place, tuple(self._kinds), taken, required, began)
        self._writer.start(writing)
        self._cost.stalled(time.monotonic() - began, in_step=False)

    def poll(self) -> Place | None:
        """Look, at a step boundary, whether the save under way has ended; the place that is now safe.

        Ranks may see it some steps apart. Raises CheckpointError if the save was required and has failed.
        """
        if self._writing is not None and self._writing.ended.is_set():
            self._end(self._writing)
        safe, self._safe = self._safe, None
        return safe

    def settle(self) -> Place | None:
        """Wait for the save under way, if there is one; then as `poll`. All ranks call it at the same step.

        `saved_step` is then the same on all of them.
        """
        self._wait()
        safe, self._safe = self._safe, None
        return safe

    def finish(self, place: Place) -> None:
        """Leave a checkpoint that marks the cycle as done. Raises CheckpointError on all ranks."""
        writer = self._writer
        if writer is None:
            return
        self._wait()
        last = self._last
        if last is None or last.place.step != place.step:
            self.save(place, required=True)
            self._wait()
        else:
            writer.peers.together(lambda: self._change(writer.store, last, place))
        if self._group.rank == 0:
            log.info("cycle finished", extra={"cycle": place.cycle, "step": place.step})

    def _wait(self) -> None:
        if self._writing is not None:
            began = time.monotonic()
            self._writing.ended.wait()
            self._cost.stalled(time.monotonic() - began, in_step=False)
            self._end(self._writing)
        self.saved_step = self._last.place.step if self._last else None

    def _change(self, store: Store, last: Checkpoint, place: Place) -> None:
        if self._group.rank == 0:
            self._last = store.change(last, place)

    def _before_update(self) -> None:
        """Parameters are about to change: wait until the snapshot is whole."""
        if self._writing is not None and not self._writing.staged.is_set():
            began = time.monotonic()
            self._writing.staged.wait()
            self._cost.stalled(time.monotonic() - began, in_step=True)

    def _snapshot(self, writer: Writer, place: Place) -> snapshot.Snapshot:
        taken = snapshot.take(self._things, self._group.rank, late=self._announced)
        if taken.own:  # these know nothing of updates: they write here and now
            writer.make_room(place.step)
            beside = writer.store.beside(place.step)
            writer.peers.together(lambda: snapshot.save_files(self._things, beside))
        return taken

    def _end(self, writing: Writing) -> None:
        """Take note of how a save has ended."""
        self._writing = None
        place, error = writing.place, writing.error
        stall_s, slow_s = self._cost.saved(worked=error is None)
        if error is not None:
            self._announced = self._announced and not isinstance(error, Torn)
            self._failed(place, error, required=writing.required)
            return
        self._last, self._safe = writing.made, place
        if self._group.rank == 0 and writing.made is not None:
            facts = {"took_s": writing.made.took_s, "stall_s": stall_s, "slowdown_s": slow_s}
            rounded = {name: round(value, 4) for name, value in facts.items()}
            log.info("checkpoint saved", extra={"step": place.step, "bytes": writing.made.bytes, **rounded})

    def _failed(self, place: Place, error: BaseException, *, required: bool) -> None:
        """Say what went wrong. Raises CheckpointError if the save was required, and what is worse."""
        if isinstance(error, Overtaken) or not isinstance(error, EXPECTED):
            raise error
        why = reason(error)
        if required:
            raise CheckpointError(
                f"the checkpoint of step {place.step} cannot be written: {why}.",
                hint="The one before is still there." if self._last else "",
            ) from error
        if self._group.rank == 0:
            log.error("checkpoint failed", extra={"step": place.step, "reason": why})

    def _take_up(self) -> Place:
        """A new cycle after a finished one, or the unfinished one with its state."""
        if self._last is None:
            return Place(cycle_started=self._job.cycle_started)
        place = self._last.place
        if place.done:
            began = self._job.cycle_started
            return Place(place.step, place.cycle + 1, events=place.events, cycle_started=began)
        self._restoring = read_skeletons(self._last.path)
        if self._group.rank == 0:
            repeated = max(0, self._job.furthest_step - place.step)
            log.info("resumed", extra={"step": place.step, "repeated_steps": repeated, "cycle": place.cycle})
        return place

    def _restore(self, thing: Thing, saved: Checkpoint, skeletons: list[Tree]) -> None:
        number = len(self._things)
        if snapshot.has_files(thing):
            _check_ranks(saved, self._group.world_size, saved.parts[number])
            thing.load_files(saved.path / snapshot.own_name(number))
            return
        try:
            restore(thing, skeletons[number], saved.path)
        except OF_DISK_OR_DCP as error:
            raise CheckpointError(
                f"{saved.path.name} cannot be loaded into {saved.parts[number]}: {reason(error)}.",
                hint="Put the code back as it was, or begin again in a new run directory.",
            ) from error
        skeletons[number] = None  # of format 1 it was the whole state


def _check_ranks(saved: Checkpoint, world_size: int, kind: str) -> None:
    if saved.world_size != world_size:
        raise CheckpointError(
            f"{saved.path.name} is of {saved.world_size} ranks and does not fit {world_size}: "
            f"{kind} keeps files of its own, which cannot be divided anew.",
            hint=f"Run it with {saved.world_size} ranks, or choose another engine and begin again.",
        )


def _check_kind(saved: Checkpoint, number: int, kind: str) -> None:
    if number >= len(saved.parts) or saved.parts[number] != kind:
        was = saved.parts[number] if number < len(saved.parts) else "nothing"
        raise CheckpointError(
            f"{saved.path.name} holds {was} as wrapped thing {number + 1}, the code wraps {kind}.",
            hint="Put the code back as it was, or begin again in a new run directory.",
        )
