"""How tensors of numpy or torch become a safetensors file, and numpy arrays again; torch is not needed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from twinhull.errors import ModelRefused, TwinhullError

Array = npt.NDArray[Any]  # Any: tensors of one model have many dtypes

_DTYPES = {  # safetensors' name: numpy's; what is not here, serving could not read
    "F64": "float64", "F32": "float32", "F16": "float16", "C64": "complex64", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor ready to be written: its bytes lie in `array`, whatever its true `dtype`."""

    dtype: str
    array: Array

    def described(self) -> dict[str, Any]:  # Any: a list and a text
        """Shape and dtype for the manifest."""
        return {"shape": list(self.array.shape), "dtype": self.dtype}


def prepared(tensors: Mapping[str, Any]) -> dict[str, Tensor]:  # Any: arrays of numpy or tensors of PyTorch
    """The tensors as contiguous little-endian arrays. Raises TwinhullError for what cannot be stored."""
    if not tensors:
        raise TwinhullError("a model needs at least one tensor.")
    return {name: _prepared(name, value) for name, value in tensors.items()}


def write(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write them as one safetensors file. Raises OSError or SafetensorError."""
    specs = {
        name: safetensors.TensorSpec(
            dtype=tensor.dtype,
            shape=tensor.array.shape,
            data_ptr=tensor.array.ctypes.data,
            data_len=tensor.array.nbytes,
        )
        for name, tensor in tensors.items()
    }
    safetensors.serialize_file(specs, path)


def read(data: bytes) -> dict[str, Array]:
    """The tensors of a safetensors file, as writable arrays; bfloat16, which numpy lacks, as equal float32.

    Raises ModelRefused for what is not safetensors or has a dtype that numpy lacks.
    """
    try:
        parts = safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        raise ModelRefused(f"this is not a safetensors file: {error}.") from error
    return {name: _array(name, part["dtype"], part["shape"], part["data"]) for name, part in parts}


def _prepared(name: str, value: Any) -> Tensor:  # Any: an array of numpy or a tensor of PyTorch
    if not isinstance(name, str) or not name or name == "__metadata__":
        raise TwinhullError(f"a tensor cannot be called {name!r}.")
    dtype = ""
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            if str(value.dtype) == "torch.bfloat16":
                import torch

                value, dtype = value.contiguous().view(torch.int16), "bfloat16"
            value = value.numpy()
        array = np.asarray(value, order="C")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TwinhullError(f"tensor {name} cannot be stored: {error}.") from error
    if not hasattr(value, "dtype") or array.dtype.name not in _DTYPES.values():
        raise TwinhullError(f"tensor {name} is {_kind(value)}; a model holds plain tensors of numbers only.")
    if array.dtype.byteorder != "|":
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return Tensor(dtype or array.dtype.name, array)


def _kind(value: object) -> str:
    return f"of dtype {value.dtype}" if hasattr(value, "dtype") else f"a {type(value).__name__}"


def _array(name: str, dtype: str, shape: list[int], data: bytearray) -> Array:
    if dtype == "BF16":
        high = np.frombuffer(data, np.uint16).astype(np.uint32) << 16 if data else np.empty(0, np.uint32)
        return high.view(np.float32).reshape(shape)
    if dtype not in _DTYPES:
        raise ModelRefused(f"tensor {name} has dtype {dtype}, which serving cannot hold.")
    if not data:
        return np.empty(shape, _DTYPES[dtype])
    return np.frombuffer(data, _DTYPES[dtype]).reshape(shape)
