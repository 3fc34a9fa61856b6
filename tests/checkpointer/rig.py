"""Checkpointers on one loop, over real files: alone, and as ranks of a job."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any, cast

import fsspec

from ckptio import Checkpointer
from ckptio.checkpointer.steps import parse_name
from ckptio.ranks.interface import Deadlines
from ckptio.storage.resolve import local_path, remote_url
from ckptio.storage.root import LocalRoot
from ckptio.testing import EventLog, MemoryRanks
from tests.rig import (
    SMALL,
    FilesResolver,
    InlineCore,
    committed,
    context_of,
    engine_on,
    names_in,
    running_cache,
)
from tests.storage.object_rig import OneStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from ckptio import Engine
    from ckptio.config import CheckpointConfig
    from ckptio.engine.context import EngineContext
    from ckptio.storage.files import PosixFiles
    from ckptio.storage.interface import Storage
    from ckptio.storage.resolve import PathLike
    from ckptio.storage.root_interface import Root
    from tests.storage.object_rig import DictStore

DEADLINES = Deadlines(peer_s=5.0, meet_s=60.0)


class RootResolver(FilesResolver):
    """Finds what is local by the given file operations, and only checkpoints of ours."""

    def storage(self, path: PathLike, *, is_second: bool = False) -> Storage:
        if remote_url(path) is not None:
            return self.own_storage(path)
        return super().storage(path, is_second=is_second)

    def root(self, path: PathLike) -> Root:
        if remote_url(path) is not None:
            return super().root(path)
        return LocalRoot(local_path(path), self._config, self._executor, self._emit, self._files)


class RootCore(InlineCore):
    """An engine without a thread whose checkpoints are real directories."""

    def __init__(self, context: EngineContext, files: PosixFiles | None) -> None:
        super().__init__(context, {})
        context.resolver = RootResolver(context, files)
        self.files = files


def checkpointer_on(engine: Engine, root: PathLike, **options: Any) -> Checkpointer:
    """Make a checkpointer on an engine of `engines`; time is that of the loop."""
    made = Checkpointer(root, engine=engine, **{"sweep_after_s": None, **options})
    core = engine._core
    assert isinstance(core, RootCore)
    if remote_url(root) is None:
        made._core.make_root = lambda path, config, executor, emit, _: LocalRoot(
            local_path(path), config, executor, emit, core.files
        )
    made._core.clock = asyncio.get_running_loop().time
    return made


@contextlib.asynccontextmanager
async def engines(
    world_size: int = 1,
    *,
    config: CheckpointConfig = SMALL,
    files: PosixFiles | None = None,
    log: EventLog | None = None,
    seed: int = 0,
    store: DictStore | None = None,
) -> AsyncIterator[list[Engine]]:
    """Give the engines of a job on the running loop; check that they leave nothing behind.

    With `store`, `dict://` is a store that all of them see.
    """
    before = asyncio.all_tasks()
    async with contextlib.AsyncExitStack() as stack:
        group = await stack.enter_async_context(
            MemoryRanks(world_size, deadlines=DEADLINES, seed=seed, max_delay_s=0.002)
        )
        cores = []
        for ranks in group.ranks:
            context = context_of(config, log, ranks=ranks)
            if store is not None:
                context.stores = cast("Any", OneStore(store))
            cores.append(RootCore(context, files))
            await stack.enter_async_context(running_cache(context))
        yield [engine_on(core) for core in cores]
        for core in cores:
            if core.tasks:
                await asyncio.wait(core.tasks)
            assert core.context.pool.statistics().leased_nbytes == 0
            core.context.pool.close()
            await core.context.stores.close()
            core.context.end_threads()
    assert asyncio.all_tasks() == before


async def on_each(
    engines: Sequence[Engine], body: Callable[[int, Engine], Awaitable[Any]]
) -> list[Any]:
    """Run a body on every rank; gives what each returned or raised."""

    async def one(rank: int) -> Any:
        try:
            return await body(rank, engines[rank])
        except BaseException as error:  # the test looks at it
            return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(rank), name=f"rank {rank}") for rank in range(len(engines))]
    return [task.result() for task in tasks]


def committed_steps(root: Path) -> list[int]:
    """Give the steps that are committed, and check that each is whole."""
    found = []
    for name in names_in(root) if root.exists() else []:
        step = parse_name(name)
        if step is not None and committed(root / name) is not None:
            found.append(step)
    return found


def files_in(root: str) -> dict[str, list[str]]:
    """Name what is below a path or a URL, by the step it is in."""
    place, top = fsspec.url_to_fs(root)
    found: dict[str, list[str]] = {}
    for path in place.find(top):
        step, _, name = path.removeprefix(f"{top}/").partition("/")
        found.setdefault(step, []).append(name)
    return found


def steps_at(root: str) -> list[int]:
    """Name the steps at a path or a URL, and check that each is one manifest and one file.

    Of a step that was removed, its directory is gone as well.
    """
    found = files_in(root)
    assert not os.path.isdir(root) or sorted(found) == names_in(root)
    for names in found.values():
        assert [name.partition("-")[0] for name in sorted(names)] == ["data", "manifest.json"]
    return sorted(int(step.removeprefix("step-")) for step in found)
