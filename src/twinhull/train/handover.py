"""The training end of the two beams: events come up from the broker, models go down into the registry."""

import logging
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from twinhull import broker
from twinhull.broker import Keys
from twinhull.errors import BrokerError, ModelRefused, TwinhullError
from twinhull.handoff import notice
from twinhull.handoff.events import Reader
from twinhull.handoff.registry import Registry
from twinhull.rundir import RunDirectory
from twinhull.train.job import Job

log = logging.getLogger(__name__)

Model = TypeVar("Model")


def reader(job: Job, stream: str) -> Reader | None:
    """A reader of a stream of events; None when this run has no broker."""
    url = os.environ.get(broker.VARIABLE)
    if url is None or not job.system:
        return None
    return Reader(broker.connect(url, timeout_s=10.0), Keys(job.system), stream)


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
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if left_out := sorted(state.keys() - tensors.keys()):
        log.warning("not published", extra={"model": job.name, "not_tensors": left_out})
    registry = Registry(RunDirectory(job.directory).registry)
    version = registry.publish(job.name, tensors, metrics=metrics, made_by=made_by)
    if job.keep_versions is not None:
        registry.prune(job.name, job.keep_versions)
    _announce(job, version.number)
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


def _announce(job: Job, number: int) -> None:
    url = os.environ.get(broker.VARIABLE)
    if url is None or not job.system:
        return
    try:
        client = broker.connect(url)
    except BrokerError as error:
        log.warning("notice not sent", extra={"model": job.name, "version": number, "reason": str(error)})
        return
    with client:
        notice.announce(client, Keys(job.system), job.name, number)
