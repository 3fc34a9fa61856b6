"""Notes of copies that are owed: who holds them, and what they say where that cannot be read."""

from __future__ import annotations

import errno

import pytest

from ckptio.config import KiB
from ckptio.engine.held_notes import HeldNotes
from ckptio.errors import StorageError
from ckptio.testing import MemoryStorage, Operation, fail_kind
from tests.rig import assert_same, filled_state, inline_engine
from tests.virtual import in_virtual_time

SIZES = [KiB]


@in_virtual_time
async def test_nobody_holds_the_note_of_a_save_that_was_not_committed() -> None:
    """Neither its copy, which does not begin, nor an engine that has ended."""
    near = MemoryStorage("near/a", fault=fail_kind("commit"))
    async with inline_engine({"near/a": near, "far/a": MemoryStorage("far/a")}) as engine:
        handle = engine.save(filled_state(SIZES, 1), "near/a", then="far/a")
        with pytest.raises(StorageError):
            await handle
    assert not near._place.held


async def test_an_engine_that_ends_lets_go_of_all() -> None:
    """It may be closed between a save and the beginning of its copy."""
    near, notes = MemoryStorage("near/a"), HeldNotes()
    for save_id in ("1", "2"):
        near.notes[save_id] = b""
        notes._held[save_id] = near.hold(save_id)
    await notes.close()
    assert not near._place.held
    assert notes.take("1") is None


@pytest.mark.parametrize("kind", ["read_manifest", "read_note"])
@in_virtual_time
async def test_what_a_save_replaces_need_not_be_read(kind: str) -> None:
    """It is committed, and copied, all the same."""
    kinds: list[str] = []

    def fail_before_the_commit(operation: Operation) -> None:
        kinds.append(operation.kind)
        if operation.kind == kind and "commit" not in kinds:
            raise OSError(errno.EIO, "Input/output error")

    near, far = MemoryStorage("near/a"), MemoryStorage("far/a")
    async with inline_engine({"near/a": near, "far/a": far}) as engine:
        await engine.save(filled_state(SIZES, 1), "near/a")
        near.fault = fail_before_the_commit
        state = filled_state(SIZES, 2)
        await engine.save(state, "near/a", then="far/a", overwrite=True).durable
        assert_same(await engine.load("far/a"), state)
    assert kind in kinds[: kinds.index("commit")]
