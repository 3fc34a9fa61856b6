"""Start the processes of one form, kill one of them, and judge what came out.

The driver trains nothing and imports no torch: it reads what its children tell.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench.demo.outcome import Outcome, differences
from bench.demo.settings import step_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.demo.report import Screen
    from bench.demo.settings import Settings


class DemoError(Exception):
    """A process did not do what it was started for."""


@dataclass(slots=True, kw_only=True)
class FormResult:
    """What the runs of one form have shown.

    Attributes:
        form: `"async"` or `"classic"`.
        reference: The run that nothing happened to.
        killed: The run that was killed.
        resumed: The run that went on from there.
        left: Files that the killed save had left.
        left_nbytes: Bytes they took on the disk.
        failures: What is not as it should be; empty if all is well.
    """

    form: str
    reference: Outcome
    killed: Outcome
    resumed: Outcome
    left: list[str] = field(default_factory=list)
    left_nbytes: int = 0
    failures: list[str] = field(default_factory=list)


def run_form(
    form: str, root: Path, settings: Settings, screen: Screen, *, without: Sequence[str], keep: bool
) -> FormResult:
    """Run a form three times: through; until it is killed; and on from there.

    Args:
        form: `"async"` or `"classic"`.
        root: Directory for its checkpoints.
        settings: Of all three runs.
        screen: Shows progress.
        without: Names of the state that the resumed run leaves out.
        keep: Whether checkpoints stay when their run is over.

    Raises:
        DemoError: A process failed, or did not die when it should.
    """
    through, broken = root / "uninterrupted", root / "killed"
    reference = run_worker(f"{form}: uninterrupted", form, through, settings, screen)
    if not keep:
        shutil.rmtree(through)
    killed = run_worker(f"{form}: to be killed", form, broken, settings, screen, kill=True)
    victim = broken / step_name(settings.kill_at)
    left = sorted(os.listdir(victim))
    left_nbytes = sum((victim / name).stat().st_blocks * 512 for name in left)
    screen.say(f"the killed save left {len(left)} files in {victim.name}")
    resumed = run_worker(f"{form}: resumed", form, broken, settings, screen, without=without)
    result = FormResult(
        form=form,
        reference=reference,
        killed=killed,
        resumed=resumed,
        left=left,
        left_nbytes=left_nbytes,
    )
    result.failures = differences(reference, resumed) + _stray_files(result, victim, settings)
    if resumed.resumed is None:
        result.failures.append("the resumed run found no checkpoint and began anew")
    if not keep:
        shutil.rmtree(broken)
    return result


def _stray_files(result: FormResult, victim: Path, settings: Settings) -> list[str]:
    """Check that the killed save was no checkpoint, and that the next one cleaned up."""
    found = []
    if settings.kill_at not in result.resumed.skipped:
        found.append(f"the killed save of step {settings.kill_at} was taken for a checkpoint")
    removed = sorted(result.resumed.removed.get(settings.kill_at, []))
    if removed != result.left:
        found.append(f"the killed save left {result.left}, the next one removed {removed}")
    stray = sorted(set(result.left) & set(os.listdir(victim)))
    if stray:
        found.append(f"files of the killed save are still there: {stray}")
    return found


def run_worker(
    title: str,
    form: str,
    root: Path,
    settings: Settings,
    screen: Screen,
    *,
    kill: bool = False,
    without: Sequence[str] = (),
) -> Outcome:
    """Run one training process to its end, showing what it tells.

    Raises:
        DemoError: It failed; or `kill` is set and it lived.
    """
    command = [sys.executable, "-m", "bench.demo.worker", "--form", form, "--root", str(root)]
    command += ["--settings", settings.to_json(), *(["--kill"] if kill else [])]
    command += [word for name in without for word in ("--without", name)]
    outcome = Outcome()
    screen.begin(title, settings.steps)
    home = Path(__file__).parents[2]  # where `bench` is found
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=home) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                facts = json.loads(line)
                kind = facts.pop("kind")
                outcome.take(kind, facts)
                screen.show(kind, facts)
        except BaseException:  # an interrupt: the child ends before this does
            process.kill()
            raise
    _check_end(title, process.returncode, outcome, kill=kill)
    return outcome


def _check_end(title: str, code: int, outcome: Outcome, *, kill: bool) -> None:
    """Check that a process ended as it should.

    Raises:
        DemoError: It did not.
    """
    if kill:
        if code != -signal.SIGKILL or outcome.killed is None:
            raise DemoError(f"{title}: it should have been killed in a save, but ended with {code}")
        if any(saved.step == outcome.killed.step for saved in outcome.saves):
            raise DemoError(f"{title}: the save was committed before the process died")
    elif code != 0:
        raise DemoError(f"{title}: the process ended with {code}; its error is above")
    elif not outcome.losses:
        raise DemoError(f"{title}: the process told no result")
