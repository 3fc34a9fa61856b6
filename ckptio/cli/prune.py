"""`ckptio prune`: remove the steps of a run that nobody wants to keep.

A step whose copy to a second tier is owed is the only one there is, whoever else may have
seen it: it stays, as it does when a `Checkpointer` looks after the run. The note that says so
is written before the commit, so that a committed step without one never gets one.
"""

from __future__ import annotations

import asyncio
import os
import re
from typing import TYPE_CHECKING, Any

from ckptio._aio import run_all, run_blocking
from ckptio.checkpointer.keeper import Keeper, Removal
from ckptio.checkpointer.metrics import metrics_in, unmeasured
from ckptio.checkpointer.steps import step_name
from ckptio.cli.config import config_for
from ckptio.cli.outcome import FAILED, FINE, explain
from ckptio.cli.owed import Owed, read_owed
from ckptio.cli.terminal import Terminal
from ckptio.cli.text import count, format_nbytes, visible
from ckptio.errors import CheckpointError, ConfigError, StorageError
from ckptio.events import CleanupFailed
from ckptio.plan.retention import KeepAny, KeepBest, KeepEvery, KeepLast, KeepSteps
from ckptio.storage.keys import shown_url
from ckptio.storage.resolve import remote_url, resolve_storage
from ckptio.storage.root import resolve_root
from ckptio.storage.stores import open_stores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.config import CheckpointConfig
    from ckptio.events import Event
    from ckptio.plan.retention import Retention, StepRecord

    Json = dict[str, Any]

_BEST = re.compile(r"(.+?)(?::([0-9]{1,18}))?:(min|max)", re.DOTALL)


def run(
    root: str,
    *,
    last: int | None,
    every: int | None,
    best: Sequence[str],
    pins: Sequence[int],
    even_owed: bool,
    dry_run: bool,
    storage_options: Sequence[str],
    as_json: bool,
) -> int:
    """Remove what is not kept, and give the exit code."""
    terminal = Terminal()
    pruning = _Pruning(root, even_owed=even_owed, dry_run=dry_run)
    error = None
    try:
        policy = make_policy(last, every, best, pins)
        asyncio.run(pruning.run(policy, config_for([root], storage_options)))
    except CheckpointError as problem:
        error = explain(problem)
    if as_json:
        terminal.json(pruning.document(error))
    elif error is None or pruning.has_begun:
        terminal.lines(pruning.lines())
    for text in (*pruning.problems(), *([f"{shown_url(root)}: {error}"] if error else ())):
        terminal.message(text)
    return FAILED if error or pruning.has_failed else FINE


def make_policy(
    last: int | None, every: int | None, best: Sequence[str], pins: Sequence[int]
) -> KeepAny:
    """Make a policy of what was asked for.

    Raises:
        ConfigError: Nothing was, or something that means nothing.
    """
    policies: list[Retention] = []
    if last is not None:
        policies.append(KeepLast(last))
    if every is not None:
        policies.append(KeepEvery(steps=every))
    policies += [_best(text) for text in best]
    if not policies:
        raise ConfigError("say what to keep: --keep-last, --keep-every or --keep-best")
    return KeepAny((*policies, KeepSteps(*pins)))


def require_metrics(policy: KeepAny, records: Sequence[StepRecord]) -> None:
    """Refuse to keep the best by a metric that nobody measured: mostly a mistyped name.

    Raises:
        ConfigError: No step has it.
    """
    for metric in unmeasured(policy, records) if records else ():
        known = metrics_in(records)
        others = f", but {', '.join(map(repr, known))}" if known else ""
        raise ConfigError(f"no step has a metric {metric!r}{others}; nothing was removed")


def require_steps(policy: KeepAny, steps: Sequence[int]) -> None:
    """Refuse to pin a step that is not there: mostly a mistyped number, and what was meant goes.

    Raises:
        ConfigError: There are steps, but not this one.
    """
    for part in policy.policies:
        missing = part.steps.difference(steps) if isinstance(part, KeepSteps) and steps else ()
        if missing:
            raise ConfigError(f"there is no step {min(missing)} to pin; nothing was removed")


def _best(text: str) -> KeepBest:
    """Read `METRIC:min`, `METRIC:max`, or the same with a number, `METRIC:NUMBER:max`.

    What is neither number nor mode belongs to the name, as in `val:loss`; a mistyped one is a
    name that nobody measured, which is refused.
    """
    match = _BEST.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--keep-best is METRIC:min, METRIC:max or METRIC:NUMBER:max (the lowest, or the"
            f" highest values are the best), not {text!r}"
        )
    metric, number, mode = match.groups()
    return KeepBest(int(number or 1), metric, "max" if mode == "max" else "min")


