"""What must ranks hold alike, and how do they get rank 0's?"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


def kept_buffers(model: nn.Module) -> list[torch.Tensor]:
    """The buffers that are part of the model's state: what is not (a mask, a table) no rank changes."""
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[id(buffer)] = buffer
    return list(found.values())


@torch.no_grad()
def align(tensors: Sequence[torch.Tensor]) -> None:
    """Rank 0's values on all ranks; one message for all tensors of a type and device."""
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for together in alike.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in together])
        dist.broadcast(flat, src=0)
        parts = flat.split([tensor.numel() for tensor in together])
        for tensor, part in zip(together, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
