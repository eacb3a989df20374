"""Which parts of a model repeat, so that one after the other can be sharded or computed again?"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from twinhull.errors import TwinhullError
from twinhull.train.engines.guise import Method, replace


def of(model: nn.Module) -> list[nn.Module]:
    """The blocks: those the model states, else the members of its outermost lists of like modules.

    A model states them by a method `sharded_blocks()`, or by their classes' names in `_no_split_modules`, as
    Hugging Face's do.
    """
    if callable(stated := getattr(model, "sharded_blocks", None)):
        return list(stated())
    names: Any = getattr(model, "_no_split_modules", None)  # Any: a list or a set
    if names:
        return [module for module in model.modules() if type(module).__name__ in names]
    return list(_repeated(model))


def named(found: list[nn.Module]) -> str:
    """How a person would count them: "12 x Block"."""
    kinds = Counter(type(block).__name__ for block in found)
    return ", ".join(f"{number} x {name}" for name, number in kinds.items()) or "none"


def recompute(found: list[nn.Module]) -> None:
    """Let each block keep only its inputs and compute the rest again in the backward pass.

    Raises TwinhullError if there is none.
    """
    if not found:
        raise TwinhullError(
            "`recompute` works block by block, and this model has no blocks that could be told apart.",
            hint="Give it a method sharded_blocks() that returns them, or leave `recompute` out.",
        )
    for block in found:
        replace(block, {"forward": _recomputed})


def _recomputed(_: nn.Module, real: Method, *args: Any, **kwargs: Any) -> Any:  # Any: the user's own
    if not torch.is_grad_enabled():
        return real(*args, **kwargs)
    return checkpoint(real, *args, use_reentrant=False, **kwargs)


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and _is_repeating(module):
        yield from (member for member in module if _has_parameters(member))
    else:
        for child in module.children():
            yield from _repeated(child)


def _is_repeating(members: nn.ModuleList | nn.Sequential) -> bool:
    kinds = Counter(type(member) for member in members if _has_parameters(member))
    return max(kinds.values(), default=0) > 1


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
