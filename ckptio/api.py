"""The public face: an engine.

Everything here may be called from any asyncio loop, and from several at once. The work is done
on the engine's own loop, and the caller's loop only waits for it. `ckptio.sync` has a blocking
twin of the same name; functions that open an engine for a single call are in `ckptio.calls`.
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
from ckptio.runtime.drive import drive, load_name
from ckptio.runtime.gauges import Gauges
from ckptio.runtime.leaving import end_saves, is_breaking_off
from ckptio.runtime.prewarm import prewarm

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine
    from types import TracebackType
    from typing import Self

    import torch

    from ckptio.config import CheckpointConfig
    from ckptio.engine.asked import Strict, T
    from ckptio.events import Observer
    from ckptio.format.manifest import Manifest
    from ckptio.ranks.discover import RanksLike
    from ckptio.runtime.loading import LoadResult
    from ckptio.runtime.slices import Index
    from ckptio.state.select import Select
    from ckptio.storage.resolve import PathLike


class Engine(Gauges):
    """Saves and loads, with a loop, a pool and a metadata cache of its own.

    Use it as `async with Engine(config) as engine:` and keep it for the whole run: from the
    second save on, it allocates no staging memory and reuses its plan. Leaving the block waits
    for what is in flight, including copies that earlier runs owed, and raises the error of a save
    that nobody awaited (which was logged already when the next save began). An exception that
    leaves the block aborts what is in flight; `sys.exit()` does not. An engine that is still open
    when the program ends, or that was dropped without being closed, finishes what it began.

    Args:
        config: Options; the defaults if not given.
        observer: Called with each event, on any thread; must return soon. See `ckptio.events`.
        ranks: Who takes part. `"auto"`: all ranks of the initialised process group, or else of
            torchrun's job; without either, this process alone. A process group: its ranks.
            `"solo"`: this process alone. With several ranks, each enters an engine (which waits
            for the others) and calls `save` and `load` alike, in the same order; all other calls
            concern one rank only. If a rank is lost, the others leave their engines and open
            new ones.

    Raises:
        PeerLostError: On entering: some ranks did not come within `meet_timeout_s`.
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
        self._core.require_other_loop()
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

        The state is taken apart during this call; its tensors are copied in the background. Do
        not change them before `await handle.staged`. `await handle` waits for the commit. If it
        notices that the state was changed too early, it raises `StateError`.

        CPU tensors are copied, and no reference to them remains after `staged`. If nobody waits
        for `staged`, the tensors are kept until the files are written, and are then checked for
        changes once more. CUDA tensors are copied on a side stream, ordered behind the work
        queued on the current stream; `handle.fence()` orders the current stream behind the copies
        instead of waiting. `await handle.staged` before you capture a CUDA graph: no other thread
        may query the device meanwhile (unless the capture is `thread_local` or `relaxed`).

        With several ranks, each gives its part of one state: its blocks of sharded tensors
        (DTensor, ShardedTensor, `ckptio.Shard`), and its replicas of everything else, which one
        rank writes. Values must be equal on all ranks that have them, or be `ckptio.PerRank`;
        tensors and arrays with one name are assumed equal, mostly without a look. Either all
        ranks commit or none does: `await handle` raises a `RankError` on all (`PeerLostError` if a
        rank died, froze or closed its engine). All ranks must see the file system of `path`.

        Args:
            state: Any nesting of dicts, lists, tuples and sets with tensors, arrays,
                numbers, strings, bytes, dates, paths, dataclasses, enums and the like.
                Objects with `state_dict` and `load_state_dict` are saved as their state.
            path: A directory (`~` is the home) or URL. Neither it nor its parents need to exist.
            overwrite: Replace a checkpoint that is there, on both tiers. The old one can be loaded
                until the new one is committed, and is removed then. Without it, `await handle`
                raises `CheckpointExistsError` if the path holds a checkpoint.
            then: A second tier: another path or URL, without a password, to which the committed
                checkpoint is copied in the background, from its files and verified.
                `await handle.durable` waits for the commit there. A copy that an error or a
                kill cut off is noted beside the checkpoint; `finish_copies` finishes it, and so
                does the next engine that saves with `then` into that directory, before it closes.

        Raises:
            UnsupportedLeafError: A value has no portable form. Nothing was written; on other
                ranks, `await handle` raises a `RankError` that says so.
            StateError: A CUDA graph is being captured, or a device has failed.
            ConfigError: `path` or `then` is not a path, or they are the same place (if only
                through a link, `await handle` raises it).
            EngineClosedError: The engine is not open.
        """
        from ckptio.runtime.saving import begin_save  # noqa: PLC0415  # imports torch

        return SaveHandle(begin_save(self._core, state, path, overwrite=overwrite, then=then))

    async def finish_copies(self, root: PathLike) -> tuple[str, ...]:
        """Finish the copies that earlier runs owe to a second tier (`save(..., then=)`).

        Files that are already there whole are not sent again. A copy that another process is
        making is left to it; a copy whose target has a newer checkpoint is no longer owed. With
        several ranks, call it on rank 0, or on all.

        Args:
            root: A checkpoint, or a directory of checkpoints.

        Returns:
            The places to which copies were made.

        Raises:
            CheckpointError: The first failure of a copy, or of looking for one; all were tried.
            StorageError: The directory cannot be listed or, unless it is a URL, does not exist.
            ConfigError, EngineClosedError: `root` is not a path; the engine is not open.
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
        types: Collection[type] = (),
    ) -> Coroutine[Any, Any, T]:
        """Load a state.

        Without `into`, the state is rebuilt as it was saved, with tied tensors tied. With `into`,
        tensors and arrays of the target are filled in place, without a second copy of the state
        in memory; dicts, lists and dataclasses are updated (a list with nothing to fill takes all
        that is stored, of any length); stateful objects are given their state; and the target
        is returned. If two names in the target are one tensor (tied weights) or one stateful
        object, and the checkpoint has two, the first is loaded, and the report or the log says
        so, because nobody knows which was meant. A list, dict or dataclass like that is split.

        An object with its own `load_state_dict`, not torch's, is given new tensors, since it may
        write to its own while it reads them. Until it returns, both exist on their device. The
        same is true for what a module has below a custom `_load_from_state_dict`, or below a hook
        that runs before `load_state_dict`. Still filled in place there are blocks of sharded
        tensors, and tensors of modules and optimizers that the object has as attributes.

        No byte of the target changes before the sizes of all needed files were checked (of all
        files if one rank saved it and all is loaded), and no block lands before its checksum was
        verified. If a later block is damaged, earlier ones have landed: load another checkpoint.

        With several ranks, each has a target of its own, or none. Sharded targets take their
        blocks, whatever ranks, mesh and placement wrote them; all else is loaded whole. No target
        changes on any rank before all fit. If the checkpoint has no `ckptio.PerRank` value for a
        rank, its target's `PerRank` is kept and the report notes it; without a target it is `None`.

        On CUDA, a target is filled behind the work queued on the current stream at the time of
        this call, even if the result is awaited later or elsewhere, as in a task.

        Modules on the meta device get new parameters; an optimizer created before is refused. So is
        the state of another class of torch's optimizers (before torch 2.7, Adam and AdamW cannot be
        told apart), or of parameters of other shapes; for DTensors see `ckptio/ranks/README.md`.
        What a `load_state_dict` raises becomes a `TargetError`, after all bytes have landed.

        Args:
            path: A checkpoint.
            into: The target to fill.
            then: A second tier, as in `save`. It is read instead, with an event, if the first has
                no checkpoint, a truncated one, or an older one that owes no copy; for a single
                rank, also if the first is damaged.
            device: Where new tensors are created; with `into`, those on the meta device or `None`.
            dtype: Convert floating-point tensors to this type, including the step counts of
                optimizers: use `select`. With `into`, it allows targets of this type (but not at
                `None`). Nothing is ever converted without it.
            select: Load only these names: a dotted prefix, a glob, several of these, or a
                predicate.
            strict: What to do about names that are missing, unexpected or different:
                `"raise"` before anything changes, `"report"` (see `load_with_report`), or
                `"ignore"`. Only with `into`. Unexpected is what no rank's target has.
            types: Classes to rebuild: dataclasses, named tuples, enums, wrapper tensors.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            MismatchError: The target does not fit and `strict` is `"raise"`.
            TargetError: A target cannot be filled.
            CorruptionError: A size or a checksum is wrong; says of which file and tensors.
            CheckpointChangedError: It was overwritten meanwhile.
            FormatError: It is no checkpoint of a known format.
            StorageError: It cannot be read.
            ConfigError: `path` or `then` is not a path, or an option is wrong or has no effect.
            StateError: A CUDA graph is being captured, or a device has failed.
            StagingError: The system gives no memory to stage in.
            EngineClosedError: The engine is not open, or was left by an error meanwhile.
            RankError: It failed on another rank, on several while they read, or one did not come.
            PeerLostError: A rank died, froze or closed its engine.
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
        types: Collection[type] = (),
    ) -> Coroutine[Any, Any, LoadResult]:
        """Load a state and report what was found: `result.state` and `result.report`.

        With `strict="report"`, what fits is loaded, and the report lists what was missing,
        unexpected and mismatched. Its notes name values that came back as plain ones, and files
        beside another program's checkpoint that are not part of it. Everything else,
        including the errors, is as in `load`.
        """
        asked = Asked(into, device, dtype, select, strict, types, reports=True)
        return self._load(path, asked, then, CallerCurrents())

    async def _load(
        self, path: PathLike, asked: Asked, then: PathLike | None, currents: CallerCurrents
    ) -> Any:
        """Give the result, or its state alone, as is asked for."""
        from ckptio.runtime.loading import load_flow  # noqa: PLC0415  # imports torch

        load = load_flow(self._core, path, asked, then)
        result = await drive(self._core, load, load_name(path), currents)
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
                strings), the index does not fit it, or `device` is not there or has no memory.
            ConfigError: `path` is not a path, `name` is not a string, `device` is not a device, or
                an index is neither an int nor a slice.
            CheckpointNotFoundError: As in `load`; and so are `CorruptionError`, `FormatError`,
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
        return await drive(self._core, load, load_name(path), currents)

    async def inspect(self, path: PathLike) -> Manifest:
        """Read the manifest of a checkpoint, and none of its data.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            FormatError: Its manifest is damaged, or of a format this version does not read.
            StorageError: It cannot be read.
            ConfigError: `path` is not a path.
            EngineClosedError: The engine is not open, or was left by an error meanwhile.
        """
        storage = self._core.storage(path)
        return await self._core.call(lambda context: context.cache.get(storage), "inspect")

    async def verify(self, path: PathLike, *, compare_copies: bool = False) -> VerifyReport:
        """Read every byte of a checkpoint and compare it with its checksums.

        Damage does not raise; the report lists all of it. `ckptio.verify` says what is checked.

        Args:
            path: A checkpoint.
            compare_copies: Also compare the copies of a tensor that several ranks wrote (see
                `CheckpointConfig.replicate`). A difference counts as damage.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            FormatError: Its manifest is damaged or has a value that cannot have been saved, or
                another program wrote the checkpoint, in a format without checksums.
            CheckpointChangedError: It was overwritten meanwhile.
            StorageError: It cannot be read.
            ConfigError: `path` is not a path, or `compare_copies` neither `True` nor `False`.
            StagingError: The system gives no memory to read into.
            EngineClosedError: The engine is not open, or was left by an error meanwhile.
        """
        storage = self._core.storage(path)
        return await self._core.call(
            lambda context: run_verify(storage, context, compare_copies=compare_copies), "verify"
        )

    async def prewarm(self, nbytes: int | None = None, *, at: PathLike | None = None) -> None:
        """Allocate the staging pool now, so that the first save is as fast as later ones.

        Takes about 0.4 s per GB, and longer if CUDA is initialised, since it is pinned then.

        Args:
            nbytes: Bytes to allocate, rounded to whole slabs; by default, and at most, the pool.
            at: A place that will be saved to or loaded from. The client of its object store is
                created now: packages are imported, which for S3 keeps the interpreter busy for
                most of a second, and credentials are found. No effect for local paths.

        Raises:
            ConfigError: `at` cannot be resolved or a package is missing, or `nbytes` is not a
                number of bytes above 0.
            StorageError: The store cannot be reached.
            StagingError: The system gives no memory.
            EngineClosedError: The engine is not open, or was left by an error meanwhile.
        """
        self._core.pin_if_cuda()
        await self._core.call(lambda context: prewarm(context, nbytes, at), "prewarm")
