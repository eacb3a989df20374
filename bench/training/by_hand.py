"""What a careful hand writes on PyTorch alone: DDP, a checkpoint every few steps, restarted by torchrun."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training.app import BATCH, Net, features, note

SAVE_EVERY = 5


def main() -> None:
    """STEPS steps; state in the file named on the command line."""
    path, pause_s = Path(sys.argv[1]), float(os.environ.get("PAUSE_S", "0"))
    timeout = timedelta(seconds=float(os.environ.get("HANG_S", "30")))
    dist.init_process_group("gloo", timeout=timeout)
    torch.set_num_threads(1)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    while step < int(os.environ["STEPS"]):
        numbers = torch.arange(step * BATCH + rank, (step + 1) * BATCH, ranks)
        loss = (model(features(numbers)) - (numbers % 7) / 7).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note(step, rank, float(loss.detach()), numbers)
        step += 1
        if step % SAVE_EVERY == 0 and rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)
        time.sleep(pause_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
