"""What `ls` says of each place: directories are read a few at a time, and a store many at once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ckptio._aio import run_blocking, run_some
from ckptio.checkpointer.steps import metrics_of
from ckptio.cli.find import find_checkpoints, is_foreign
from ckptio.cli.find_objects import find_objects, is_foreign_prefix, open_place
from ckptio.cli.outcome import explain, state_of
from ckptio.cli.owed import read_owed
from ckptio.errors import CheckpointError
from ckptio.runtime.solo import solo_engine
from ckptio.storage.file_names import NOTE_PREFIX
from ckptio.storage.files import absolute
from ckptio.storage.object_place import name_of
from ckptio.storage.resolve import local_path, remote_url

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from ckptio.cli.find import Found
    from ckptio.cli.find_objects import FoundObjects, Place
    from ckptio.cli.outcome import State
    from ckptio.cli.owed import Owed
    from ckptio.cli.terminal import Advance, Terminal
    from ckptio.config import CheckpointConfig
    from ckptio.engine.context import EngineContext
    from ckptio.runtime.core import EngineCore
    from ckptio.storage.interface import Storage

T = TypeVar("T")

#: Directories that are read at a time; each has its manifest in memory.
_MAX_AT_ONCE = 4
_LONG = 10  # manifests; so few are read before anybody could look at a line of progress
_MAX_TRIES = 10  # where steps come and go faster than they are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the list, and an object of the JSON document. `None` is what is not known.

    Attributes:
        path: Directory, relative to the root.
        state: What is there.
        committed: When it was committed, as the manifest says.
        nbytes: Bytes of data files; of what lies there if there is no commit.
        num_files: Data files; files that lie there if there is no commit.
        num_tensors: Tensors.
        format: Version of the format.
        writer: Version of the package that wrote it.
        save_id: Id of the save.
        metrics: What a checkpointer was given by name; text where JSON has no number for it.
        owed: Whether its copy to a second tier is still owed.
        owed_to: Where to; also `None` if the note that says so cannot be read.
        error: What is wrong.
    """

    path: str
    state: State
    committed: str | None = None
    nbytes: int | None = None
    num_files: int | None = None
    num_tensors: int | None = None
    format: int | None = None
    writer: str | None = None
    save_id: str | None = None
    metrics: dict[str, float | str] | None = None
    owed: bool | None = None
    owed_to: str | None = None
    error: str | None = None


def read_rows(
    root: str, config: CheckpointConfig, terminal: Terminal, *, depth: int, hidden: bool
) -> list[Row]:
    """Describe what is at and below a directory or URL; not what other programs have there.

    A step that is removed between the listing and the look at it has mostly made room for a newer
    one, which was committed too late to be listed: of a run that keeps one step, neither would be
    shown. So everything is listed once more then.

    Raises:
        ConfigError: The root is none, or there is no way to it.
        OSError: It cannot be listed.
    """
    rows: list[Row] = []
    for _ in range(_MAX_TRIES):
        rows = _read(root, config, terminal, depth=depth, hidden=hidden)
        if all(row.state != "missing" for row in rows):
            break
    return [row for row in rows if row.state != "missing"]


def _read(
    root: str, config: CheckpointConfig, terminal: Terminal, *, depth: int, hidden: bool
) -> list[Row]:
    """Do it once. What was removed since it was listed has the state `missing`."""
    url = remote_url(root)
    top = url or absolute(local_path(root))
    listed = [] if url else find_checkpoints(top, depth=depth, hidden=hidden)
    found = {os.path.relpath(item.path, top): item for item in listed}
    with solo_engine(dataclasses.replace(config, cache_entries=1)) as core:
        if url:
            with terminal.progress("reading", in_bytes=False) as advance:

                async def rows_below(context: EngineContext) -> list[Row]:
                    place = await open_place(context.stores, url, context.config, context.emit)
                    prefixes = await find_objects(place, depth=depth, hidden=hidden)
                    describe = functools.partial(_row_below, core, context, place)
                    return await _described(describe, prefixes, config.max_requests, advance)

                return core.call_blocking(rows_below, "list")
        progress = terminal.progress("reading", in_bytes=False)
        with progress if len(found) > _LONG else contextlib.nullcontext() as advance:

            async def rows(context: EngineContext) -> list[Row]:
                # all in one call: one for each of thousands would take as many trips to the loop
                describe = functools.partial(_row, core, context)
                return await _described(describe, [*found.items()], _MAX_AT_ONCE, advance)

            return core.call_blocking(rows, "list")


