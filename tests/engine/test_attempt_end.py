"""What a save that failed has written: the next one goes on with it, or it goes."""

from __future__ import annotations

import asyncio
import types
from typing import Any

import pytest

from ckptio.engine.attempt_end import end_attempt
from ckptio.errors import (
    CheckpointChangedError,
    CommitConflictError,
    PlanError,
    SaveAbortedError,
    StorageError,
)
from ckptio.testing import MemoryStorage

STOPS = [StorageError("it is away", path="a"), SaveAbortedError("stopped"), KeyboardInterrupt()]
FAILURES = [CommitConflictError("a"), CheckpointChangedError("a"), PlanError("refused"), KeyError()]


@pytest.mark.parametrize("error", [*STOPS, asyncio.CancelledError(), *FAILURES], ids=repr)
@pytest.mark.parametrize("resumes", [True, False])
async def test_what_was_stopped_stays_for_who_resumes(
    error: BaseException, *, resumes: bool
) -> None:
    """What is wrong with it would be wrong the next time."""
    storage = MemoryStorage()
    attempt = await storage.begin("0" * 32, overwrite=False)
    (await attempt.create("data", 0)).pwrite(0, memoryview(b""))
    job: Any = types.SimpleNamespace(resumes=resumes)
    await end_attempt(attempt, job, error)
    assert ("data" in storage.files) is (resumes and error not in FAILURES)
    assert storage.counts.num_open_attempts == 0


@pytest.mark.parametrize(
    ("error", "in_doubt"),
    [
        (StorageError("it may stand", path="a", in_doubt=True), True),
        (StorageError("it does not stand", path="a"), False),
        (PlanError("refused"), False),
    ],
)
async def test_an_abort_meanwhile_hides_no_doubt(error: Exception, *, in_doubt: bool) -> None:
    """Whoever is told of an abort counts on it that nothing has changed."""
    began, goes_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def abort() -> None:
        began.set()
        await goes_on.wait()
        ended.set()

    attempt: Any = types.SimpleNamespace(abort=abort)
    job: Any = types.SimpleNamespace(resumes=False)
    ending = asyncio.ensure_future(end_attempt(attempt, job, error))
    await began.wait()
    ending.cancel()
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.wait((ending,))
    assert ended.is_set()
    assert ending.cancelled() is not in_doubt
    assert ending.cancelling() == (0 if in_doubt else 1)  # an abort that was not heeded is over
