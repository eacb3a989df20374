"""Which answers does this gateway still hold, should there be no fresh one?

In memory the last answers by request, the least recently used dropped first; on the broker the same, for
other gateways and for the next life of this one.
"""

from collections import OrderedDict
from math import inf

import msgspec

OVERHEAD = 250  # bytes that an entry costs beside its value: key, objects, dictionary slot


class Kept(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=1):
    """An answer as it is kept: JSON of the value, when it was made (unix seconds), by which model version."""

    value: bytes
    at: float
    version: int | None = None


_decoder = msgspec.msgpack.Decoder(Kept)
_encoder = msgspec.msgpack.Encoder()

NOTHING = Kept(b"null", -inf)


class Memory:
    """Answers by key. It never holds more than `most_bytes` and `most` entries; a newer answer stays."""

    def __init__(self, most_bytes: float, most: int = 200_000) -> None:
        self._most_bytes = most_bytes
        self._most = most
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes) -> Kept:
        """The answer kept under a key, or NOTHING."""
        found = self._kept.get(key)
        if found is None:
            return NOTHING
        self._kept.move_to_end(key)
        return found

    def put(self, key: bytes, kept: Kept) -> bool:
        """Keep an answer, unless a newer one is there already or it is too large; whether it was kept."""
        size = len(kept.value) + OVERHEAD
        before = self._kept.get(key)
        if size > self._most_bytes or (before is not None and before.at > kept.at):
            return False
        if before is not None:
            self.num_bytes -= len(before.value) + OVERHEAD
        self._kept[key] = kept
        self._kept.move_to_end(key)
        self.num_bytes += size
        while self.num_bytes > self._most_bytes or len(self._kept) > self._most:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= len(dropped.value) + OVERHEAD
        return True


def pack(kept: Kept) -> bytes:
    """An answer as the broker keeps it."""
    return _encoder.encode(kept)


def unpack(data: object) -> Kept:
    """What the broker kept, or NOTHING if that cannot be read: a cache is never a reason to fail."""
    if not isinstance(data, bytes):
        return NOTHING
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError:
        return NOTHING
