"""DCP's saves in the background: in a thread and in a process, staged on the loop or beside it.

A process of DCP's wants a process group even where nothing is shared (`lone_group`), and gets
the staged state through shared memory, into which a stager has to stage it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is exported
from torch.distributed.checkpoint import _async_process_executor as dcp_process
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import (
    AsyncStager,
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
)

from bench.baselines import DcpPeer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from bench.states import State

_SHARED_MEMORY = "/dev/shm"  # noqa: S108  # where torch puts it
_ADDRESS = "MASTER_ADDR"


@dataclass(frozen=True, slots=True, kw_only=True)
class Underway:
    """A save that goes on.

    Attributes:
        staged: Done when the source may change.
        written: Done when all is written.
    """

    staged: Future[None]
    written: Future[None]


@contextlib.asynccontextmanager
async def waited_for(underway: Underway) -> AsyncIterator[asyncio.Future[None]]:
    """Lend a future that is done when all is written; wait for it at the end, also after an error.

    So the files are not removed while they are still being written.
    """
    written = asyncio.wrap_future(underway.written)
    try:
        yield asyncio.shield(written)  # cancelling who awaits it does not cancel `written`
    finally:
        await asyncio.wait((written,))


@dataclass(slots=True, kw_only=True)
class DcpAsync:
    """`dcp.async_save`.

    Attributes:
        peer: The writer's settings.
        stager: Reused from save to save, and closed by the caller. If not given, DCP makes
            one per save, and takes the default writer.
        is_process: Whether another process writes; calls are made in a `lone_group` then.
        how: What else there is to say of how it stages.
    """

    peer: DcpPeer
    stager: AsyncStager | None = None
    is_process: bool = False
    how: str = ""

    @property
    def name(self) -> str:
        """Its settings."""
        settings = self.peer.name.removeprefix("dcp.save (").removesuffix(")")
        where = "in a process, " * self.is_process + self.how
        return f"dcp.async_save ({where}stager {'reused' if self.stager else 'new'}, {settings})"

    def start(self, state: State, path: str) -> Underway:
        """Stage, and save in the background; blocks until staged, if the stager does."""
        if self.stager is None:
            answer = async_save(dict(state), checkpoint_id=path, no_dist=True)
        else:
            kind = (
                AsyncCheckpointerType.PROCESS if self.is_process else AsyncCheckpointerType.THREAD
            )
            answer = async_save(
                dict(state),
                storage_writer=self._writer(path),
                async_stager=self.stager,
                async_checkpointer_type=kind,
                no_dist=True,
            )
        if isinstance(answer, AsyncSaveResponse):
            return Underway(staged=answer.staging_completion, written=answer.upload_completion)
        staged: Future[None] = Future()
        staged.set_result(None)
        return Underway(staged=staged, written=answer)

    def _writer(self, path: str) -> FileSystemWriter:
        writer = self.peer.writer(path)
        if self.is_process and not self.peer.has_crc:
            writer.__class__ = _WithoutSums
        return writer


class _WithoutSums(FileSystemWriter):
    """Turns sums off in the process that it comes to, whose own setting that is."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.serialization.set_crc32_options(False)
        self.__dict__.update(state)


def reusable_stager(*, is_async: bool = False, is_shared: bool = False) -> DefaultStager:
    """Make a stager that stages into the same memory every time; the caller closes it.

    Args:
        is_async: Stage in a thread, so that `async_save` returns before.
        is_shared: Stage into memory that another process may have.
    """
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=is_shared,
        use_async_staging=is_async,
        use_non_blocking_copy=False,
    )
    return DefaultStager(options)


def pinned_stager(*, is_async: bool) -> DefaultStager:
    """Make a stager that copies from a device into pinned memory, its own, every time."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=True,
            use_shared_memory=False,
            use_async_staging=is_async,
            use_non_blocking_copy=True,
        )
    )


def caching_stager() -> BlockingAsyncStager:
    """Make the older stager that stages into the same memory every time; it blocks."""
    return BlockingAsyncStager(cache_staged_state_dict=True)


def refuses_process(nbytes: int) -> str:
    """Say why DCP cannot save `nbytes` in a process here; empty if it can."""
    if not dist.is_gloo_available():
        return "DCP's process wants gloo, which this torch has not"
    try:
        room = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return "there is no shared memory"
    free = room.f_bavail * room.f_frsize
    # who touches shared memory that is not there is killed
    return "" if free > nbytes * 1.1 else f"shared memory has {free / 1e9:.1f} GB free"


@contextlib.contextmanager
def lone_group() -> Iterator[None]:
    """Be a process group of one."""
    before = os.environ.get(_ADDRESS)
    os.environ[_ADDRESS] = "127.0.0.1"
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        if before is None:
            del os.environ[_ADDRESS]
        else:
            os.environ[_ADDRESS] = before


def start_process(path: str) -> None:
    """Start DCP's process, unless there is one, with a save of next to nothing.

    It imports what it needs, which takes seconds: no save that counts is to wait for it.
    """
    if dcp_process._CHECKPOINT_PROCESS is None:  # noqa: SLF001  # as below
        with lone_group(), contextlib.closing(reusable_stager(is_shared=True)) as stager:
            way = DcpAsync(peer=DcpPeer(), stager=stager, is_process=True)
            way.start({"nothing": torch.zeros(1)}, path).written.result()
        shutil.rmtree(path)


def end_process() -> None:
    """End DCP's process, which it keeps for as long as this one lives."""
    dcp_process._CHECKPOINT_PROCESS = None  # noqa: SLF001  # ends it; nothing public does
