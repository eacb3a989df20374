"""The handle that a training function is given: wraps, feeds, saves, resumes, publishes, leaves in time."""

import random
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import nn

from twinhull.train import handover
from twinhull.train.agree import Agreement
from twinhull.train.checkpoint import Place
from twinhull.train.cursor import step_seed
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.keep import Keeper
from twinhull.train.live import Beat
from twinhull.train.loader import Collate, Dataset, Events, Loader, Pass, Source, Start
from twinhull.train.progress import Progress
from twinhull.train.wrap import Share, unwrap, wrap_model

Thing = TypeVar("Thing")


class Stopped(SystemExit):
    """Raised inside `run.steps` on all ranks when the run was asked to stop and its state is saved."""

    def __init__(self) -> None:
        super().__init__(75)


class Run:
    """One training run as one rank sees it.

    `rank`, `world_size` and `device` say who and where this rank is; `cycle` counts the runs of the training
    function, `step` the completed steps of all cycles. The law: what the function does between two
    checkpoints is either in the newer one or done again from the older one, with the same samples and the
    same random numbers.
    """

    def __init__(self, job: Job, group: Group, beat: Beat | None = None) -> None:
        self.rank, self.world_size, self.device = group.rank, group.world_size, group.device
        self.seed = job.seed
        self._job, self._group, self._beat = job, group, beat
        self._keeper = Keeper(job, group)
        began = self._keeper.place
        self.cycle, self.step = began.cycle, began.step
        self._offsets: dict[str, Any] = dict(began.events)  # Any: plain JSON
        self._loops, self._loop = 0, began.loop
        self._passing: Pass | None = None
        self._steps_total = self.step
        self._agreement = Agreement(job, group, self.step)
        self._share, self._progress = Share(), Progress(job.name)
        self._sow_between()
        if beat is not None:
            beat.running(self.step)

    @classmethod
    def alone(cls, *, name: str = "alone", directory: Path | None = None, seed: int = 0) -> "Run":
        """A run without a launcher: in plain Python, or one rank of a plain `torchrun`.

        Nothing is saved and nothing published unless a run directory is given.
        """
        job = Job(name=name, directory=directory, seed=seed, save_every_s=600.0, cycle_started=time.time())
        return cls(job, Group.join(job))

    @overload
    def wrap(self, thing: nn.Module) -> Any: ...  # Any: looks like the module that was given
    @overload
    def wrap(self, thing: Thing) -> Thing: ...
    def wrap(self, thing: Any) -> Any:  # Any: as the overloads say
        """The thing, made fit for all ranks if it is a model, with its state of the last checkpoint.

        Anything with `state_dict` and `load_state_dict` will do: models, optimizers, schedules, your own.
        Wrap in the same order every time. What is wrapped is saved.
        """
        wrapped = wrap_model(thing, self._share, self._group) if isinstance(thing, nn.Module) else thing
        self._keeper.add(wrapped, type(thing).__name__)
        return wrapped

    def events(self, name: str) -> Events:
        """The events of stream `name` that training has not seen yet, for `run.loader`."""
        return Events(name)

    def loader(
        self,
        source: Dataset | Events,
        *,
        batch_size: int,
        shuffle: bool = True,
        collate: Collate | None = None,
    ) -> Source:
        """Batches for `run.steps`; `batch_size` is the global batch, whatever the number of ranks.

        Events are never shuffled; without `collate` their batch is the list of them.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        if isinstance(source, Events):
            from twinhull.train.events import EventLoader

            return EventLoader(handover.stream(self._job, source.name), batch_size, collate)
        return Loader(source, batch_size, shuffle, collate)

    def steps(self, loader: Source, epochs: int = 1) -> Iterator[Any]:  # Any: the user's own
        """This rank's part of each global batch; a step is complete when the loop comes back for the next.

        Between two steps the run saves when it is time, and leaves (by raising `Stopped`) when it was asked
        to. All ranks must leave the loop at the same step. A loss that is a mean over the batch trains
        correctly whatever the parts' sizes.
        """
        number, self._loops = self._loops, self._loops + 1
        if number < self._keeper.place.loop:
            self._sow_between()
            return
        passing = self._start(number, loader, epochs)
        while True:
            asked_at = time.monotonic()
            if (part := passing.fetch()) is None:
                break
            self._share.value = part.share
            self._sow_step()
            data_s = time.monotonic() - asked_at
            try:
                yield _on(self.device, part.batch)
            except GeneratorExit:  # `break`: the step counts and the loop is over
                self._advance()
                self._leave()
                raise
            self._advance()
            self._after_step(asked_at, data_s)
        self._leave()
        self._completed()
        self._settle()

    def report(self, **values: Any) -> None:  # Any: numbers or tensors of one number
        """Show values such as `loss=loss` in the live view; cheap: they are read once a second at most."""
        if self.rank == 0:
            self._progress.report(values)

    def publish(self, model: nn.Module, *, metrics: Mapping[str, float] | None = None) -> int | None:
        """Publish the model as a new version and give its number; None without a run directory.

        All ranks call it; it returns on all when the version is out. Once per cycle and step, whatever died.
        """
        self._settle()
        number: int | None = None
        if self.rank == 0:
            made_by: dict[str, str | int] = {"train": self._job.name, "cycle": self.cycle, "step": self.step}
            number = handover.publish(self._job, unwrap(model).state_dict(), metrics or {}, made_by)
        number = self._group.share(number)
        self._completed()
        return number

    def latest(self, model: type[Thing]) -> Thing | None:
        """A model with the newest published weights, to start from; None if there is none yet."""
        number = handover.newest(self._job) if self.rank == 0 else None
        number = self._group.share(number)
        return None if number is None else handover.build(self._job, model, number)

    def ask_to_stop(self) -> None:
        """Make all ranks save and leave after the step they are in; safe in a signal handler."""
        self._agreement.stop_asked = True

    def finish(self) -> None:
        """Mark the cycle as done, after the training function has returned; called for you under `up`."""
        self._keeper.finish(self._here(done=True))
        self._completed()

    def _start(self, number: int, loader: Source, epochs: int) -> Pass:
        """The pass of loop `number`: taken up again if it is the one the checkpoint was in."""
        resumed = self._keeper.place
        saved = resumed.passing if number == resumed.loop else None
        passing = loader.start(Start(self._group, self.seed, epochs, saved, self._offsets))
        self._loop, self._passing = number, passing
        self._steps_total = self.step + passing.batches_left()
        self._completed()
        return passing

    def _advance(self) -> None:
        assert self._passing is not None
        self._passing.advance()
        self.step += 1

    def _leave(self) -> None:
        self._offsets = self._read()
        self._loop, self._passing = self._loop + 1, None
        self._sow_between()

    def _after_step(self, asked_at: float, data_s: float) -> None:
        self._completed()
        assert self._passing is not None
        is_last = self._passing.batches_left() == 0
        save, stop = self._agreement.after(self.step, self._keeper.saved_at, is_last=is_last)
        if save or stop:
            self._save(required=stop)
        if self.rank == 0:
            self._progress.stepped(self.step, self._steps_total, time.monotonic() - asked_at, data_s)
        if stop:
            raise Stopped

    def _settle(self) -> None:
        """Save what was trained since the last checkpoint: what follows must not train it again."""
        if self.step > (self._keeper.saved_step or 0):
            self._save(required=False)

    def _save(self, *, required: bool) -> None:
        self._keeper.save(self._here(), required=required)
        self._completed()
        if self.rank == 0:
            for name, offset in self._read().items():
                handover.tell_read(self._job, name, offset)

    def _read(self) -> dict[str, Any]:  # Any: plain JSON
        """How far each stream is trained."""
        now = self._passing.offset if self._passing is not None else None
        return {**self._offsets, now[0]: now[1]} if now is not None else dict(self._offsets)

    def _here(self, *, done: bool = False) -> Place:
        passing = self._passing.state() if self._passing is not None else None
        began = self._keeper.place.cycle_started
        return Place(self.step, self.cycle, self._loop, passing, self._read(), began, done)

    def _completed(self) -> None:
        if self._beat is not None:
            self._beat.completed(self.step)

    def _sow_step(self) -> None:
        """Seed all random numbers by (seed, step, rank): nothing of them needs to be saved."""
        self._sow(step_seed(self.seed, self.step, self.rank))

    def _sow_between(self) -> None:
        """Seed what the function does outside its loops, the same on all ranks and in every life."""
        self._sow(step_seed(self.seed, -self.cycle, self._loops))

    def _sow(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)  # the user's code may use the old global generator
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)


def _on(device: torch.device, batch: Any) -> Any:  # Any: the user's own
    """The batch with its tensors on the device."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: _on(device, item) for name, item in batch.items()}
    if isinstance(batch, (list, tuple)):
        items: Iterable[Any] = batch  # Any: as above
        moved = [_on(device, item) for item in items]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
