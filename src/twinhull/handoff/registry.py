"""Where models wait for serving: numbered versions in a directory, each whole or absent.

A published version never changes; a reader sees a whole version or the one before, never a torn one. A
version is written beside its place, flushed to the disk and renamed into it. Publishers on one machine take
turns under a lock that the kernel gives back when its holder dies; readers take none.

    registry/MODEL/7/model.safetensors
    registry/MODEL/7/manifest.json      format, sha256, bytes, metrics, published_at, made_by, tensors
"""

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors

from twinhull.errors import ModelRefused, TwinhullError
from twinhull.handoff.tensors import Array, Tensor, prepared, read, write

FORMAT = 1
WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"
LOCK_S = 120.0  # a publisher ahead of us writes gigabytes at most
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")
_UNFINISHED = "."  # names of what is being written or removed begin with it
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Version:
    """One published version of a model, as its manifest says."""

    model: str
    number: int
    path: Path
    sha256: str
    bytes: int
    metrics: dict[str, float]
    published_at: float
    made_by: dict[str, str | int]
    tensors: dict[str, dict[str, Any]]  # Any: shape is a list, dtype a text


class Registry:
    """The published models under one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._told: set[Path] = set()  # directories that were called no version already

    def publish(
        self,
        model: str,
        tensors: Mapping[str, Any],  # Any: arrays of numpy or tensors of PyTorch
        *,
        metrics: Mapping[str, float],
        made_by: Mapping[str, str | int],
    ) -> Version:
        """Publish the next version; the one already there if the same maker has published before.

        `made_by` (train, cycle) makes publishing safe to repeat after a crash; an empty one never matches.
        Raises TwinhullError for tensors or metrics that cannot be stored, metrics that are not finite, and a
        directory that cannot be written or is full; nothing half written stays.
        """
        ready = prepared(tensors)
        facts = {"metrics": _finite(metrics), "made_by": _plain(made_by)}
        place = self._place(model)
        try:
            place.mkdir(parents=True, exist_ok=True)
            with _turn(place):
                _tidy(place)
                if (known := self._made_by(model, made_by)) is not None:
                    return known
                number = max(_numbers(place), default=0) + 1
                _put(place, number, ready, facts)
        except (OSError, safetensors.SafetensorError) as error:
            raise TwinhullError(
                f"model {model} cannot be published in {place}: {error}.",
                hint="Make room there or make it writable; the version before stays.",
            ) from error
        log.info("published", extra={"model": model, "version": number, "metrics": facts["metrics"]})
        return self._version(model, number)

    def newest(self, model: str) -> Version | None:
        """The newest whole version. Raises ModelRefused when its manifest is in a format newer than ours."""
        for number in sorted(_numbers(self._place(model)), reverse=True):
            if (version := self._whole(model, number)) is not None:
                return version
        return None

    def versions(self, model: str) -> list[Version]:
        """All whole versions, oldest first."""
        found = (self._whole(model, number) for number in sorted(_numbers(self._place(model))))
        return [version for version in found if version is not None]

    def read(self, version: Version) -> dict[str, Array]:
        """The tensors as writable numpy arrays, bfloat16 as float32, checked against the manifest's sha256.

        Raises ModelRefused when a byte is not what was published, or the version is gone.
        """
        try:
            data = (version.path / WEIGHTS).read_bytes()
        except OSError as error:
            raise ModelRefused(f"{_called(version)} cannot be read: {error}.") from error
        if len(data) != version.bytes or hashlib.sha256(data).hexdigest() != version.sha256:
            raise ModelRefused(f"{_called(version)} is not what was published: its hash differs.")
        return read(data)

    def prune(self, model: str, keep: int) -> list[int]:
        """Remove all but the newest `keep` versions (at least one); the numbers removed.

        Raises TwinhullError when the directory cannot be written; no version is ever torn.
        """
        place = self._place(model)
        if not place.is_dir():
            return []
        try:
            with _turn(place):
                _tidy(place)
                old = [version.number for version in self.versions(model)[: -max(1, keep)]]
                for number in old:
                    gone = place / f"{_UNFINISHED}gone-{number}"
                    (place / str(number)).rename(gone)
                    shutil.rmtree(gone)
        except OSError as error:
            raise TwinhullError(f"old versions of model {model} cannot be removed: {error}.") from error
        return old

    def _place(self, model: str) -> Path:
        if not _NAME.fullmatch(model):
            raise TwinhullError(
                f"a model cannot be called {model!r}: letters, digits, '_', '.' and '-' only."
            )
        return self.root / model

    def _made_by(self, model: str, made_by: Mapping[str, str | int]) -> Version | None:
        same = (version for version in self.versions(model) if made_by and version.made_by == dict(made_by))
        return next(same, None)

    def _whole(self, model: str, number: int) -> Version | None:
        try:
            return self._version(model, number)
        except (OSError, ValueError, KeyError, TypeError):
            if (path := self._place(model) / str(number)) not in self._told:
                self._told.add(path)
                log.warning("not a whole version, left out", extra={"path": str(path)})
            return None

    def _version(self, model: str, number: int) -> Version:
        path = self._place(model) / str(number)
        about = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if about["format"] > FORMAT:
            raise ModelRefused(
                f"{path / MANIFEST} has format {about['format']} and this Twinhull reads up to {FORMAT}.",
                hint="Use the newer Twinhull that published it.",
            )
        if (path / WEIGHTS).stat().st_size != about["bytes"]:
            raise ValueError(f"{path / WEIGHTS} is cut short")
        return Version(
            model=model,
            number=number,
            path=path,
            sha256=str(about["sha256"]),
            bytes=int(about["bytes"]),
            metrics=dict(about["metrics"]),
            published_at=float(about["published_at"]),
            made_by=dict(about["made_by"]),
            tensors=dict(about["tensors"]),
        )


def _put(place: Path, number: int, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
    """Write a version beside its place, make it last, and rename it there."""
    making = place / f"{_UNFINISHED}making-{os.getpid()}"
    try:
        making.mkdir()
        weights = making / WEIGHTS
        write(tensors, weights)
        about = {
            "format": FORMAT,
            "version": number,
            "sha256": _lasting(weights),
            "bytes": weights.stat().st_size,
            "published_at": time.time(),
            **facts,
            "tensors": {name: tensor.described() for name, tensor in tensors.items()},
        }
        (making / MANIFEST).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        _lasting(making / MANIFEST)
        _lasting_names(making)
        making.rename(place / str(number))
        _lasting_names(place)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def _lasting(path: Path) -> str:
    """Flush a file to the disk; its sha256."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _lasting_names(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _turn(place: Path) -> Generator[None]:
    """Wait for our turn to change a model's directory."""
    with (place / f"{_UNFINISHED}lock").open("a") as file:
        end = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > end:
                    raise TwinhullError(
                        f"another process has been publishing in {place} for too long."
                    ) from error
                time.sleep(0.02)
        yield