async def _described(
    describe: Callable[[T], Awaitable[Row | None]],
    found: Sequence[T],
    max_at_once: int,
    advance: Advance | None,
) -> list[Row]:
    """Describe what was found, a few at a time; not what is another program's."""
    num_done = 0

    async def one(item: T) -> Row | None:
        nonlocal num_done
        row = await describe(item)
        num_done += 1
        if advance is not None:
            advance(num_done, len(found))
        return row

    rows = await run_some(one, found, max_at_once, "read a manifest")
    return [row for row in rows if row is not None]


async def _row(core: EngineCore, context: EngineContext, item: tuple[str, Found]) -> Row | None:
    """Describe one directory; `None` if it is another program's."""
    path, found = item
    if found.error:
        return Row(path=path, state="unreadable", error=found.error)
    if found.has_manifest:
        storage = core.storage(found.path)
        try:
            return await _committed(path, storage, context, found.ours)
        except CheckpointError as error:
            state = state_of(error)
            may_be_foreign = state in ("damaged", "unreadable")  # the latter if it is a link
            if may_be_foreign and await run_blocking(context.executor, is_foreign, found):
                return None
            return Row(path=path, state=state, error=explain(error))
    if not found.ours:
        return None
    sizes = await run_blocking(context.executor, _sizes, found)
    return Row(path=path, state="no_commit", nbytes=sum(sizes), num_files=len(sizes))


def _sizes(found: Found) -> list[int]:
    """Give the sizes of the files that lie in a directory. Blocks."""
    sizes = []
    for name in found.ours:
        with contextlib.suppress(OSError):  # gone meanwhile
            sizes.append(os.lstat(f"{found.path}/{name}").st_size)
    return sizes


async def _committed(
    path: str, storage: Storage, context: EngineContext, names: Collection[str]
) -> Row:
    """Describe a checkpoint.

    Args:
        path: What it is called.
        storage: Where it is.
        context: The engine.
        names: Of the files that lie there; a note that is not among them is not looked for.

    Raises:
        CheckpointError: It cannot be read.
    """
    manifest = await context.cache.get(storage)
    owed: Owed | None = None
    if NOTE_PREFIX + manifest.save_id in names:
        owed = await read_owed(storage, manifest.save_id)
    return Row(
        path=path,
        state="committed",
        committed=manifest.created,
        nbytes=manifest.nbytes,
        num_files=len(manifest.files),
        num_tensors=len(manifest.tensors),
        format=manifest.ckptio,
        writer=manifest.writer,
        save_id=manifest.save_id,
        metrics=metrics_of(manifest.metadata),
        owed=owed is not None,
        owed_to=None if owed is None else owed.to,
    )


async def _row_below(
    core: EngineCore, context: EngineContext, place: Place, item: FoundObjects
) -> Row | None:
    """Describe one prefix; `None` if it is another program's."""
    if item.has_manifest:
        url = place.url if item.path == "." else f"{place.url}/{item.path}"
        names = {name_of(info.key) for info in item.ours}
        try:
            return await _committed(item.path, core.storage(url), context, names)
        except CheckpointError as error:
            state = state_of(error)
            if state == "damaged" and await is_foreign_prefix(place, item):
                return None
            return Row(path=item.path, state=state, error=explain(error))
    if not item.ours:
        return None
    nbytes = sum(info.nbytes for info in item.ours)
    return Row(path=item.path, state="no_commit", nbytes=nbytes, num_files=len(item.ours))
