"""A GPT in its plainest form. Shapes: B samples, T characters, D width, V characters of the alphabet."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """One layer: look back at earlier characters, then think."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self._attend(self.before_attention(x_BTD))
        return x_BTD + self.mlp(self.before_mlp(x_BTD))

    def _attend(self, x_BTD: Tensor) -> Tensor:
        heads = [
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.query_key_value(x_BTD).chunk(3, dim=-1)
        ]
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(-2))


class CharGPT(nn.Module):
    """Characters in, the chance of each next character out."""

    def __init__(self, alphabet: int, window: int, width: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.character, self.position = nn.Embedding(alphabet, width), nn.Embedding(window, width)
        self.blocks = nn.ModuleList(
            Block(width, heads) for _ in range(layers)
        )  # these are sharded one by one
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, alphabet, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02 if "out" not in name else 0.02 / (2 * layers) ** 0.5)

    def forward(self, characters_BT: Tensor) -> Tensor:
        places = torch.arange(characters_BT.shape[1], device=characters_BT.device)
        x_BTD = self.character(characters_BT) + self.position(places)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))

    def loss(self, samples_BT: Tensor) -> Tensor:
        """Nats a character."""
        logits_BTV = self(samples_BT[:, :-1])
        return functional.cross_entropy(logits_BTV.flatten(0, 1), samples_BT[:, 1:].flatten())
