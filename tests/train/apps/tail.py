"""Global batches that the ranks cannot share evenly: prints the gradients that each rank holds after each."""

import json
import os

import torch
from torch import nn

from twinhull.train.run import Run

run = Run.alone()
model = run.wrap(nn.Linear(3, 2))
for size in (5, 1):
    numbers = [[float(i), float(i * i % 5), 1.0] for i in range(size)]
    for x in run.steps(run.loader(numbers, batch_size=100, collate=torch.tensor)):
        model(x).pow(2).mean().backward()
    line = f"{size} {json.dumps([p.grad.flatten().tolist() for p in model.parameters()])}\n"
    os.write(1, line.encode())  # whole: two ranks write to one pipe
    model.zero_grad()
os._exit(0)
