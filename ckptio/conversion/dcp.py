"""Write a directory that stock torch.distributed.checkpoint loads, by way of its own writer.

It writes in place; so it writes to a directory inside, and what it wrote is moved when it is
whole and synced: the data under a name that nobody else gives, then the metadata in one step
over what is there, which stays a checkpoint until then. Its data goes last.

`dcp.save` is given tensors without memory, and a planner that reads each one when the
writer asks for it, which it does one at a time. Large tensors are cut into chunks, and small ones
are read together with those that the writer asks for next, up to the size of a chunk. So no more
than about a chunk of the tensors is in memory. Tensors in a value that DCP writes whole (a tuple,
say) are an exception: all of them are read, and pickled, before the value is written. The data file
is written here, since the stock writer keeps a tensor of each name until the file has ended.

A conversion that was stopped leaves its data file. The next one compares it with what it
would write, piece by piece, and writes only what differs; so it does not matter who wrote it,
nor from what. The lock on the directory inside keeps two conversions apart.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import shutil
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckptio.conversion.ahead import LazyPlanner
from ckptio.conversion.compared import PIECE_NBYTES, ComparedFile
from ckptio.conversion.own import (
    make_own_dirs,
    remove_empty,
    rename_new,
    sync_dir,
    sync_file,
    take_lock,
)
from ckptio.conversion.safetensors import Written
from ckptio.conversion.source import require_dict
from ckptio.conversion.unfit import UnfitError
from ckptio.engine.attempt_end import may_go_on
from ckptio.errors import CheckpointError, CheckpointExistsError
from ckptio.foreign.dcp import METADATA
from ckptio.layout import BIT_DTYPES
from ckptio.state.rebuild import allocate
from ckptio.storage.blocks import storage_error
from ckptio.storage.files import PosixFiles, set_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from ckptio.config import CheckpointConfig
    from ckptio.conversion.source import Source
    from ckptio.format.manifest import TensorEntry

_ASIDE = ".ckptio-partial"
#: What the stock writer calls its files.
_DATA = re.compile(r"__\d+_\d+\.distcp")
#: What the data files of conversions have for a number: no writer of files counts that far.
_NUM_DIGITS = 18
_OWN_DATA = re.compile(rf"__0_\d{{{_NUM_DIGITS}}}\.distcp")
#: The data file in the directory inside, whatever it will be called.
_FILE = "data"


class _Writer(FileSystemWriter):
    """The stock writer, but for the data: one file, item after item.

    Args:
        path: The directory inside.
        name: What its data file will be called.
        config: Who may read the files, and whether they are synced.
    """

    def __init__(self, path: str, name: str, config: CheckpointConfig) -> None:
        super().__init__(
            path,
            single_file_per_rank=True,
            sync_files=config.durability != "none",
            thread_count=1,
            overwrite=True,
        )
        self._name = name
        self._config = config

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what is not there yet; see `dcp.StorageWriter`."""
        results = []
        with ComparedFile(f"{self.path}/{_FILE}", self._config) as raw:
            file = io.BufferedWriter(raw, PIECE_NBYTES)
            for item in plan.items:
                start = file.tell()
                data = planner.resolve_data(item)
                if isinstance(data, torch.Tensor):
                    _save_tensor(data, file)
                else:
                    file.write(data.getbuffer())
                nbytes = file.tell() - start
                where = _StorageInfo(self._name, start, nbytes)
                results.append(
                    WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=where)
                )
            file.flush()
            raw.end()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _save_tensor(tensor: torch.Tensor, file: io.BufferedWriter[ComparedFile]) -> None:
    """Write a tensor as a file of its own, without whatever else its memory has."""
    tensor = tensor.detach()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    try:
        torch.save(tensor, file)
    except RuntimeError as error:  # it ends its archive whatever happened, and fails at that
        first: BaseException = error
        while first.__context__ is not None:
            first = first.__context__
        raise first from None


def write_dcp(
    source: Source,
    path: str,
    *,
    overwrite: bool,
    config: CheckpointConfig,
    advance: Callable[[int], None],
) -> list[Written]:
    """Write a directory of torch.distributed.checkpoint.

    Args:
        source: What is written.
        path: The directory.
        overwrite: Replace a checkpoint that is there.
        config: Who may read files and directory, and what is synced.
        advance: Takes bytes as they are read.

    Raises:
        CheckpointExistsError: There is one, and it may not go.
        UnfitError: The state is no dict, or has elements that DCP does not know, parts that would
            have one name, or a value that `torch.save` does not take.
    """
    if not overwrite and os.path.lexists(f"{path}/{METADATA}"):
        with contextlib.suppress(OSError):  # of one that was killed when all was done
            os.rmdir(f"{path}/{_ASIDE}")
        raise CheckpointExistsError(path)
    _require_known(source)
    entries: dict[int, TensorEntry] = {}
    standing = []
    read = set(source.indices())

    def stand_in(index: int) -> torch.Tensor:
        read.remove(index)
        entry = source.manifest.tensors[index]
        tensor = allocate(entry, device=torch.device("meta"))
        entries[id(tensor)] = entry
        standing.append(tensor)  # alive, so that its identity stays its own
        return tensor

    state = require_dict(source.values(stand_in), source.path)
    _require_names(state, source.path)
    try:
        made = make_own_dirs(path, config)
        with _place_inside(path, made, config) as aside:
            if read:
                advance(sum(source.manifest.tensors[index].nbytes for index in read))
            name = f"__0_{secrets.randbelow(10**_NUM_DIGITS):0{_NUM_DIGITS}}.distcp"
            _save(state, _Writer(aside, name, config), LazyPlanner(source, entries, advance))
            _settle(f"{aside}/{METADATA}", config)
            return _move(aside, path, name, overwrite=overwrite, config=config)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise storage_error(error, path, "cannot write the checkpoint") from error


