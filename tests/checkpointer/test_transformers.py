"""The page's recipe for transformers' Trainer, beside the Trainer's own checkpoints."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptio
import ckptio.sync

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

PAGE = Path(ckptio.__file__).parent / "checkpointer" / "README.md"
PATIENCE = 5


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the page defines, without the run that shows it."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if "class ResumableTrainer" in block)
    module = types.ModuleType("recipe")
    module.__dict__.update(torch=torch, ckptio=ckptio, Any=Any)
    monkeypatch.setitem(sys.modules, "recipe", module)
    code = compile(block.partition("def run_trainer")[0], PAGE.name, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102  # our own page
    return module


def make_trainer(kind: type, callbacks: list[Any], **options: Any) -> Any:
    """A trainer whose loss never gets better."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=100, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    arguments = transformers.TrainingArguments(
        "out",
        max_steps=40,
        eval_strategy="steps",
        eval_steps=2,
        learning_rate=0.0,
        metric_for_best_model="loss",
        greater_is_better=False,
        restore_callback_states_from_checkpoint=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    tokens = [torch.arange(i, i + 16) for i in range(64)]
    data = [{"input_ids": each, "labels": each} for each in tokens]
    return kind(
        transformers.GPT2LMHeadModel(config),
        arguments,
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=[transformers.EarlyStoppingCallback(PATIENCE), *callbacks],
    )


def stop_at(last: int) -> Any:
    """A callback that ends the training."""

    class Stop(transformers.TrainerCallback):  # type: ignore[misc, name-defined]  # untyped
        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            control.should_training_stop |= state.global_step == last

    return Stop()


def run_recipe(recipe: Any, path: str, last: int, scaler: Any = None) -> Any:
    """Train up to a step, from the newest one that is there."""
    every = ckptio.SaveEvery(steps=2)
    with ckptio.sync.Checkpointer(path, every=every) as checkpointer:
        callbacks = [stop_at(last), recipe.Saving(checkpointer)]
        trainer = make_trainer(recipe.ResumableTrainer, callbacks, save_strategy="no")
        trainer.checkpointer, trainer.accelerator.scaler = checkpointer, scaler
        trainer.resume()
    return trainer


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_patience_goes_on_where_it_was(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed is stopped early at the step of one that was not, as the Trainer's."""
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    make_trainer(transformers.Trainer, [stop_at(8)], **options).train()
    theirs = make_trainer(transformers.Trainer, [], **options)
    theirs.train(resume_from_checkpoint="out/checkpoint-8")
    whole = run_recipe(recipe, "whole", 40)
    run_recipe(recipe, "halves", 8)
    resumed = run_recipe(recipe, "halves", 40)
    stopped = 2 + 2 * PATIENCE  # the first evaluation is the best one
    assert [each.state.global_step for each in (theirs, whole, resumed)] == [stopped] * 3


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_a_loss_scale_goes_on_where_it_was(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fp16=True, the Trainer has a scaler, whose state is part of the run."""
    monkeypatch.chdir(tmp_path)
    scalers = [torch.amp.GradScaler("cpu", growth_interval=3) for _ in range(3)]
    run_recipe(recipe, "whole", 10, scalers[0])
    run_recipe(recipe, "halves", 4, scalers[1])
    run_recipe(recipe, "halves", 10, scalers[2])
    assert scalers[0].get_scale() == 2.0**19
    assert scalers[2].state_dict() == scalers[0].state_dict()
