"""A script with Hugging Face's Trainer: `hf_trainer.py CHECKPOINTS OUT [--resume CHECKPOINT]`."""

import argparse
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("checkpoints")
parser.add_argument("out")
parser.add_argument("--resume")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--pause", type=float, default=0.01)
given = parser.parse_args()


class Slowly(TrainerCallback):
    def on_step_end(self, *_: object, **__: object) -> None:
        time.sleep(given.pause)


class Letters(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        letters_T = (torch.arange(16) * (number % 7 + 1) + number) % 32
        return {"input_ids": letters_T, "labels": letters_T}


if __name__ == "__main__":
    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    settings = TrainingArguments(
        given.checkpoints,
        max_steps=given.steps,
        per_device_train_batch_size=4,
        save_steps=5,
        save_total_limit=3,
        logging_steps=5,
        use_cpu=True,
        report_to=[],
        learning_rate=1e-2,
        seed=1,
    )
    trainer = Trainer(GPT2LMHeadModel(shape), settings, train_dataset=Letters(), callbacks=[Slowly()])
    trainer.train(resume_from_checkpoint=given.resume)
    trainer.save_model(given.out)
