"""Is a call of a model's method a computation that all ranks take part in?"""

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from types import NoneType

import torch

_PLAIN = (NoneType, bool, int, float, complex, str, bytes, PurePath, torch.dtype, torch.device)


def is_plain(arguments: object) -> bool:
    """Whether nothing in these arguments can hold a tensor: such a call asks about the model.

    `configure_optimizers(lr=1e-3)` or `num_parameters()` must see the parameters as they are; `loss(batch)`
    computes with them.
    """
    if isinstance(arguments, Mapping):
        return all(is_plain(item) for item in arguments.values())
    if isinstance(arguments, (list, tuple, set)):
        items: Iterable[object] = arguments
        return all(is_plain(item) for item in items)
    return isinstance(arguments, _PLAIN)
