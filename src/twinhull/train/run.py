"""The handle that a training function is given: wraps, feeds, saves, resumes, publishes, leaves in time."""

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import default_collate

from twinhull.errors import TwinhullError
from twinhull.train import handover, sowing
from twinhull.train.agree import Agreement
from twinhull.train.books import Books
from twinhull.train.checkpoints.keep import Keeper
from twinhull.train.checkpoints.manifest import Place
from twinhull.train.data.ahead import Collate, Dataset, is_dataset
from twinhull.train.data.iterable import IterableLoader
from twinhull.train.data.loader import Events, Loader, Pass, Source, Start
from twinhull.train.engines.choose import choose
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.pace import Pace
from twinhull.train.supervise.live import Beat

Thing = TypeVar("Thing")


class Stopped(SystemExit):
    """Raised inside `run.steps` on all ranks when the run was asked to stop and its state is saved."""

    def __init__(self) -> None:
        super().__init__(75)


@dataclass(slots=True)
class _Loop:
    """One `run.steps` loop: its number, its data, how many steps it has completed and may complete."""

    number: int
    passing: Pass
    done: int
    most: int

    @property
    def left(self) -> int | None:
        """How many steps are still to come; None if nobody knows."""
        batches = self.passing.batches_left()
        by_count = self.most - self.done
        if batches is None:
            return by_count if self.most < sys.maxsize else None
        return min(batches, by_count)


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
        self._job, self._group = job, group
        self._pace = Pace()
        self._engine = choose(job, group, self._pace)
        self._keeper = Keeper(job, group, self._pace)
        began = self._keeper.place
        self.cycle, self.step = began.cycle, began.step
        self._offsets: dict[str, Any] = dict(began.events)  # Any: plain JSON
        self._loops, self._number = 0, began.loop
        self._loop: _Loop | None = None
        self._agreement = Agreement(job, group, self.step)
        self._books = Books(job, group, self._pace, beat)
        self._engine.on_local_gradients = self._books.gradients_handed_over
        self._sow_between()
        self._books.running(self.step)

    @classmethod
    def alone(
        cls, *, name: str = "alone", directory: Path | None = None, seed: int = 0, engine: str = ""
    ) -> "Run":
        """A run without a launcher: in plain Python, or one rank of a plain `torchrun`.

        Nothing is saved and nothing published unless a run directory is given. Under torchrun SIGTERM, which
        it passes on, is a wish to save and leave.
        """
        job = Job(name=name, directory=directory, seed=seed, engine=engine,
                  save_every_s=600.0, cycle_started=time.time())  # fmt: skip
        run = cls(job, Group.join(job))
        if dist.is_torchelastic_launched():
            signal.signal(signal.SIGTERM, lambda _number, _frame: run.ask_to_stop())
        return run

    @overload
    def wrap(self, thing: nn.Module) -> Any: ...  # Any: looks like the module that was given
    @overload
    def wrap(self, thing: Thing) -> Thing: ...
    def wrap(self, thing: Any) -> Any:  # Any: as the overloads say
        """The thing, made fit for all ranks, with its state of the last checkpoint.

        A model first, then its optimizer, then the optimizer's schedule. Anything else with `state_dict` and
        `load_state_dict` will do too. Wrap in the same order every time. What is wrapped is saved.
        """
        kind = type(thing).__name__
        thing = self._engine.model(thing) if isinstance(thing, nn.Module) else self._engine.optimizer(thing)
        self._keeper.add(thing, kind)
        return thing

    def events(self, name: str) -> Events:
        """The events of stream `name` that training has not seen yet, for `run.loader`."""
        return Events(name)

    def loader(
        self,
        source: Dataset | Iterable[Any] | Events,  # Any: the user's own
        *,
        batch_size: int,
        shuffle: bool | None = None,
        collate: Collate | None = None,
        workers: int = 0,
    ) -> Source:
        """Batches for `run.steps`; `batch_size` is the global batch, whatever the number of ranks.

        A dataset is shuffled unless told otherwise. What has no length is read in its own order, and so are
        events; without `collate` a batch of events is the list of them. With `workers` as many processes a
        rank load ahead.
        """
        for what, value, least in (("batch_size", batch_size, 1), ("workers", workers, 0)):
            if value < least:
                raise ValueError(f"{what} must be at least {least}, not {value}")
        if is_dataset(source):
            return Loader(source, batch_size, shuffle is not False, collate, workers)
        if shuffle or workers:
            what = source.name if isinstance(source, Events) else type(source).__name__
            raise TwinhullError(
                f"{what} gives no samples by number: it cannot be shuffled, nor loaded ahead by workers.",
                hint="Shuffle where it is made, or give it __len__ and __getitem__.",
            )
        if isinstance(source, Events):
            from twinhull.train.data.events import EventLoader

            return EventLoader(handover.stream(self._job, source.name), batch_size, collate)
        samples: Any = source  # Any: the user's own
        return IterableLoader(samples, batch_size, collate or default_collate)

    def steps(
        self, loader: Source, epochs: int | None = None, *, most: int | None = None
    ) -> Iterator[Any]:  # Any: the user's own
        """This rank's part of each global batch; a step is complete when the loop comes back for the next.

        One epoch, or so many; or, with `most`, as many epochs as that number of steps takes. Where nodes are
        missing a step comes in several micro-batches, and the wrapped optimizer does nothing before the last.
        Between two steps the run saves when it is time, and leaves (by raising `Stopped`) when it was asked
        to. All ranks must leave the loop at the same step. A loss that is a mean over the batch trains
        correctly whatever the parts' sizes.
        """
        number, self._loops = self._loops, self._loops + 1
        if number < self._keeper.place.loop:
            self._sow_between()
            return
        loop = self._begin(number, loader, epochs, most)
        while loop.done < loop.most:
            self._books.begin()
            if (parts := loop.passing.fetch()) is None:
                break
            self._books.fetched()
            for micro, part in enumerate(parts):
                is_last = micro == len(parts) - 1
                self._pace.enter(part.share, is_first=micro == 0, is_last=is_last)
                sowing.sow_step(self.seed, self.step, micro, self._group)
                self._engine.begin()
                batch = self._group.place(part.batch)
                self._books.placed()
                try:
                    yield batch
                except GeneratorExit:  # `break`
                    self._broken_off(loop, is_whole=is_last)
                    raise
            self._advance(loop)
            self._after_step(loop)
        self._leave()
        self._books.between(self.step)
        self._settle()

    def report(self, **values: Any) -> None:  # Any: numbers or tensors of one number
        """Show values such as `loss=loss`: in the live view, in metrics/TRAIN.jsonl and to hooks.

        Cheap: they are read once a second. A `loss` that is not finite stops the run, unless the file says
        `nan: ignore`.
        """
        self._books.report(values)

    def on_step(self, hook: Callable[[Mapping[str, Any]], None]) -> None:  # Any: numbers, or tensors of one
        """Call `hook` on rank 0 after each step with its number, its times and what was reported."""
        self._books.hooks.append(hook)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to `max_norm` if they are larger, and give their norm; all ranks call it.

        In place of PyTorch's own, which sees neither shards nor micro-batches.
        """
        return self._engine.clip_grad_norm(model, max_norm)

    def publish(self, model: nn.Module, *, metrics: Mapping[str, float] | None = None) -> int | None:
        """Publish the model as a new version and give its number; None without a run directory.

        All ranks call it; it returns on all when the version is out. Once per cycle and step, whatever died.
        """
        self._settle()
        state = self._engine.full_state(model)
        number: int | None = None
        if self.rank == 0:
            made_by: dict[str, str | int] = {"train": self._job.name, "cycle": self.cycle, "step": self.step}
            number = handover.publish(self._job, state, metrics or {}, made_by)
        number = self._group.share(number)
        self._books.completed(self.step)
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
        self._books.completed(self.step)
        self.close()

    def close(self) -> None:
        """Write the metrics that are not written yet: for the end, whatever ended it."""
        self._books.close()

    def _begin(self, number: int, loader: Source, epochs: int | None, most: int | None) -> _Loop:
        """Loop `number`: taken up again if it is the one the checkpoint was in."""
        resumed = self._keeper.place
        saved = dict(resumed.passing or {}) if number == resumed.loop else {}
        done = int(saved.pop("loop_steps", 0))
        times = epochs or (1 if most is None else sys.maxsize)
        start = Start(self._group, self.seed, times, saved or None, self._offsets,
                      self._job.micro_batch, self._job.full_size)  # fmt: skip
        loop = _Loop(number, loader.start(start), done, sys.maxsize if most is None else most)
        self._number, self._loop = number, loop
        self._books.looping(self.step, loop.left)
        return loop

    def _advance(self, loop: _Loop) -> None:
        loop.passing.advance()
        loop.done += 1
        self.step += 1

    def _broken_off(self, loop: _Loop, *, is_whole: bool) -> None:
        """The user's code has left the loop: the step counts, unless micro-batches of it were to come."""
        if is_whole:
            self._advance(loop)
        else:
            self._pace.enter(1.0, is_first=True, is_last=True)
        self._leave()
        self._books.broken_off()

    def _leave(self) -> None:
        self._offsets = self._read()
        if self._loop is not None:
            self._loop.passing.close()
        self._number, self._loop = self._number + 1, None
        self._sow_between()

    def _after_step(self, loop: _Loop) -> None:
        left = loop.left
        self._books.stepped(self.step, left)
        self._keeper.stepped(self._books.step_s)
        if (safe := self._keeper.poll()) is not None:
            self._done(safe)
        if not self._agreement.is_due(self.step, is_last=left == 0):
            return
        due_s = self._keeper.due_s
        is_save_due = due_s is not None and time.monotonic() - self._keeper.saved_at >= due_s
        agreed = self._agreement.after(self.step, is_save_due=is_save_due, is_bad=self._books.is_bad())
        if agreed.is_bad:
            raise self._not_finite()
        if agreed.save or agreed.stop:
            with self._books.saving():
                self._save(required=agreed.stop)
        if agreed.stop:
            self.close()
            raise Stopped

    def _not_finite(self) -> TwinhullError:
        self._keeper.settle()
        kept = self._keeper.saved_step
        good = (
            f"the checkpoint of step {kept} is from before." if kept is not None else "nothing was saved yet."
        )
        return TwinhullError(
            f"the loss is not finite: found after step {self.step}; {good}",
            hint="Lower the learning rate or mend the data; with `nan: ignore` in the file it goes on.",
        )

    def _settle(self) -> None:
        """Save what was trained since the last checkpoint: what follows must not train it again."""
        with self._books.saving():
            self._done(self._keeper.settle())
            if self.step > (self._keeper.saved_step or 0):
                self._save(required=False)
                self._done(self._keeper.settle())

    def _save(self, *, required: bool) -> None:
        self._keeper.save(self._here(), required=required)
        if required:
            self._done(self._keeper.settle())

    def _done(self, safe: Place | None) -> None:
        """A checkpoint holds all up to `safe`: say how far the streams are trained."""
        if safe is not None and self.rank == 0:
            for name, offset in safe.events.items():
                handover.tell_read(self._job, name, offset)

    def _read(self) -> dict[str, Any]:  # Any: plain JSON
        """How far each stream is trained."""
        now = self._loop.passing.offset if self._loop is not None else None
        return {**self._offsets, now[0]: now[1]} if now is not None else dict(self._offsets)

    def _here(self, *, done: bool = False) -> Place:
        loop = self._loop
        passing = {**loop.passing.state(), "loop_steps": loop.done} if loop is not None else None
        began = self._keeper.place.cycle_started
        return Place(self.step, self.cycle, self._number, passing, self._read(), began, done)

    def _sow_between(self) -> None:
        sowing.sow_between(self.seed, self.cycle, self._loops, self._group)
