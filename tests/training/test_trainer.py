"""The recipe for transformers' Trainer, as docs/recipes.md has it, run on the NPU beside the same training without it."""

import re
from contextlib import nullcontext
from pathlib import Path

import npu_emulator
import pytest
import torch
from kernels import get_kernel
from models.families import FAMILIES, SMALL, build_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

RECIPES = Path(__file__).resolve().parents[2] / "docs/recipes.md"
STEPS = 3
# launches of a step: five norms; in each of the two layers an MLP, and q and k
BACKWARD = {"aclnnRmsNormGrad": 5, "aclnnSwiGluGrad": 2, "aclnnRotaryPositionEmbeddingGrad": 4}

npu = get_kernel("org/npu-fusion", version=1)


def recipes() -> list[str]:
    """The Python blocks of the section on the Trainer."""
    section = RECIPES.read_text().partition("## transformers Trainer\n")[2].partition("\n## ")[0]
    found = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert len(found) == 2, "one with the model in hand, one with a callback"
    return found


def surroundings(path: Path) -> dict:
    """What the recipes leave to the reader."""
    arguments = TrainingArguments(
        output_dir=str(path / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        optim="sgd",  # AdamW would turn the rounding of a tiny gradient into a step of full size
        learning_rate=0.1,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    ids = torch.randint(2, SMALL["vocab_size"], (16,), generator=torch.Generator().manual_seed(0))
    dataset = [{"input_ids": ids, "labels": ids}] * (2 * STEPS)  # one text, so that its loss falls
    return {"path": path, "arguments": arguments, "dataset": dataset}


def log(trainer: Trainer) -> list[tuple[float, float]]:
    entries = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(entries) == STEPS
    return [(entry["loss"], entry["grad_norm"]) for entry in entries]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_model("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def eager(saved) -> list[tuple[float, float]]:
    given = surroundings(saved)
    trainer = Trainer(AutoModelForCausalLM.from_pretrained(saved), given["arguments"], train_dataset=given["dataset"])
    trainer.train()
    assert npu.report(trainer.model).swapped == {}
    return log(trainer)


@pytest.mark.parametrize("recipe", recipes(), ids=["model", "callback"])
def test_the_recipe_trains_fused_and_as_eager_does(recipe, saved, eager):
    names = surroundings(saved)
    try:
        with npu_emulator.count() if npu_emulator.is_emulated() else nullcontext() as traffic:
            exec(compile(recipe, str(RECIPES), "exec"), names)
        trainer = names["trainer"]
        assert {parameter.device.type for parameter in trainer.model.parameters()} == {"npu"}
        assert npu.report(trainer.model).swapped == FAMILIES["llama"][2]
        if traffic is not None:
            launches = {name: traffic.by_op[name].launches for name in BACKWARD}
            assert launches == {name: STEPS * count for name, count in BACKWARD.items()}
        # float32 sums of at most 2**12 terms in another order: 2**-23 a rounding, the square root of 2**12 of them,
        # through some ten layers there and back; each of three steps of SGD adds its own: 2**-23 * 2**6 * 2**3.
        fused = log(trainer)
        for step in range(STEPS):
            assert fused[step] == pytest.approx(eager[step], rel=2**-14)
        assert fused[-1][0] < fused[0][0], "it learns"
    finally:
        if "model" in names:
            npu.restore(names["model"])
