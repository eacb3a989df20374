"""The handle that a training function is given: wraps, feeds, saves, resumes, publishes, leaves in time."""

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from twinhull.train.data.loader import Events, Loader, Source
from twinhull.train.engines.choose import choose
from twinhull.train.group import Group
from twinhull.train.job import Job
from twinhull.train.pace import Pace
from twinhull.train.position import Position
from twinhull.train.supervise.live import Beat

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
        self._job, self._group = job, group
        self._pace = Pace()
        self._engine = choose(job, group, self._pace)
        self._keeper = Keeper(job, group, self._pace)
        self._at = Position(job, group, self._keeper.place)
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

    @property
    def cycle(self) -> int:
        """Which run of the training function this is, from 1."""
        return self._at.cycle

    @property
    def step(self) -> int:
        """How many steps are completed, of all cycles."""
        return self._at.step

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
        if (loop := self._at.begin(loader, epochs, most)) is None:
            self._sow_between()
            return
        self._books.looping(self.step, loop.left)
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
                    self._broken_off(is_whole=is_last)
                    raise
            self._at.advance()
            self._after_step(loop.left)
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
        self._keeper.finish(self._at.place(done=True))
        self._books.completed(self.step)
        self.close()

    def close(self) -> None:
        """Write the metrics that are not written yet: for the end, whatever ended it."""
        self._books.close()

    def _broken_off(self, *, is_whole: bool) -> None:
        """The user's code has left the loop: the step counts, unless micro-batches of it were to come."""
        if is_whole:
            self._at.advance()
        else:
            self._pace.enter(1.0, is_first=True, is_last=True)
        self._leave()
        self._books.broken_off()

    def _leave(self) -> None:
        self._at.leave()
        self._sow_between()

    def _after_step(self, left: int | None) -> None:
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
                if any(self._group.most([int(self._books.is_bad())])):
                    raise self._not_finite()
                self._save(required=False)
                self._done(self._keeper.settle())

    def _save(self, *, required: bool) -> None:
        self._keeper.save(self._at.place(), required=required)
        if required:
            self._done(self._keeper.settle())

    def _done(self, safe: Place | None) -> None:
        """A checkpoint holds all up to `safe`: say how far the streams are trained."""
        if safe is not None and self.rank == 0:
            for name, offset in safe.events.items():
                handover.tell_read(self._job, name, offset)

    def _sow_between(self) -> None:
        sowing.sow_between(self.seed, self.cycle, self._at.loops, self._group)
