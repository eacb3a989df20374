"""How are the rows of a batch given to a user's function, and what became of each?"""

import contextlib
import inspect
import logging
import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from twinhull.serve import entry, wire

log = logging.getLogger(__name__)

NO_MODEL = "no model yet"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Per row its sealed answer, or None and a reason in `errors` by its index."""

    rows: list[msgspec.Raw | None]
    errors: dict[int, str]


class Function:
    """A user's function, loaded and ready for batches.

    One that takes rows is called once with all of them and must return as many; any other once per row.
    If a call with several rows raises, they are tried one by one: a bad row must not fail its neighbours.
    """

    def __init__(self, run: str, *, batch: bool) -> None:
        self.run = run
        self._call = entry.load(run)
        parameters = entry.parameters_of(run, self._call)
        self.takes_rows = entry.takes_rows(parameters, batch=batch)
        self.model_class = entry.model_class(run, parameters)
        self._kinds = [p.annotation for p in parameters if p.name != "model"]
        self._kind_of = {p.name: p.annotation for p in parameters if p.name != "model"}
        self._takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
        self._row_kind = entry.row_type(parameters) if self.takes_rows else Any
        self._complained_at = 0.0

    def answer(self, rows: list[Any], outputs: int, model: object | None) -> Outcome:  # Any: decoded rows
        """Call the function with decoded rows. Never raises what the user's code or data caused."""
        if self.model_class is not None and model is None:
            return Outcome([None] * len(rows), dict.fromkeys(range(len(rows)), NO_MODEL))
        extra = {} if self.model_class is None else {"model": model}
        errors: dict[int, str] = {}
        fitted: list[tuple[int, Any]] = []  # Any: what the user's function asks for
        for index, row in enumerate(rows):
            try:
                fitted.append((index, self._fit(row, outputs)))
            except (msgspec.ValidationError, TypeError, ValueError) as error:
                errors[index] = f"{self.run}: {error}"
        sealed: list[msgspec.Raw | None] = [None] * len(rows)
        if self.takes_rows and len(fitted) > 1 and self._together(fitted, extra, sealed):
            return Outcome(sealed, errors)
        for index, row in fitted:
            try:
                sealed[index] = self._alone(row, extra)
            except (Exception, SystemExit) as error:  # the user's code may raise anything: only its row fails
                errors[index] = f"{type(error).__name__}: {error}"
                self._complain(error)
        return Outcome(sealed, errors)

    def check(self, rows: list[Any], outputs: int, model: object) -> None:  # Any: decoded rows
        """Call the function as `answer` does, and raise what it raises: the warm-up of a new model.

        Rows that the function does not take are left out: an older form of it may have seen them.
        """
        fitted = []
        for row in rows:
            with contextlib.suppress(msgspec.ValidationError, TypeError, ValueError):
                fitted.append(self._fit(row, outputs))
        if not fitted:
            return
        if self.takes_rows:
            results = self._call_rows(fitted, {"model": model})
        else:
            results = [self._call_one(row, {"model": model}) for row in fitted]
        for result in results:
            wire.encode(result)

    def _together(
        self, fitted: list[tuple[int, Any]], extra: dict[str, object], sealed: list[msgspec.Raw | None]
    ) -> bool:
        try:
            results = self._call_rows([row for _, row in fitted], extra)
            raw = [msgspec.Raw(wire.encode(result)) for result in results]
        except (Exception, SystemExit) as error:  # the rows are tried one by one next
            self._complain(error)
            return False
        for (index, _), result in zip(fitted, raw, strict=True):
            sealed[index] = result
        return True

    def _alone(self, row: Any, extra: dict[str, object]) -> msgspec.Raw:  # Any: a fitted row
        result = self._call_rows([row], extra)[0] if self.takes_rows else self._call_one(row, extra)
        return msgspec.Raw(wire.encode(result))

    def _call_rows(self, rows: list[Any], extra: dict[str, object]) -> list[Any]:  # Any: the user's own types
        with _without_gradients():
            results = self._call(rows, **extra)
        try:
            listed = list(results) if not isinstance(results, (str, bytes, dict)) else None
        except TypeError:
            listed = None
        if listed is None:
            raise TypeError(
                f"{self.run} returned a {type(results).__name__}, not a list with one answer per row"
            )
        if len(listed) != len(rows):
            raise ValueError(f"{self.run} returned {len(listed)} answers for {len(rows)} rows")
        return listed

    def _call_one(
        self, row: tuple[list[Any], dict[str, Any]], extra: dict[str, object]
    ) -> Any:  # Any: the user's
        positional, named = row
        with _without_gradients():
            return self._call(*positional, **named, **extra)

    def _fit(self, row: Any, outputs: int) -> Any:  # Any: a decoded row; what the function asks for
        if self.takes_rows:
            return _fit(tuple(row) if outputs > 1 else row, self._row_kind)
        if outputs == 0:
            if not isinstance(row, dict):
                raise TypeError("a request's body is an object")
            known = row if self._takes_any else {k: v for k, v in row.items() if k in self._kind_of}
            return (), {name: _fit(v, self._kind_of.get(name, Any)) for name, v in known.items()}
        values = [row] if outputs == 1 else row
        kinds = [*self._kinds, *[Any] * len(values)]
        return [_fit(value, kind) for value, kind in zip(values, kinds, strict=False)], dict[str, Any]()

    def _complain(self, error: BaseException) -> None:
        now = time.monotonic()
        if now - self._complained_at >= 1.0:  # a flood of bad rows must not become a flood of tracebacks
            self._complained_at = now
            log.warning("row failed", extra={"run": self.run, "reason": str(error)}, exc_info=error)


def _without_gradients() -> contextlib.AbstractContextManager[object]:
    """PyTorch's inference mode where PyTorch is in use: serving never needs gradients."""
    torch = sys.modules.get("torch")
    return contextlib.nullcontext() if torch is None else torch.inference_mode()


def _fit(value: Any, kind: Any) -> Any:  # Any: a decoded value, a type, a value of it
    if kind is Any or kind is inspect.Parameter.empty or isinstance(kind, str):
        return value
    return wire.fit(value, kind)
