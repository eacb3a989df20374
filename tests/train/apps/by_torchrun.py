"""A training script under plain torchrun: its run directory is the first argument."""

import sys
from pathlib import Path

import tiny
import torch

from twinhull.train.run import Run

run = Run.alone(name="fit", directory=Path(sys.argv[1]))
model = run.wrap(tiny.Net())
optimizer = run.wrap(torch.optim.AdamW(model.parameters()))
for batch in run.steps(run.loader(tiny.Data(), batch_size=16), most=1_000_000):
    model.loss(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    if run.step == 20 and run.rank == 0:
        print("step 20", flush=True)
