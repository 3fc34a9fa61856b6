"""DCP's side of a save: `StorageWriter`.

    every rank        set_up_storage_writer, prepare_local_plan, write_data
    the coordinator   prepare_global_plan, before any rank writes; finish, which commits

What these do is in `saving`; here are their signatures, as DCP wants them, and the options of the
stock writer. Those that would have no effect are refused: to ignore them was rejected, as a script
that only swaps its writer would count on them.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import storage as dcp
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.futures import Future

from ckptio._texts import shown
from ckptio.adapters.dcp.calls import ask, is_path, require_path
from ckptio.adapters.dcp.packing import check_item
from ckptio.adapters.dcp.saving import RankSave, SaveOptions, new_save_id
from ckptio.config import require_bool
from ckptio.errors import CheckpointNotFoundError, ConfigError
from ckptio.runtime.engine_options import config_of, is_word, require_observer
from ckptio.storage.resolve import remote_url

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from ckptio.config import CheckpointConfig
    from ckptio.events import Observer
    from ckptio.storage.resolve import PathLike


if TYPE_CHECKING or "async_stager" in inspect.signature(async_save).parameters:
    _Stager = object
else:
    from ckptio.adapters.dcp.staging import CopyingStager as _Stager  # where a writer stages


class StorageWriter(dcp.StorageWriter, _Stager):
    """Writes what DCP's planners plan, with the engine of `ckptio`.

    Use it where a `FileSystemWriter` is used, in `dcp.save` and `dcp.async_save`. What was at
    the path stays whole until the new checkpoint is committed. One writer serves any number of
    checkpoints, also several at a time where each has a thread, as with `dcp.async_save`, and may
    be pickled. Where several are under way, name the `checkpoint_id` of each: without one, a save
    goes where the writer was turned last as it begins, on whatever thread.

    Values that are no tensors are kept as `ckptio.save` keeps them, without pickle: what it
    takes, and `io.BytesIO`. Refused by name are objects with `state_dict` below the top of the
    state (the stock writer would pickle them whole), other objects of classes, sparse and
    quantised tensors. Dataclasses, named tuples and enums come back as such if the reader is
    given them. A planner that turns values into bytes of its own keeps them as bytes.

    With `use_collectives=False` each rank has a checkpoint of its own below the path, in
    `rank-00000` and so on, where the reader looks for it.

    Options of `FileSystemWriter` are taken where they mean something here; others are refused.

    Args:
        path: Where to, a path or a URL; not needed where each call has a `checkpoint_id`.
        single_file_per_rank: Whether a rank writes tensors together, in files of about
            `config.bucket_nbytes`; otherwise each has a file of its own.
        sync_files: Whether a checkpoint survives a power cut; as in `config` if not given.
            `False` is refused with the URL of an object store, which syncs as it does.
        thread_count: Slabs written at a time, and from 2 on the planner is asked for several
            tensors at once; `config.max_writes` slabs and one tensor if not given. To an
            object store `config.max_requests` are sent at a time, whatever is given here.
        per_thread_copy_ahead: Refused: the pool of `config` is the limit.
        cache_staged_state_dict: Refused where staging is `async_save`'s, through `async_stager`.
            In versions of torch without that it is the writer's, as in the stock class.
        overwrite: Whether a checkpoint that is there may be replaced.
        _extensions: Refused: nothing may stand between tensors and files.
        serialization_format: Refused, but for `SAFETENSORS`, which is what is written anyway.
        config: Options of the engine; the defaults if not given.
        observer: Called with each event, on any thread; see `ckptio.events`.

    Raises:
        ConfigError: An option is wrong or would have no effect.
    """

    def __init__(
        self,
        path: PathLike | None = None,
        single_file_per_rank: bool = True,  # noqa: FBT001, FBT002  # the stock signature
        sync_files: bool | None = None,  # noqa: FBT001  # as above
        thread_count: int | None = None,
        per_thread_copy_ahead: int | None = None,
        cache_staged_state_dict: bool = False,  # noqa: FBT001, FBT002  # as above
        overwrite: bool = True,  # noqa: FBT001, FBT002  # as above
        _extensions: Any = None,
        serialization_format: Any = None,
        *,
        config: CheckpointConfig | None = None,
        observer: Observer | None = None,
    ) -> None:
        _refuse(per_thread_copy_ahead, cache_staged_state_dict, _extensions, serialization_format)
        require_observer(observer)
        require_bool("single_file_per_rank", single_file_per_rank)
        require_bool("overwrite", overwrite)
        if sync_files is not None:
            require_bool("sync_files", sync_files)
        staging: dict[str, bool] = {}
        if _Stager is not object:
            staging["cache_staged_state_dict"] = cache_staged_state_dict
        super().__init__(**staging)
        self.path = path
        options: dict[str, Any] = {}
        if thread_count is not None:
            if type(thread_count) is not int or thread_count < 1:
                raise ConfigError(f"thread_count must be a positive int, not {shown(thread_count)}")
            options["max_writes"] = thread_count
        if sync_files is not None:
            options["durability"] = "full" if sync_files else "none"
        if not single_file_per_rank:
            options["bucket_nbytes"] = 1
        self._options = SaveOptions(
            config=dataclasses.replace(config_of(config), **options),
            overwrite=overwrite,
            at_once=thread_count is not None and thread_count > 1,
            observer=observer,
        )
        self._is_unsynced = sync_files is False
        if path is not None:
            require_path(path, self._options.config)
            self._require_syncing(path)
        self._next: dict[threading.Thread, _Next] = {}
        self._begun: dict[threading.Thread, _Begun] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the saves that are under way, and their names: each copy has its own."""
        return {**self.__dict__, "_next": {}, "_begun": {}}

    @property
    def checkpoint_id(self) -> PathLike | None:
        """Where the checkpoint goes."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        """Whether it is a path or a URL of a known protocol. Touches nothing."""
        return is_path(checkpoint_id)

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        """Turn to another checkpoint, on this thread; see `dcp.StorageWriter`."""
        before = self._take_next()
        if checkpoint_id is not None:
            self.path = checkpoint_id
        elif not before.save_id:
            # this thread was turned there, and has not saved yet; `path` may be another thread's
            checkpoint_id = before.path
        self._next[threading.current_thread()] = _Next(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """Name the checkpoint and the save. Where no path was given, DCP calls this first."""
        thread = threading.current_thread()
        before = self._next.get(thread, _Next())
        # an id without a save is of one that failed before it was set up: this is the next one
        path = before.path if before.path is not None and not before.save_id else self.path
        # kept as it is now: others may turn the writer meanwhile
        self._next[thread] = named = _Next(path, before.save_id or new_save_id())
        return StorageMeta(checkpoint_id=named.path, save_id=named.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001, ARG002  # the stock signature
        """Begin a save on this rank; see `dcp.StorageWriter`.

        Raises:
            ConfigError: There is no path, or it is none; or ranks save each for itself where
                a checkpoint of all ranks is; or an option would have no effect there.
        """
        before = self._take_next()
        if (to := before.path or self.path) is None:
            raise ConfigError("where to save? give the writer a path, or the call a checkpoint_id")
        require_path(to, self._options.config)
        self._require_syncing(to)
        path = os.fspath(to)
        rank = kwargs.get("rank")
        if not kwargs.get("use_collectives", True):
            self._require_free(path)
            path = place_of_rank(path, rank or 0)
        save = RankSave(path, before.save_id or new_save_id(), rank, self._options)
        self._begun[threading.current_thread()] = _Begun(to, save)

    def _require_syncing(self, path: PathLike) -> None:
        """Refuse not to sync where nobody can say so.

        Raises:
            ConfigError: That was asked for, and `path` is a URL.
        """
        if self._is_unsynced and remote_url(path) is not None:
            raise ConfigError(
                "sync_files=False has no effect at a URL: an object store makes durable what it"
                " takes; leave it out"
            )

    def _require_free(self, path: str) -> None:
        """Refuse to save each rank for itself beside what would be found first.

        Raises:
            ConfigError: There is a checkpoint.
        """
        try:
            ask(path, self._options.config, None, lambda storage: storage.version())
        except CheckpointNotFoundError:
            return
        raise ConfigError(
            f"{path!r} has a checkpoint of all ranks, which would be found before those that"
            " ranks save each for itself; use another path with use_collectives=False"
        )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check what this rank has to save; see `dcp.StorageWriter`.

        Raises:
            UnsupportedLeafError: A tensor has no portable form; nothing was written.
        """
        for item in plan.items:
            check_item(item)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save for all ranks, as the coordinator; see `dcp.StorageWriter`.

        Raises:
            CheckpointExistsError: There is a checkpoint and `overwrite` is off.
            StorageError: The place cannot be written.
        """
        begun = self._under_way()
        tickets = begun.save.begin(len(plans))
        # whoever saves and fails on another rank does not tell: then this is what is left to do
        begun.last_will = weakref.finalize(self, begun.save.abandon_aside)
        return [
            dataclasses.replace(plan, storage_data=ticket)
            for plan, ticket in zip(plans, tickets, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[dcp.WriteResult]]:
        """Write what this rank has to write; see `dcp.StorageWriter`. Blocks.

        Raises:
            UnsupportedLeafError: A value has no portable form.
            StorageError: The first failure of any file, on any thread.
        """
        results = self._under_way().save.write(plan, planner)
        future: Future[list[dcp.WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[dcp.WriteResult]]) -> None:
        """Commit, as the coordinator; see `dcp.StorageWriter`.

        Raises:
            StorageError: What a rank wrote is not there, or the manifest cannot be written.
            CommitConflictError: Somebody else committed meanwhile; theirs stands.
        """
        begun = self._under_way()
        metadata.storage_meta = StorageMeta(checkpoint_id=begun.path, save_id=begun.save.save_id)
        begun.save.finish(metadata, results)
        metadata.storage_data = {
            result.index: {k: v for k, v in result.storage_data.items() if k != "receipt"}
            for ours in results
            for result in ours
        }
        for thread, ended in self._begun.copy().items():
            if ended is begun:
                self._begun.pop(thread, None)
        begun.end()

    def _under_way(self) -> _Begun:
        """Give the save of this thread; if it never had any, the only one of any other."""
        this, begun = threading.current_thread(), self._begun.copy()
        saves = [begun[this]] if this in begun else [*begun.values()]
        if len(saves) != 1 or (this not in begun and this in self._next):
            raise ConfigError("DCP did not set the writer up: use it in dcp.save")
        return saves[0]

    def _take_next(self) -> _Next:
        """Take what is known of this thread's next save; end its last one.

        As well as those of threads that have ended. What they left is removed, as far as it was not
        committed.
        """
        this = threading.current_thread()
        for thread, left in self._begun.copy().items():
            if thread is this or not thread.is_alive():  # it has failed, and nobody told
                self._begun.pop(thread, None)
                left.end()
        for thread in self._next.copy():
            if not thread.is_alive():
                self._next.pop(thread, None)
        return self._next.pop(this, _Next())


@dataclass(frozen=True, slots=True)
class _Next:
    """What is known of a save that DCP has yet to set up.

    Attributes:
        path: Where it goes; the writer's path if `None`.
        save_id: The id that it will have, if DCP has asked for one.
    """

    path: PathLike | None = None
    save_id: str = ""


@dataclass(slots=True)
class _Begun:
    """A save that is set up. DCP makes all calls of it on one thread.

    It is kept until it is committed; or, if it fails, and on ranks that do not commit, until its
    thread turns to another, or ends.

    Attributes:
        path: Where it goes.
        save: The save.
        last_will: Removes what it left uncommitted, when the writer or the process ends.
    """

    path: PathLike
    save: RankSave
    last_will: weakref.finalize[Any, Any] | None = None

    def end(self) -> None:
        """Remove what the save left if it was not committed. Blocks."""
        will, self.last_will = self.last_will, None
        if will is not None and will.detach() is not None:
            self.save.abandon()


def place_of_rank(path: str, rank: int) -> str:
    """Say where a rank saves that saves for itself."""
    return f"{path.rstrip('/')}/rank-{rank:05d}"


def _refuse(
    per_thread_copy_ahead: int | None,
    cache_staged_state_dict: bool,  # noqa: FBT001  # as in the stock signature
    extensions: Any,
    serialization_format: Any,
) -> None:
    """Refuse options that would have no effect.

    Raises:
        ConfigError: One was given.
    """
    require_bool("cache_staged_state_dict", cache_staged_state_dict)
    if per_thread_copy_ahead is not None:
        raise ConfigError(
            "per_thread_copy_ahead has no effect: set config=CheckpointConfig(pool_nbytes=...)"
        )
    if cache_staged_state_dict and _Stager is object:
        raise ConfigError(
            "cache_staged_state_dict has no effect: pass async_save an"
            " async_stager=BlockingAsyncStager(cache_staged_state_dict=True)"
        )
    if extensions:
        raise ConfigError("_extensions have no effect: files hold the bytes of tensors as they are")
    is_ours = is_word(getattr(serialization_format, "name", None), "SAFETENSORS")
    if serialization_format is not None and not is_ours:
        raise ConfigError("serialization_format has no effect: files are always safetensors")
