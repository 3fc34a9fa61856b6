"""A copy that was cut off is taken up while somebody else clears what dead saves left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING

import pytest

from ckptio._threads import Threads
from ckptio.errors import CommitConflictError, StorageError
from ckptio.testing import RecordingFiles, fail_at
from tests.rig import (
    SAVE_IDS,
    committed,
    contents_of,
    fill_attempt,
    manifest_of,
    names_in,
    root_at,
    storage_at,
    write_files,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ckptio.storage.attempt import LocalAttempt
    from ckptio.testing import Operation
    from ckptio.testing.faults import Fault

pytestmark = pytest.mark.usefixtures("no_leaks")
OLD, CUT, NEW = SAVE_IDS[:3]
CONTENTS = {save_id: contents_of(save_id, 5000, 9000) for save_id in (OLD, CUT, NEW)}


async def take_up(directory: Path, threads: Threads) -> None:
    """Make the copy after all, of what is there of it."""
    attempt = await storage_at(directory, threads).begin(CUT, overwrite=True, resumes=True)
    try:
        for name, content in CONTENTS[CUT].items():
            await attempt.keep(name, len(content))
    except StorageError:  # they are gone: they would be written again
        await attempt.abort()
        raise
    await attempt.commit(manifest_of(CUT, CONTENTS[CUT]))


def in_another_process(directory: Path) -> str:
    """Take the copy up with threads of its own; says how that ended."""
    others = Threads(1, "others")
    try:
        asyncio.run(take_up(directory, others))
    except CommitConflictError:
        return "refused"
    except StorageError:
        return "too late"
    finally:
        others.shutdown()
    return "committed"


async def clear(who: str, directory: Path, threads: Threads, files: RecordingFiles) -> None:
    """Remove what dead saves left: a run does it, or the next save to the place."""
    if who == "sweep":
        root = root_at(directory.parent, threads, files)
        await root.sweep(directory.name, -1)
    else:
        attempt = await storage_at(directory, threads, files).begin(NEW, overwrite=True)
        await attempt.abort()


@pytest.mark.parametrize("who", ["sweep", "save"])
async def test_what_was_taken_up_meanwhile_stays(
    tmp_path: Path, threads: Threads, who: str
) -> None:
    """Before each file operation: the copy is committed, whole, or refused, and done once more."""
    ends = set()
    for number in itertools.count():
        directory, told = tmp_path / str(number), list[str]()
        if who == "save":
            await write_files(storage_at(directory, threads), OLD, CONTENTS[OLD])
        cut_off = await storage_at(directory, threads).begin(CUT, overwrite=True)
        await fill_attempt(cut_off, CONTENTS[CUT])
        await cut_off.leave()

        def interrupt(
            operation: Operation,
            at: int = number,
            directory: Path = directory,
            told: list[str] = told,
        ) -> None:
            if operation.number == at:
                told.append(in_another_process(directory))

        await clear(who, directory, threads, RecordingFiles(interrupt))
        if not told:
            break
        ends |= {*told}
        if told == ["committed"]:
            assert committed(directory) == CONTENTS[CUT]
    assert {"committed", "refused"} <= ends


def cancel_at(number: int, task: asyncio.Task[LocalAttempt]) -> Fault:
    """Make a fault that cancels a task of the running loop at one operation, which goes well."""
    loop = asyncio.get_running_loop()

    def fault(operation: Operation) -> None:
        if operation.number == number:
            loop.call_soon_threadsafe(task.cancel)

    return fault


@pytest.mark.parametrize("ends", ["cancelled", "fails"])
async def test_what_was_there_stays_where_taking_it_up_is_stopped(
    tmp_path: Path, threads: Threads, ends: str
) -> None:
    """At each file operation of the beginning: who is told to stop then takes nothing along."""
    loop = asyncio.get_running_loop()
    for number in itertools.count():
        directory = tmp_path / str(number)
        cut_off = await storage_at(directory, threads).begin(CUT, overwrite=True)
        await fill_attempt(cut_off, CONTENTS[CUT])
        await cut_off.leave()
        files = RecordingFiles(fail_at(number) if ends == "fails" else None)
        storage = storage_at(directory, threads, files)
        begin = loop.create_task(storage.begin(CUT, overwrite=True, resumes=True))
        if ends == "cancelled":
            files.fault = cancel_at(number, begin)
        with contextlib.suppress(asyncio.CancelledError, StorageError):
            await (await begin).leave()
        if len(files.operations) <= number:
            break
        assert {*CONTENTS[CUT]} <= {*names_in(directory)}
    assert number > 2  # it was stopped at some
