"""What do gateway and workers say to each other? Batches one way, replies the other, never a pickle.

Both are msgpack arrays whose first element is the format: a newer one is refused by its number.
Arrays of numpy and tensors of torch travel as raw bytes with their shape and type.
"""

from typing import Any, get_origin

import msgspec
import numpy as np

FORMAT = 1  # raise it when a field changes its meaning; adding one at the end does not need it
_ARRAY = 1  # msgpack extension code of an array


class Batch(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=FORMAT):
    """Rows of several requests that one task shall answer together.

    `deadline` is an instant (unix seconds): nobody waits for the answer any longer.
    `outputs` says what a row is: 0, the request's body, an object passed as keyword arguments;
    n, the outputs of the n tasks of the stage before (for n = 1 the output itself, else a list of them).
    """

    id: bytes
    task: str
    reply_to: str
    deadline: float
    rows: list[Any]  # Any: whatever the user's functions take
    outputs: int = 0


class Reply(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=FORMAT):
    """What became of a batch: one entry of `rows` per row of it, and for rows that failed the reason.

    A failed row holds None in `rows` and its reason in `errors`, by its index. All rows of a reply were
    computed with one version of the model.
    """

    id: bytes
    rows: list[Any]  # Any: whatever the user's functions return
    errors: dict[int, str] = {}
    model_version: int | None = None
    took_s: float = 0.0


class SealedReply(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=FORMAT):
    """A Reply as the gateway reads it: rows stay sealed, to be passed on to the next stage as they are."""

    id: bytes
    rows: list[msgspec.Raw]
    errors: dict[int, str] = {}
    model_version: int | None = None
    took_s: float = 0.0


def _pack(value: object) -> object:
    if type(value).__module__ == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"an array of type {value.dtype} cannot travel: its elements are Python objects")
        return msgspec.msgpack.Ext(
            _ARRAY, msgspec.msgpack.encode((value.dtype.str, value.shape, value.tobytes()))
        )
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__qualname__} cannot travel between tasks")


def _unpack(code: int, data: memoryview) -> object:
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    dtype_text, shape, raw = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], bytearray])
    dtype = np.dtype(dtype_text)
    if dtype.hasobject:
        raise ValueError("an array of Python objects is not accepted")
    return np.frombuffer(raw, dtype).reshape(shape)


def _plain(value: object) -> object:
    """What JSON can say of a value that msgspec does not know."""
    if type(value).__module__ == "torch" and hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"a {type(value).__qualname__} cannot be written as JSON")


def _fit(kind: Any, value: object) -> object:  # Any: a type or a generic alias
    """Accept an array where the user's function asks for one."""
    wanted = get_origin(kind) or kind
    if isinstance(value, np.ndarray) and getattr(wanted, "__module__", "") == "torch":
        import torch

        return torch.from_numpy(value)
    if wanted is np.ndarray and not isinstance(value, np.ndarray):
        return np.asarray(value)
    return value


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_decoder = msgspec.msgpack.Decoder(ext_hook=_unpack)
_batch_decoder = msgspec.msgpack.Decoder(Batch, ext_hook=_unpack)
_reply_decoder = msgspec.msgpack.Decoder(Reply, ext_hook=_unpack)
_sealed_decoder = msgspec.msgpack.Decoder(SealedReply)
_json_encoder = msgspec.json.Encoder(enc_hook=_plain)


def encode(message: object) -> bytes:
    """Bytes of a batch, a reply or a row. Raises TypeError for a value that cannot travel."""
    return _encoder.encode(message)


def decode(data: bytes | msgspec.Raw) -> Any:  # Any: whatever was sent
    """A row, as plain values and arrays."""
    return _decoder.decode(data)


def decode_batch(data: bytes) -> Batch:
    """A batch. Raises msgspec.MsgspecError if it is none, or one of a newer format."""
    return _batch_decoder.decode(data)


def decode_reply(data: bytes) -> Reply:
    """A reply with its rows opened. Raises msgspec.MsgspecError if it is none, or one of a newer format."""
    return _reply_decoder.decode(data)


def decode_sealed(data: bytes) -> SealedReply:
    """A reply with its rows sealed. Raises msgspec.MsgspecError if it is none, or one of a newer format."""
    return _sealed_decoder.decode(data)


def to_json(value: object) -> bytes:
    """JSON of a value, arrays as lists. Raises TypeError for what JSON cannot say."""
    return _json_encoder.encode(value)


def fit(value: object, kind: Any) -> Any:  # Any: a type or a generic alias; a value of it
    """A decoded row as the type a function asks for. Raises msgspec.ValidationError if it does not fit."""
    return msgspec.convert(value, kind, dec_hook=_fit)
