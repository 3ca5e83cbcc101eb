"""Rank program of test_parallel.test_trainer_under_torchrun: the Trainer's log, eager and fused, to a JSON file."""

import json
import os
import sys

import npu_emulator.auto  # noqa: F401  before torch
import torch
from models.families import SMALL, build_model
from test_parallel import fuse, swapped
from transformers import Trainer, TrainingArguments


def train(model, directory):
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    ids = torch.randint(2, SMALL["vocab_size"], (16, 16), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]


if __name__ == "__main__":
    directory = sys.argv[1]
    eager = train(build_model("qwen3"), directory)
    model = fuse(build_model("qwen3"))
    fused = train(model, directory)
    if os.environ["RANK"] == "0":
        with open(os.path.join(directory, "log.json"), "w") as file:
            json.dump({"eager": eager, "fused": fused, "swapped": swapped(model)}, file)