def _tidy(place: Path) -> None:
    """Remove what a publisher left that died; whoever has the turn knows that nobody else is writing."""
    for path in place.glob(f"{_UNFINISHED}*"):
        if path.is_dir():
            shutil.rmtree(path)


def _numbers(place: Path) -> list[int]:
    try:
        names = [path.name for path in place.iterdir()]
    except FileNotFoundError:
        return []
    return [int(name) for name in names if _NUMBER.fullmatch(name)]


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics as plain numbers. One that is not finite stops the publish: such a model has diverged."""
    plain: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            number = None if isinstance(value, str | bytes | bool) else float(value)
        except (TypeError, ValueError, RuntimeError):
            number = None
        if number is None:
            raise TwinhullError(f"metric {name} is {value!r}, not a number.")
        if not math.isfinite(number):
            raise TwinhullError(f"metric {name} is {number}: a model that diverged is not published.")
        plain[name] = number
    return plain


def _plain(made_by: Mapping[str, str | int]) -> dict[str, str | int]:
    for name, value in made_by.items():
        if not isinstance(value, str | int):
            raise TwinhullError(f"made_by {name} is {value!r}; a text or a whole number is needed.")
    return dict(made_by)


def _called(version: Version) -> str:
    return f"model {version.model} version {version.number}"
