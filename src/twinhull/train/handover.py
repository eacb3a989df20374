"""The training end of the two beams: events come up from the broker, models go down into the registry."""

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from twinhull.errors import ModelRefused, TwinhullError
from twinhull.handoff.registry import Registry
from twinhull.rundir import RunDirectory
from twinhull.train import beam
from twinhull.train.checkpoints.store import Store
from twinhull.train.job import Job

if TYPE_CHECKING:
    from twinhull.train.data.events import Stream

log = logging.getLogger(__name__)

Model = TypeVar("Model")


def stream(job: Job, name: str) -> "Stream":
    """A stream of events; it cannot be read where this run has no broker."""
    from twinhull import broker
    from twinhull.broker import Keys
    from twinhull.handoff.events import Reader
    from twinhull.train.data.events import Stream

    url = os.environ.get(broker.VARIABLE)
    if url is None or not job.system:
        return Stream(name, None)
    return Stream(name, Reader(broker.connect(url, timeout_s=10.0), Keys(job.system), name))


def tell_read(job: Job, name: str, offset: Mapping[str, Any]) -> None:  # Any: plain JSON
    """Show how far training has read a stream, once a checkpoint holds it; needs no broker to go on."""
    from twinhull.broker import Keys
    from twinhull.handoff.progress import note_read
    from twinhull.handoff.stream import Offset

    if (client := beam.client(job.system)) is not None:
        with client:
            note_read(client, Keys(job.system), name, Offset(**offset))


def publish(
    job: Job, state: Mapping[str, Any], metrics: Mapping[str, float], made_by: Mapping[str, str | int]
) -> int | None:
    """Put a model into the registry, tell serving, and give the version's number; None without a directory.

    A version that the same maker has published before is given again. Serving may be away: it looks by
    itself.
    """
    if job.directory is None:
        facts = {"model": job.name, "tensors": len(state), "metrics": dict(metrics)}
        log.info("would publish; no run directory was given", extra=facts)
        return None
    if (store := Store.of(job)) is not None:
        store.check()  # a generation that was overtaken while it was cut off must not publish
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if left_out := sorted(state.keys() - tensors.keys()):
        log.warning("not published", extra={"model": job.name, "not_tensors": left_out})
    registry = Registry(RunDirectory(job.directory).registry)
    version = registry.publish(job.name, tensors, metrics=metrics, made_by=made_by)
    if job.keep_versions is not None:
        registry.prune(job.name, job.keep_versions)
    beam.announce(job.system, job.name, version.number)
    return version.number


def newest(job: Job) -> int | None:
    """The number of the newest published version."""
    if job.directory is None:
        return None
    version = Registry(RunDirectory(job.directory).registry).newest(job.name)
    return version.number if version else None


def build(job: Job, model: type[Model], number: int) -> Model:
    """A model of this class with a published version's weights: by its `from_tensors`, or a strict load."""
    assert job.directory is not None
    registry = Registry(RunDirectory(job.directory).registry)
    version = next((v for v in registry.versions(job.name) if v.number == number), None)
    if version is None:
        raise ModelRefused(f"version {number} of {job.name} is gone.")
    tensors = registry.read(version)
    make: Any = getattr(model, "from_tensors", None)
    if make is not None:
        return make(tensors)
    built = model()
    if not isinstance(built, nn.Module):
        raise TwinhullError(f"{model.__name__} is no torch.nn.Module and has no from_tensors.")
    built.load_state_dict({name: torch.from_numpy(array) for name, array in tensors.items()})
    return built
