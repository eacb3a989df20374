"""A Lightning script as anybody writes it: `lightning_fit.py CHECKPOINTS OUT [--resume CHECKPOINT]`."""

import argparse
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x_BC, y_B1 = batch
        time.sleep(given.pause)
        return torch.nn.functional.mse_loss(self.layers(x_BC), y_B1)

    def on_train_epoch_end(self) -> None:
        print(f"epoch {self.current_epoch} step {self.global_step}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


parser = argparse.ArgumentParser()
parser.add_argument("checkpoints", type=Path)
parser.add_argument("out", type=Path)
parser.add_argument("--resume")
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--pause", type=float, default=0.01)
given = parser.parse_args()

if __name__ == "__main__":
    torch.manual_seed(0)
    x_NC = torch.randn(40, 8)
    rows = torch.utils.data.TensorDataset(x_NC, x_NC.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(rows, batch_size=8)  # Lightning does not keep the order of a shuffle
    saving = ModelCheckpoint(given.checkpoints, every_n_epochs=1, save_top_k=-1)
    trainer = L.Trainer(
        max_epochs=given.epochs,
        accelerator="cpu",
        devices=1,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), loader, ckpt_path=given.resume)
    trainer.save_checkpoint(given.out / "model.ckpt", weights_only=True)
