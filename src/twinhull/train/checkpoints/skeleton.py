"""How does a state become flat tensors and a skeleton, and a state again?

The skeleton is the nested state with a `Piece` where a tensor was. It is small, copied when it is made, and
readable with `weights_only=True`. The pieces go to the shards under their keys.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Tree = Any  # Any: nested dicts, lists and tuples with whatever a checkpoint can hold at their ends


@dataclass(frozen=True, slots=True)
class Piece:
    """Stands for a tensor: its key in the shards, its shape over all ranks and its type.

    Checkpoints hold it by this name: a move of the class needs a new format.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def take_apart(state: Tree, prefix: str, found: dict[str, torch.Tensor]) -> Tree:
    """The skeleton of a state; its tensors are put into `found`, neither copied nor detached from its life.

    The keys follow from the order of the state alone, so ranks agree on them. Tensors that share their
    memory (tied weights) share their key.
    """
    tied: dict[tuple[object, ...], str] = {}

    def place(tensor: torch.Tensor, path: str) -> object:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            return tensor.detach().clone()  # DCP cannot write these; they are rare and small
        memory = _memory(tensor)
        key = tied.get(memory, "")
        if not key:
            key = path
            while key in found:  # {1: ...} beside {"1": ...}
                key += "'"
            found[key] = tensor
            if memory:
                tied[memory] = key
        return Piece(key, tuple(tensor.shape), tensor.dtype)

    return _mapped(state, prefix, place)


def put_together(skeleton: Tree, tensors: Mapping[str, torch.Tensor]) -> Tree:
    """The state that a skeleton was made of, with these tensors."""
    return _mapped(skeleton, "", lambda end, _: tensors[end.key] if isinstance(end, Piece) else end)


def pieces(skeleton: Tree, beside: Tree) -> Iterator[tuple[Piece, Tree]]:
    """Each piece of a skeleton, with what stands at its place in a state of like structure, or None.

    A tensor beside a whole branch stands for every place in that branch.
    """
    if isinstance(skeleton, Piece):
        yield skeleton, beside
    elif isinstance(skeleton, Mapping):
        for name, item in skeleton.items():
            yield from pieces(item, beside.get(name) if isinstance(beside, Mapping) else _whole(beside))
    elif isinstance(skeleton, (list, tuple)):
        row = beside if isinstance(beside, (list, tuple)) else ()
        for index, item in enumerate(skeleton):
            yield from pieces(item, row[index] if index < len(row) else _whole(beside))


def unfit(value: object, where: str) -> Iterator[str]:
    """The places in a state that a checkpoint cannot hold, each with what stands there."""
    kind = type(value)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.Tensor):
        if kind.__module__ == "numpy":  # a numpy float is a float to Python, not to torch.load
            yield f"{where} is a {kind.__module__}.{kind.__name__}"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from unfit(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple, set)) and not hasattr(value, "_fields"):
        for index, item in enumerate(value):
            yield from unfit(item, f"{where}[{index}]")
    else:
        yield f"{where} is a {kind.__module__}.{kind.__name__}"


def _mapped(value: Tree, path: str, change: Callable[[Any, str], object]) -> Tree:  # Any: an end of the tree
    """A copy of the nested value with each of its ends changed."""
    if isinstance(value, Mapping):
        made: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
        for name, item in value.items():
            made[name] = _mapped(item, f"{path}/{name}", change)
        if isinstance(value, OrderedDict):  # a module's carries the versions that load_state_dict reads
            vars(made).update(vars(value))
        return made
    if isinstance(value, list):
        return [_mapped(item, f"{path}/{index}", change) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return tuple(_mapped(item, f"{path}/{index}", change) for index, item in enumerate(value))
    if isinstance(value, set):
        return set(value)
    return change(value, path) if isinstance(value, (torch.Tensor, Piece)) else value


def _whole(beside: Tree) -> Tree:
    return beside if isinstance(beside, torch.Tensor) else None


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """What only tensors of the same content have in common; empty where ranks might see it differently."""
    if isinstance(tensor, DTensor) or tensor.numel() == 0:
        return ()
    return tensor.data_ptr(), tensor.device, tuple(tensor.shape), tensor.stride(), tensor.dtype
