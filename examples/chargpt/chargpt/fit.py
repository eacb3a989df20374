"""How the model is trained: a loop as for one process, whatever it is spread over.

Under `twinhull up` the file chooses; by hand, alone or on several ranks:

    python -m chargpt.fit --text FILE
    torchrun --nproc-per-node 2 -m chargpt.fit --text FILE --engine fsdp
"""

import argparse
import math
import os
from pathlib import Path

import torch

from chargpt.model import CharGPT
from chargpt.text import WINDOW, Text, Windows, bigram_loss
from twinhull.train.run import Run

BATCH = 64
_WARM_UP = 10


def fit(run: Run) -> None:
    """Train on the text that CHARGPT_TEXT names, for CHARGPT_STEPS steps, and publish."""
    train(run, Text.read(), int(os.environ.get("CHARGPT_STEPS", "400")))


def train(run: Run, text: Text, num_steps: int) -> float:
    """Train for so many steps and publish; gives the loss on what was held back, in nats a character."""
    model = run.wrap(CharGPT(len(text.alphabet), WINDOW))
    optimizer = run.wrap(torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.1))
    schedule = run.wrap(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, num_steps)))
    windows = Windows(text.train)
    for samples in run.steps(run.loader(windows, batch_size=BATCH), most=num_steps):
        loss = model.loss(samples)
        loss.backward()
        run.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        run.report(loss=loss)
    judged = judge(model, text)
    run.publish(model, metrics={"loss": judged})
    return judged


def judge(model: CharGPT, text: Text) -> float:
    """Loss on what was held back; all ranks must call it together."""
    model.eval()
    with torch.no_grad():
        windows = Windows(text.held_back, stride=WINDOW)
        judged = [float(model.loss(windows[index][None])) for index in range(min(64, len(windows)))]
    model.train()
    return sum(judged) / len(judged)


def _rate(step: int, num_steps: int) -> float:
    """Share of the learning rate: a warm-up, then half a cosine down to a tenth."""
    if step < _WARM_UP:
        return (step + 1) / _WARM_UP
    done = (step - _WARM_UP) / max(1, num_steps - _WARM_UP)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def main() -> None:
    """Train by hand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, help="any plain text file; CHARGPT_TEXT if left out")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--engine", default="", help="ddp, fsdp, hsdp, zero-1, zero-2, zero-3")
    parser.add_argument("--run", type=Path, help="keep checkpoints and the published model in this directory")
    given = parser.parse_args()
    text = Text.read(given.text)
    run = Run.alone(name="fit", directory=given.run, engine=given.engine)
    loss = train(run, text, given.steps)
    run.finish()
    if run.rank == 0:
        print(f"loss {loss:.3f} nats a character after {run.step} steps")
        print(f"     {bigram_loss(text):.3f} is the best guess from one character alone")


if __name__ == "__main__":
    main()
