"""Is this the body of a request that the first task of a path can take, and which request is it?"""

import difflib
import functools
import hashlib
import operator
import re
from dataclasses import dataclass
from types import GenericAlias
from typing import Any

import msgspec

from twinhull.serve.entry import Entry, Parameter, Shape
from twinhull.serve.layout import Stop

_SCALARS: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "null": None, "any": Any}
_encoder = msgspec.msgpack.Encoder(order="deterministic")


class BadBody(Exception):
    """Raised for a body that is not JSON, or not what the path's first task takes."""


@dataclass(frozen=True, slots=True)
class Body:
    """A request's body, sealed for its way to the workers, and the name of equal requests."""

    sealed: msgspec.Raw
    key: bytes

    @property
    def fields(self) -> dict[str, Any]:  # Any: whatever JSON can say
        """The body as keyword arguments."""
        return msgspec.msgpack.decode(self.sealed)


class Bodies:
    """Reads the bodies of one endpoint. A field is known if any task of the path's first stage takes it."""

    def __init__(self, first: tuple[Stop, ...], entries: dict[str, Entry]) -> None:
        fields = [_fields_of(stop, entries.get(stop.run)) for stop in first]
        known = None if not fields or None in fields else _merged([f for f in fields if f is not None])
        self._names = None if known is None else [field["name"] for field in known]
        kind = dict[str, Any] if known is None else _struct(known)
        self._decoder = msgspec.json.Decoder(kind)

    def read(self, data: bytes) -> Body:
        """The body. Raises BadBody."""
        try:
            sealed = _encoder.encode(self._decoder.decode(data))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadBody(self._reason(str(error))) from error
        except OverflowError:
            raise BadBody("a whole number does not fit in 64 bits.") from None
        except RecursionError:
            raise BadBody("it is nested too deeply.") from None
        return Body(msgspec.Raw(sealed), hashlib.blake2b(sealed, digest_size=16).digest())

    def _reason(self, said: str) -> str:
        unknown = re.search(r"unknown field `(.*)`", said)
        if unknown is None or self._names is None:
            return said
        near = difflib.get_close_matches(unknown[1], self._names, n=1)
        guess = f" Did you mean `{near[0]}`?" if near else ""
        return f"{said}.{guess} Known fields: {', '.join(self._names) or 'none'}"


def _fields_of(stop: Stop, entry: Entry | None) -> list[Parameter] | None:
    if entry is None:
        return None
    takes_rows = stop.batch if entry["rows"] is None else entry["rows"]
    return entry["row"] if takes_rows else entry["parameters"]


def _merged(lists: list[list[Parameter]]) -> list[Parameter]:
    """Fields of several tasks as one body: required if one requires it, of any type where they disagree."""
    merged: dict[str, Parameter] = {}
    for field in (f for fields in lists for f in fields):
        other = merged.setdefault(field["name"], field)
        kind = field["type"] if field["type"] == other["type"] else "any"
        required = field["required"] or other["required"]
        merged[field["name"]] = Parameter(name=field["name"], type=kind, required=required)
    return list(merged.values())


def _struct(fields: list[Parameter]) -> type[msgspec.Struct]:
    ordered = sorted(fields, key=lambda f: not f["required"])
    return msgspec.defstruct("Body", [_member(f) for f in ordered], forbid_unknown_fields=True, kw_only=True)


def _member(field: Parameter) -> tuple[str, Any, Any]:  # Any: a type, and a default value of it
    kind = _type(field["type"])
    if field["required"]:
        return field["name"], kind, msgspec.field()
    return field["name"], _either(kind, msgspec.UnsetType), msgspec.UNSET


def _type(shape: Shape) -> Any:  # Any: a type or a generic alias
    if isinstance(shape, str):
        return _SCALARS[shape]
    name, *inner = shape
    kinds = tuple(_type(one) for one in inner)
    if name == "list":
        return GenericAlias(list, kinds)
    if name == "dict":
        return GenericAlias(dict, (str, *kinds))
    return _either(*kinds)


def _either(*kinds: Any) -> Any:  # Any: types and generic aliases
    """One of the kinds; they are known only now, so `|` between them cannot be written."""
    return functools.reduce(operator.or_, (type(None) if kind is None else kind for kind in kinds))
