from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.demo.data import Feed
from bench.demo.outcome import Outcome, differences
from bench.demo.settings import Settings, step_name, step_number

_HOME = Path(__file__).parents[1]
_TINY = [
    *("--steps=8", "--every=2", "--slab-kib=16"),
    *("--layers=1", "--width=32", "--context=16", "--batch=2"),
]
_TINY_SETTINGS = Settings(steps=4, every=2, kill_at=2, layers=1, width=32, context=16, batch=2)


def run_demo(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the demo in a process of its own: it sets torch's threads and kills its children."""
    return subprocess.run(
        [sys.executable, "-m", "bench.demo", *_TINY, *options],
        cwd=_HOME,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("form", ["async", "classic"])
def test_a_killed_run_resumes_and_ends_with_the_same_bits(form: str, tmp_path: Path) -> None:
    """Killed in the save of step 6: resumed from one before, leftovers removed, curves equal.

    Steps this small are faster than a save: the one of step 4 may be under way as well.
    """
    done = run_demo("--form", form, "--root", str(tmp_path / "root"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIGKILL in the save of step 6" in done.stdout
    assert re.search("resumed from step [24]$", done.stdout, re.MULTILINE)
    assert "curves equal" in done.stdout
    rows = {" ".join(line.split()) for line in done.stdout.splitlines()}
    assert "... removed by the next save 2 of 2" in rows
    assert "losses equal, bit by bit 8 of 8" in rows
    assert "parameters, moments equal yes, every bit" in rows
    kept = {path.name for path in (tmp_path / "root" / form / "killed").iterdir()}
    assert kept == {"step-2", "step-4", "step-6", "step-8"}


def test_a_run_resumed_without_its_random_states_is_found_out() -> None:
    """The negative control: what is not restored shows in the curve, and in the exit code."""
    done = run_demo("--form", "async", "--sabotage", "rng")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search("the curves part at step [35]:", done.stdout)
    assert "curves equal" not in done.stdout


@pytest.mark.parametrize("options", [["--kill-at=3"], ["--kill-at=8"], ["--width=30"]])
def test_options_that_leave_nothing_to_show_are_usage_errors(options: list[str]) -> None:
    """Exit code 2 before anything is started."""
    assert run_demo(*options).returncode == 2


def ended(*losses: float, parameters: str = "p", moments: str = "m") -> Outcome:
    digests = {"parameters": parameters, "moments": moments}
    return Outcome(losses=[loss.hex() for loss in losses], digests=digests)


def test_equal_outcomes_have_no_differences() -> None:
    assert differences(ended(3.0, 2.5), ended(3.0, 2.5)) == []


def test_the_last_bit_of_a_loss_is_a_difference() -> None:
    [found] = differences(ended(3.0, 2.5, 2.0), ended(3.0, 2.5000000000000004, 2.0))
    assert found.startswith("the curves part at step 2")


def test_a_shorter_curve_is_a_difference() -> None:
    assert differences(ended(3.0, 2.5), ended(3.0)) == ["the curves have 2 and 1 losses"]


def test_other_parameters_or_moments_are_differences() -> None:
    assert len(differences(ended(3.0), ended(3.0, parameters="q"))) == 1
    assert len(differences(ended(3.0), ended(3.0, moments="n"))) == 1


def test_runs_that_told_nothing_are_not_equal() -> None:
    assert differences(Outcome(), Outcome()) != []


def test_step_names_and_numbers_are_inverse() -> None:
    assert step_number(step_name(12)) == 12
    assert [step_number(n) for n in ("step-", "step-x", "other-3", "manifest.json")] == [None] * 4


def test_a_feed_goes_on_from_its_position() -> None:
    """Position and generators together give the next batch again."""
    corpus = bytes(range(256)) * 8

    def feed(seed: int) -> tuple[Feed, random.Random, np.random.Generator]:
        jitter, noise = random.Random(seed), np.random.default_rng(seed)
        return Feed(corpus, _TINY_SETTINGS, jitter, noise), jitter, noise

    old, jitter, noise = feed(1)
    old.next_batch()
    state, drawn = old.state_dict(), (jitter.getstate(), noise.bit_generator.state)
    want = old.next_batch()
    new, jitter, noise = feed(2)
    new.load_state_dict(state)
    jitter.setstate(drawn[0])
    noise.bit_generator.state = drawn[1]
    assert all(torch.equal(a, b) for a, b in zip(want, new.next_batch(), strict=True))


def test_a_feed_refuses_a_position_in_another_text() -> None:
    """A run must not go on in a text that it was not trained on."""
    feeds = [
        Feed(text * 100, _TINY_SETTINGS, random.Random(0), np.random.default_rng(0))
        for text in (b"one", b"two")
    ]
    with pytest.raises(ValueError, match="saved in a text"):
        feeds[0].load_state_dict(feeds[1].state_dict())