class _Pruning:
    """What is done, and what became of it."""

    def __init__(self, root: str, *, even_owed: bool, dry_run: bool) -> None:
        self._root = root
        self._even_owed = even_owed
        self._dry_run = dry_run
        self._kept: list[int] = []
        self._unreadable: list[int] = []
        self._owed: list[tuple[int, Owed]] = []
        self._removals: list[Removal] = []
        self._leftovers: list[CleanupFailed] = []

    @property
    def has_begun(self) -> bool:
        """Whether anything was removed, or tried to be."""
        return bool(self._removals)

    @property
    def has_failed(self) -> bool:
        """Whether something that should have been removed may still be there."""
        return bool(self._leftovers) or any(removal.error for removal in self._removals)

    async def run(self, policy: KeepAny, config: CheckpointConfig) -> None:
        """Decide, and remove unless that is not wanted.

        Raises:
            ConfigError: The root is none, or is not there, or no step has a metric by which to
                decide, or there is no step of a pin.
            StorageError: It cannot be listed, or a manifest cannot be read now.
        """
        async with open_stores(config, "ckptio-prune") as (threads, stores):
            root = resolve_root(self._root, config, threads, self._hear, stores)
            keeper = Keeper(root, threads, self._hear)
            if remote_url(self._root) is None and not await run_blocking(
                threads, os.path.exists, root.path
            ):
                raise ConfigError("there is no such directory")
            found = await keeper.find()  # once: in a store, it is a request for each step
            doomed = list((await keeper.plan(policy, found=found)).items())
            records = keeper.known
            require_metrics(policy, records)
            good = {record.step for record in records}
            self._unreadable = await keeper.unread(found)
            require_steps(policy, [*good, *self._unreadable])
            self._kept = sorted(good - {step for step, _ in doomed})

            async def let_go(step: int, save_id: str) -> Removal | Owed:
                if not self._even_owed:
                    path = root.join(step_name(step))
                    storage = resolve_storage(path, config, threads, self._hear, stores)
                    if (owed := await read_owed(storage, save_id)) is not None:
                        return owed
                if self._dry_run:
                    return Removal(step=step, nbytes=await keeper.size(step))
                return await keeper.remove(step, save_id)

            at_once = keeper.max_removals
            for start in range(0, len(doomed), at_once):
                some = doomed[start : start + at_once]
                ends = await run_all([let_go(*each) for each in some], "remove a step")
                self._note([step for step, _ in some], ends)

    def _note(self, steps: Sequence[int], ends: Sequence[Removal | Owed]) -> None:
        """Take note of what became of some steps.

        Raises:
            StorageError: The storage did not answer: nor will it for the steps that come next.
        """
        self._owed += [
            (s, end) for s, end in zip(steps, ends, strict=True) if isinstance(end, Owed)
        ]
        removals = [end for end in ends if isinstance(end, Removal)]
        self._removals += removals
        for removal in removals:
            if removal.error is not None and removal.is_unanswered:
                raise removal.error

    def _hear(self, event: Event) -> None:
        if isinstance(event, CleanupFailed) and event.file:
            self._leftovers.append(event)

    def document(self, error: str | None) -> Json:
        """Give the JSON document."""
        return {
            "root": shown_url(self._root),
            "dry_run": self._dry_run,
            "removed": [
                {
                    "step": removal.step,
                    "path": step_name(removal.step),
                    "nbytes": removal.nbytes,
                    "error": _why(removal.error),
                }
                for removal in self._removals
            ],
            "owed": [
                {"step": step, "path": step_name(step), "owed_to": owed.to}
                for step, owed in self._owed
            ],
            "kept": [{"step": step, "path": step_name(step)} for step in self._kept],
            "unreadable": [{"step": s, "path": step_name(s)} for s in self._unreadable],
            "error": error,
        }

    def lines(self) -> list[str]:
        """Say it in lines: one a step, and a sum."""
        verb = "would remove" if self._dry_run else "removed"
        gone = [removal for removal in self._removals if removal.error is None]
        lines = [f"{verb} {step_name(r.step)}  {format_nbytes(r.nbytes)}" for r in gone]
        nbytes = format_nbytes(sum(removal.nbytes for removal in gone))
        left = "would leave" if self._dry_run else "left"
        lines += [f"{left} {step_name(step)}  {visible(str(owed))}" for step, owed in self._owed]
        if not (self._kept or self._unreadable):  # one step is kept, if there are any
            return [f"there are no steps of a Checkpointer in {visible(shown_url(self._root))}"]
        total = f"{verb} {count(len(gone), 'step')}, {nbytes}; kept {len(self._kept)}"
        owed = f", left {len(self._owed)} whose copy is owed" if self._owed else ""
        lines.append(total + owed)
        return lines

    def problems(self) -> list[str]:
        """Say what went wrong, a line each."""
        found = [
            f"{step_name(r.step)} is still there: {_why(r.error)}"
            for r in self._removals
            if r.error
        ]
        found += [f"{visible(e.path)}/{e.file}: {e.error.strerror}" for e in self._leftovers]
        found += [
            f"{step_name(step)} cannot be read; it counts for nothing and was left alone"
            for step in self._unreadable
        ]
        return found


def _why(error: Exception | None) -> str | None:
    if isinstance(error, StorageError):
        return error.message
    return None if error is None else str(error)
