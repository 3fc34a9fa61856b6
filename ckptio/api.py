"""The face: an engine.

Everything here may be called from any asyncio loop, several at once. The work is done on
the engine's own loop; the caller's is only waited on. A blocking twin of the same name
is in `ckptio.sync`; functions that open an engine for one call are in `ckptio.calls`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptio._aio import returns_coroutine
from ckptio._own_thread import in_own_thread
from ckptio.engine.asked import Asked
from ckptio.engine.verify import VerifyReport, run_verify
from ckptio.handle import SaveHandle
from ckptio.runtime.core import EngineCore
from ckptio.runtime.currents import CallerCurrents
from ckptio.runtime.drive import drive
from ckptio.runtime.gauges import Gauges
from ckptio.runtime.leaving import end_saves, is_breaking_off
from ckptio.runtime.prewarm import prewarm

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from types import TracebackType
    from typing import Self

    import torch

    from ckptio.config import CheckpointConfig
    from ckptio.engine.asked import Strict, T
    from ckptio.events import Observer
    from ckptio.format.manifest import Manifest
    from ckptio.ranks.discover import RanksLike
    from ckptio.runtime.flows import LoadResult
    from ckptio.runtime.slices import Index
    from ckptio.state.select import Select
    from ckptio.storage.resolve import PathLike


class Engine(Gauges):
    """Saves and loads, with a loop, a pool and a metadata cache of its own.

    Use it as `async with Engine(config) as engine:` and keep it for the whole run: from
    the second save on it takes no memory and makes no plan. Leaving the block waits for
    what is in flight, copies that earlier runs owed included, and raises the error of a save
    that nobody waited for; the log has it before, when the next save begins. Leaving it by an
    error aborts what is in flight; `sys.exit()` is none. The end of the program waits for one
    left open, and for what one has begun that nobody has any more.

    Args:
        config: Options; the defaults if not given.
        observer: Called with each event, on any thread; must return soon. See `ckptio.events`.
        ranks: Who takes part. `"auto"`: all ranks of the process group that is initialised,
            or of torchrun's job; this process alone where there is neither. A process
            group: its ranks. `"solo"`: this process alone. With several ranks, each of
            them has to enter an engine (which waits for the others) and to call `save`
            and `load` alike and in the same order; everything else is each rank's own.
            When one is lost, the others leave their engines and open new ones.

    Raises:
        PeerLostError: On entering: ranks did not come within `meet_timeout_s`.
        ConfigError: On entering: ranks have no way to meet, or this one is not in the group.
    """

    def __init__(
        self,
        config: CheckpointConfig | None = None,
        *,
        observer: Observer | None = None,
        ranks: RanksLike = "auto",
    ) -> None:
        self._core = EngineCore(config, observer, ranks)

    async def __aenter__(self) -> Self:
        """Start the engine's thread."""
        started: list[bool] = []

        def start() -> None:
            self._core.start()
            started.append(True)

        try:
            await in_own_thread(start, self._core.stop_starting)
        except BaseException:
            if started:  # cancelled meanwhile: a block that is not entered is not left either
                await in_own_thread(self._core.close)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for what is in flight, or abort it; then give everything back.

        Cancelling the wait aborts what is in flight, and is raised when that has ended.
        """
        await in_own_thread(
            lambda: self._core.close(abort=is_breaking_off(error)), self._core.abort_in_flight
        )
        end_saves(list(self._core.saves), error)

    def save(
        self,
        state: Any,
        path: PathLike,
        *,
        overwrite: bool = False,
        then: PathLike | None = None,
    ) -> SaveHandle:
        """Start saving a state; returns at once.

        The state is taken apart here and now; its tensors are copied in the background.
        Do not change them before `await handle.staged`. `await handle` is the commit; of a
        state that was changed too early, as far as autograd counts it, it raises `StateError`.

        A state on the CPU is copied, and not referred to after `staged`. If nobody waits for
        `staged`, the tensors are kept until the files are written, and are checked for changes
        once more then. One on CUDA is copied on a side stream, behind what the current stream has
        been told so far; `handle.fence()` puts the current stream behind the copies instead of
        waiting. Before you capture a CUDA graph, `await handle.staged`: other threads must not ask
        for the state of a device meanwhile (unless the capture is `thread_local` or `relaxed`).

        Each of several ranks gives its part of one state: its blocks of sharded tensors
        (DTensor, ShardedTensor, `ckptio.Shard`), and what it has alike with others, which
        one of them writes. Values have to be equal on all ranks that have them, or be
        `ckptio.PerRank`; tensors and arrays of one name are taken for equal, unread. All
        ranks commit or none: `await handle` raises a `RankError` on all (`PeerLostError` if
        a rank died, froze or did not come). All have to see the file system of `path`.

        Args:
            state: Any nesting of dicts, lists, tuples and sets with tensors, arrays,
                numbers, strings, bytes, dates, paths, dataclasses, enums and the like.
                Objects with `state_dict` and `load_state_dict` stand for their state.
            path: A directory that need not exist; its parents neither.
            overwrite: Replace a checkpoint that is there; it can be loaded until the new
                one is committed, and goes then. On both tiers. Without it, `await handle`
                raises `CheckpointExistsError` where there is one of ours.
            then: A second tier: another path or URL, to which the checkpoint is copied in
                the background once it is committed, from its files and verified.
                `await handle.durable` is the commit there. What an error or a kill left
                unfinished is noted beside the checkpoint; `finish_copies` makes it, or the next
                engine that saves with `then` into the directory, before it is left.
                It must not hold a password.

        Raises:
            UnsupportedLeafError: A value has no portable form. Nothing was written; on other
                ranks, `await handle` raises a `RankError` that says so.
            StateError: A CUDA graph is being captured, or a device has failed.
            ConfigError: `path` or `then` is none, or both are one; by a link, `await handle` says.
            EngineClosedError: The engine is not open.
        """
        from ckptio.runtime.flows import begin_save  # noqa: PLC0415  # imports torch

        return SaveHandle(begin_save(self._core, state, path, overwrite=overwrite, then=then))

    async def finish_copies(self, root: PathLike) -> tuple[str, ...]:
        """Make the copies that earlier runs owed to a second tier (`save(..., then=)`).

        Files that are there whole are not sent again. A copy that somebody else makes just now is
        left to them; one whose place has a newer checkpoint is not owed any more. With several
        ranks, call it on rank 0, or on all.

        Args:
            root: A checkpoint, or a directory of checkpoints.

        Returns:
            Where copies were made.

        Raises:
            CheckpointError: One could not be made or looked at, the first of them; all were tried.
            StorageError: The directory cannot be listed, or (but for URLs) is not there.
            EngineClosedError: The engine is not open.
        """
        from ckptio.runtime.owed_copies import finish_copies  # noqa: PLC0415  # where it is needed

        return await self._core.call(lambda context: finish_copies(root, context), "finish copies")

    @returns_coroutine
    def load(
        self,
        path: PathLike,
        into: T | None = None,
        *,
        then: PathLike | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        select: Select | None = None,
        strict: Strict = "raise",
        types: Sequence[type] = (),
    ) -> Coroutine[Any, Any, T]:
        """Load a state.

        Without `into` the state is rebuilt as it was saved; tied tensors come back tied.
        With it, tensors and arrays of the target are filled in place, with no second
        copy of the state in memory; dicts and lists are updated (a list that holds nothing to
        fill takes all that is stored, of any length); stateful objects are given their state;
        and the target is returned. Where two names of it are one tensor
        (tied weights), or one stateful object, and two in the checkpoint, the first is loaded,
        and a note of the report, or the log, says so: nobody knows which of them was meant. A
        list, a dict or a dataclass of that kind becomes two.

        An object whose `load_state_dict` is not torch's own is given new tensors, since it may
        write to its own while it reads them: until it returns, there are two of each, on their
        device. So it is with what a module has below a hook that runs before
        `load_state_dict`, or a `_load_from_state_dict`, that is not torch's. In place there,
        too, are blocks of sharded tensors, and tensors of the modules and optimizers that the
        object has as attributes: those it hands on to.

        No byte of the target changes before the sizes of all files that are needed (without
        `select`, of all) were checked, and no block lands before its checksum was. If a later
        block turns out damaged, those that were right have landed: reload another checkpoint.

        Each of several ranks has a target of its own, or none: sharded targets take their
        blocks, whatever ranks, mesh and placement wrote them; all else is whole. No target
        changes on any rank before all fit. A rank that has no `ckptio.PerRank` value in the
        checkpoint finds it missing, or gets `None` without a target.

        On CUDA, a target is filled behind what the current stream was told before this was called,
        also where what it returns is awaited elsewhere and later, as in a task.

        Modules on the meta device get new parameters: an optimizer made before is refused. So is
        state of another class of torch's optimizers (before torch 2.7 nothing tells Adam from
        AdamW) or of parameters of other shapes; for DTensors see `ckptio/ranks/README.md`.
        Dataclasses in `into` are filled in place, field by field; what a `load_state_dict` raises
        comes as `TargetError`, when all bytes have landed.

        Args:
            path: A checkpoint.
            into: What to fill.
            then: A second tier, as `save` takes it: read instead, with an event, where the first
                has none or is cut, or is older and owes no copy; by one rank, where it is damaged.
            device: Where new tensors go; of `into`, for what is on the meta device, or `None` yet.
            dtype: Convert floating-point tensors to this, step counts of optimizers too:
                `select` what is meant. With `into`: allow targets that have it, not `None`. Nothing
                is ever converted without it.
            select: Load only these names: a dotted prefix, a glob, several of them, or a
                predicate.
            strict: What to do about names that are missing, unexpected or different:
                `"raise"` before anything changes; `"report"`, see `load_with_report`; or
                `"ignore"` them. Only with `into`. Unexpected is what targets of all ranks lack.
            types: Classes to get back as such: dataclasses, named tuples, enums, wrapper tensors.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            MismatchError: The target does not fit and `strict` is `"raise"`.
            TargetError: A target cannot be filled.
            CorruptionError: A size or a checksum is wrong; says of which file and tensors.
            CheckpointChangedError: It was overwritten meanwhile.
            FormatError: It is no checkpoint of a known format.
            StorageError: It cannot be read.
            ConfigError: `path` or `then` is none, or an option is wrong or would have no effect.
            StateError: A CUDA graph is being captured, or a device has failed.
            StagingError: The system gives no memory to stage in.
            EngineClosedError: The engine is not open, or is left by an error meanwhile.
            RankError: It failed on another rank, or on several while they read.
            PeerLostError: A rank died, froze or did not come.
        """
        asked = Asked(into, device, dtype, select, strict, types, reports=False)
        return self._load(path, asked, then, CallerCurrents())

    @returns_coroutine
    def load_with_report(
        self,
        path: PathLike,
        into: Any = None,
        *,
        then: PathLike | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        select: Select | None = None,
        strict: Strict = "report",
        types: Sequence[type] = (),
    ) -> Coroutine[Any, Any, LoadResult]:
        """Load a state, and say what was found: `result.state` and `result.report`.

        With `strict="report"` what fits is loaded, and the report lists what was missing,
        unexpected and mismatched. Its notes name values that came back as plain ones, and what
        lies beside a checkpoint of another program and is no part of it.
        Everything else is as with `load`, and so is what it raises.
        """
        asked = Asked(into, device, dtype, select, strict, types, reports=True)
        return self._load(path, asked, then, CallerCurrents())

    async def _load(
        self, path: PathLike, asked: Asked, then: PathLike | None, currents: CallerCurrents
    ) -> Any:
        """Give the result, or its state alone, as is asked for."""
        from ckptio.runtime import flows  # noqa: PLC0415  # imports torch

        load = flows.load_flow(self._core, path, asked, then)
        result = await drive(self._core, load, f"load {path!s}", currents)
        return result if asked.reports else result.state

    @returns_coroutine
    def load_slice(
        self,
        path: PathLike,
        name: str,
        index: Index,
        *,
        device: torch.device | str | None = None,
    ) -> Coroutine[Any, Any, torch.Tensor]:
        """Load a rectangular part of one tensor, reading little more than its bytes.

        Args:
            path: A checkpoint.
            name: The tensor's name.
            index: A slice, an int or a tuple of them, as in `tensor[index]`; steps of 1.
            device: Where the result goes; the CPU if not given.

        Returns:
            A new contiguous tensor, equal to `load(path)[name][index]`.

        Raises:
            TargetError: There is no such tensor, or an array that is stored as bytes (dates,
                strings), the index does not fit it, or there is no memory for it.
            ConfigError: `path` or `device` is none, or an index is neither an int nor a slice.
            CheckpointNotFoundError: As with `load`; and so are `CorruptionError`, `FormatError`,
                `CheckpointChangedError`, `StorageError`, `StateError`, `StagingError` and
                `EngineClosedError`.
        """
        return self._load_slice(path, name, index, device, CallerCurrents())

    async def _load_slice(
        self,
        path: PathLike,
        name: str,
        index: Index,
        device: torch.device | str | None,
        currents: CallerCurrents,
    ) -> torch.Tensor:
        from ckptio.runtime import slices  # noqa: PLC0415  # imports torch

        load = slices.slice_flow(self._core, path, name, index, device)
        return await drive(self._core, load, f"load {path!s}", currents)

    async def inspect(self, path: PathLike) -> Manifest:
        """Read what a checkpoint is made of, and none of its data.

        Raises:
            CheckpointNotFoundError: There is none.
            FormatError: Its manifest is damaged, or of a format this version does not read.
            StorageError: It cannot be read.
            ConfigError: `path` is none.
            EngineClosedError: The engine is not open, or is left by an error meanwhile.
        """
        storage = self._core.storage(path)
        return await self._core.call(lambda context: context.cache.get(storage), "inspect")

    async def verify(self, path: PathLike, *, compare_copies: bool = False) -> VerifyReport:
        """Read every byte of a checkpoint and compare it with its checksums.

        Damage does not raise: the report lists all of it. What it looks at: see `ckptio.verify`.

        Args:
            path: A checkpoint.
            compare_copies: Compare the copies that ranks wrote of a tensor with each other,
                too (see `CheckpointConfig.replicate`). One that differs is damage.

        Raises:
            CheckpointNotFoundError: There is none.
            FormatError: Its manifest is damaged, or has a value that nobody can have saved. Or
                it is of another program, which keeps no checksums.
            CheckpointChangedError: It was overwritten meanwhile.
            StorageError: It cannot be read.
            ConfigError: `path` is none, or `compare_copies` neither `True` nor `False`.
            StagingError: The system gives no memory to read into.
            EngineClosedError: The engine is not open, or is left by an error meanwhile.
        """
        storage = self._core.storage(path)
        return await self._core.call(
            lambda context: run_verify(storage, context, compare_copies=compare_copies), "verify"
        )

    async def prewarm(self, nbytes: int | None = None, *, at: PathLike | None = None) -> None:
        """Take memory for the staging pool now, so that the first save is as fast as the next.

        About 0.4 s a GB. It is pinned, too, if CUDA was initialised before, which takes longer.

        Args:
            nbytes: How much, in whole slabs; all of the pool if not given, or if it is less.
            at: A place that will be saved to or loaded from. The client of its object store
                is made now: packages are imported, which for S3 takes most of a second of
                the interpreter's time, and credentials are found. Nothing for local paths.

        Raises:
            ConfigError: There is no way to `at`, or a package is missing; or `nbytes` is no
                number of bytes above 0.
            StorageError: Its store cannot be reached.
            StagingError: The system gives no memory.
            EngineClosedError: The engine is not open, or is left by an error meanwhile.
        """
        self._core.pin_if_cuda()
        await self._core.call(lambda context: prewarm(context, nbytes, at), "prewarm")
