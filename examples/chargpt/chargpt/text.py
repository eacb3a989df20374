"""A text as numbers: windows of characters to train on, the rest to be judged by."""

import os
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

WINDOW = 64
_LEAST = 20 * WINDOW
_HELD_BACK = 0.1  # the last part of the text is never trained


@dataclass(frozen=True)
class Text:
    """A text, its alphabet, and its characters as numbers: `train` and what was held back."""

    alphabet: str
    train: Tensor
    held_back: Tensor

    @classmethod
    def read(cls, path: Path | None = None) -> "Text":
        """The text in a file: the one given, else the one that CHARGPT_TEXT names, else one made up."""
        named = path or os.environ.get("CHARGPT_TEXT")
        if not named:
            print(
                "chargpt: no text given (CHARGPT_TEXT=FILE or --text FILE); training on one made up",
                flush=True,
            )
            return cls.of(made_up())
        try:
            content = Path(named).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise SystemExit(f"chargpt: {named} cannot be read: {error.strerror}") from error
        if len(content) < _LEAST:
            raise SystemExit(
                f"chargpt: {named} has {len(content)} characters; take one with {_LEAST} or more"
            )
        return cls.of(content)

    @classmethod
    def of(cls, content: str) -> "Text":
        """A text given as such."""
        alphabet = "".join(sorted(set(content)))
        number = {character: index for index, character in enumerate(alphabet)}
        numbers = torch.tensor([number[character] for character in content])
        cut = int(len(numbers) * (1 - _HELD_BACK))
        return cls(alphabet, numbers[:cut], numbers[cut:])


def made_up(num_words: int = 200_000, seed: int = 0) -> str:
    """A text of made-up words, frequent and rare ones as in a language, in sentences."""
    chance = random.Random(seed)
    syllables = [a + b for a in "bcdfglmnprst" for b in "aeiou"]
    words = ["".join(chance.choices(syllables, k=chance.choice((1, 2, 2, 3)))) for _ in range(2000)]
    picked = iter(chance.choices(words, weights=[1 / (rank + 1) for rank in range(2000)], k=num_words))
    return " ".join(f"{word}.\n" if chance.random() < 0.1 else word for word in picked)


class Windows:
    """Overlapping pieces of a text: a sample is WINDOW characters and the one after each of them."""

    def __init__(self, numbers: Tensor, stride: int = WINDOW // 4) -> None:
        self._numbers, self._stride = numbers, stride

    def __len__(self) -> int:
        return (len(self._numbers) - WINDOW - 1) // self._stride + 1

    def __getitem__(self, index: int) -> Tensor:
        begin = index * self._stride
        return self._numbers[begin : begin + WINDOW + 1]

    def __getitems__(self, indices: list[int]) -> Tensor:
        return torch.stack([self[index] for index in indices])


def bigram_loss(text: Text) -> float:
    """Nats a character of the best guess from the character before alone: what a model must beat."""
    size = len(text.alphabet)
    pairs = torch.ones(size, size)  # one of each, so that no pair is impossible
    pairs.index_put_((text.train[:-1], text.train[1:]), torch.tensor(1.0), accumulate=True)
    chances = (pairs / pairs.sum(1, keepdim=True)).log()
    return -float(chances[text.held_back[:-1], text.held_back[1:]].mean())
