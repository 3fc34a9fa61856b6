"""The page's recipe for transformers' Trainer, beside the Trainer's own checkpoints."""

from __future__ import annotations

import os
import re
import subprocess
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
#: What each rank of a job runs, behind the page's own code.
JOB = """
class Counting(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        steps.append(state.global_step)

steps = []

def run_until(path, num_steps):
    torch.manual_seed(0)
    size = dict(vocab_size=100, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    arguments = TrainingArguments(
        "out", max_steps=num_steps, save_strategy="no", eval_strategy="steps", eval_steps=2,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True,
    )
    tokens = [torch.arange(i, i + 16) for i in range(64)]
    data = [{"input_ids": each, "labels": each} for each in tokens]
    every = ckptio.SaveEvery(steps=2)
    with ckptio.sync.Checkpointer(path, every=every) as checkpointer:
        trainer = ResumableTrainer(
            GPT2LMHeadModel(GPT2Config(**size)), arguments, train_dataset=data,
            eval_dataset=data[:8], callbacks=[Saving(checkpointer), Counting()],
        )
        trainer.checkpointer = checkpointer
        trainer.resume()
    return trainer.model.state_dict()

run_until("halves", 6)  # in the middle of an epoch
halves, whole = run_until("halves", 8), run_until("whole", 8)
assert all(torch.equal(halves[name], whole[name]) for name in whole)
assert steps == [*range(6), *range(6, 8), *range(8)]
"""


def code_of_recipe() -> str:
    """What the page defines, without the run that shows it."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if "class ResumableTrainer" in block)
    imports = "from typing import Any\n\nimport torch\n\nimport ckptio.sync\n"
    return imports + str(block).partition("def run_trainer")[0]


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's code, as a module."""
    module = types.ModuleType("recipe")
    monkeypatch.setitem(sys.modules, "recipe", module)
    exec(compile(code_of_recipe(), PAGE.name, "exec", dont_inherit=True), module.__dict__)  # noqa: S102  # our own page
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


def test_two_ranks_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Though each measures other times, and has other random numbers."""
    (tmp_path / "job.py").write_text(code_of_recipe() + JOB)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*command, "--nproc-per-node=2", "job.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