@contextlib.contextmanager
def _place_inside(path: str, made: Sequence[str], config: CheckpointConfig) -> Iterator[str]:
    """Lend the directory inside, with nothing but the data file of a conversion that was stopped.

    Args:
        path: The directory.
        made: Directories that are new: they go again if nothing stays there.
        config: Who may read what is inside.

    Raises:
        CommitConflictError: Another conversion has it.
    """
    aside = f"{path}/{_ASIDE}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(aside, config.dir_mode)
        set_mode(aside, config.dir_mode)
    fd = os.open(aside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        take_lock(fd, aside, path)
        try:
            for name in set(os.listdir(aside)) - {_FILE}:
                os.unlink(f"{aside}/{name}")
            yield aside
        except BaseException as error:
            is_of_system = isinstance(error, OSError) and not isinstance(error, CheckpointError)
            is_late = isinstance(error, CheckpointExistsError)
            if is_late or not (is_of_system or may_go_on(error)):
                shutil.rmtree(aside, ignore_errors=True)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        PosixFiles().close(fd)
        remove_empty(made)


def _require_known(source: Source) -> None:
    """Refuse elements of types that DCP does not know.

    Raises:
        UnfitError: There are some.
    """
    for leaf in source.leaves():
        if leaf.stored_dtype in BIT_DTYPES:
            raise UnfitError(
                f"{leaf.name!r} has elements of type {leaf.stored_dtype}, which DCP cannot write:"
                " it takes their size to be that of an integer; leave it out with select="
            )


def _require_names(state: dict[str, Any], path: str) -> None:
    """Refuse a state of which two parts would have one name.

    Raises:
        UnfitError: Two would.
    """
    try:
        flatten_state_dict(state)
    except ValueError as error:
        raise UnfitError(
            f"two parts of the state in {path!r} have one name for DCP, which joins keys by dots:"
            f" {error}; rename one, or leave it out with select="
        ) from None


def _save(state: dict[str, Any], writer: _Writer, planner: DefaultSavePlanner) -> None:
    """Let the stock writer write."""
    try:
        # what `save` calls: that one takes `no_dist` in later versions of torch alone, and would
        # else meet the other ranks of a job; where there are none, it warns of that
        _save_state_dict(
            state_dict=state,
            storage_writer=writer,
            process_group=None,
            no_dist=True,
            planner=planner,
        )
    except CheckpointException as error:  # no `Exception`, of one rank's failure
        (cause, _), *_ = error.failures.values()
        raise cause from None


def _settle(metadata: str, config: CheckpointConfig) -> None:
    """Give metadata its mode, and sync it: the stock writer does so before it writes it."""
    fd = os.open(metadata, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        set_mode(fd, config.file_mode)
        sync_file(fd, config)
    finally:
        os.close(fd)


def _move(
    aside: str, path: str, name: str, *, overwrite: bool, config: CheckpointConfig
) -> list[Written]:
    """Put what was written in the place of what was there; one of both is there at any time.

    Raises:
        CheckpointExistsError: Somebody else committed one meanwhile, which may not go.
    """
    rename_new(f"{aside}/{_FILE}", f"{path}/{name}")
    sync_dir(path, config)
    if overwrite:
        os.rename(f"{aside}/{METADATA}", f"{path}/{METADATA}")
    else:
        try:
            rename_new(f"{aside}/{METADATA}", f"{path}/{METADATA}")
        except FileExistsError:
            os.unlink(f"{path}/{name}")
            raise CheckpointExistsError(path) from None
    sync_dir(path, config)
    # from here on it is committed: what cannot be removed stays
    may_go = _DATA if overwrite else _OWN_DATA  # of others, there is no checkpoint that has them
    for other in os.listdir(path):
        if may_go.fullmatch(other) and other != name:
            with contextlib.suppress(OSError):
                os.unlink(f"{path}/{other}")
    return [
        Written(written, os.stat(f"{path}/{written}").st_size, was_there=False)
        for written in (METADATA, name)
    ]
