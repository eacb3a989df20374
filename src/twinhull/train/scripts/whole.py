"""Is a file whole, as far as its own format can tell? Cheap looks that need neither torch nor trust in it.

A zip (everything that `torch.save` and `numpy.savez` write) has its index at the end and a checksum for each
part; safetensors says at its beginning how long it must be; JSON must parse. Other formats say nothing.
"""

import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Literal

Look = Literal["whole", "broken", "unknown"]
_ZIP = b"PK\x03\x04"
_MOST_HEADER = 100_000_000  # safetensors' own limit


def look(path: Path) -> Look:
    """What a file shows of itself; one that cannot be read is broken."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
        if path.suffix == ".safetensors":
            return "whole" if safetensors_end(path) == path.stat().st_size else "broken"
        if start == _ZIP:
            return _zip(path)
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
            return "whole"
    except (OSError, ValueError, struct.error):
        return "broken"
    return "unknown" if start else "broken"  # nobody means to save an empty file


def safetensors_end(path: Path) -> int:
    """How long a safetensors file says that it is. Raises ValueError or struct.error if it says nothing."""
    parts = safetensors_header(path)
    ends = [part["data_offsets"][1] for name, part in parts.items() if name != "__metadata__"]
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
    return 8 + length + max(ends, default=0)


def safetensors_header(path: Path) -> dict[str, dict[str, list[int]]]:
    """What a safetensors file says of its tensors, by name. Raises ValueError or struct.error."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MOST_HEADER:
            raise ValueError(f"{path} has a header of {length} bytes")
        return json.loads(file.read(length))


def _zip(path: Path) -> Look:
    """All parts are read: the index alone would not notice a hole before it."""
    try:
        with zipfile.ZipFile(path) as parts:
            return "broken" if parts.testzip() else "whole"
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError):
        return "broken"
