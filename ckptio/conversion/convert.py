"""Convert a checkpoint of any known format to another, in bounded memory.

Before anything is written, options that have no effect with the format are refused, and so is a
directory of "hf" or "dcp" that holds a checkpoint of another format: some reader would still find
that one. The sizes of all files that are needed are checked then, too. `source` reads for every
format; `ours`, `safetensors`, `hf` and `dcp` write, and all but `safetensors`, on which the others
build, are imported only when their format is asked for. What a format does not keep is in the
report (`losses`), never dropped without a word.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ckptio._own_thread import in_own_thread
from ckptio._texts import shown
from ckptio.config import require_bool
from ckptio.conversion.losses import left_by_wrappers, lost_in_dcp, lost_in_safetensors
from ckptio.conversion.safetensors import Written, is_written
from ckptio.conversion.source import Source
from ckptio.conversion.spared import is_one, require_spared
from ckptio.errors import CheckpointExistsError, ConfigError, SaveAbortedError
from ckptio.foreign.dcp import METADATA
from ckptio.foreign.interface import notes_of
from ckptio.foreign.safetensors import STEMS
from ckptio.format.manifest import MANIFEST_NAME
from ckptio.runtime.solo import solo_engine
from ckptio.state.leaves import require_convertible
from ckptio.storage.keys import shown_url
from ckptio.storage.resolve import local_path, remote_url

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ckptio.config import CheckpointConfig
    from ckptio.conversion.source import Leaf
    from ckptio.format.encode import Json
    from ckptio.state.select import Select
    from ckptio.storage.resolve import PathLike

Format = Literal["ckptio", "safetensors", "hf", "dcp"]
FORMATS = ("ckptio", "safetensors", "hf", "dcp")
#: What Hugging Face's libraries take for the largest file, if nothing else is said.
MAX_SHARD_NBYTES = 5_000_000_000
_HF = tuple(f"{stem}.{end}" for stem in STEMS for end in ("safetensors", "safetensors.index.json"))
#: By format, what a directory has that holds a checkpoint of another one.
_OTHERS = {"hf": (MANIFEST_NAME, METADATA), "dcp": (MANIFEST_NAME, *_HF)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What a conversion did.

    Attributes:
        source: The checkpoint that was read.
        path: What was written.
        to: Its format.
        num_tensors: Tensors in it, under all of their names.
        nbytes: Bytes of them.
        files: What it is made of.
        notes: What the format does not keep, names that a wrapper gave to a whole model, and
            what lies beside the source and was not converted with it, a line each.
    """

    source: str
    path: str
    to: Format
    num_tensors: int
    nbytes: int
    files: tuple[Written, ...]
    notes: tuple[str, ...] = ()


class _Meter:
    """Counts bytes, from any thread."""

    def __init__(
        self,
        total: int,
        report: Callable[[int, int], None] | None,
        stop: threading.Event | None,
    ) -> None:
        self._total = total
        self._stop = stop
        self._done = 0
        self._report = report
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        """Count what was done.

        Raises:
            SaveAbortedError: The conversion was cancelled meanwhile; so it ends.
        """
        if self._stop is not None and self._stop.is_set():
            raise SaveAbortedError("the conversion was cancelled")
        with self._lock:
            self._done += nbytes
            if self._report is not None:
                self._report(self._done, self._total)


def run_convert(  # noqa: D417  # `convert` has them
    source: PathLike,
    path: PathLike,
    *,
    to: Format,
    select: Select | None,
    strip: str,
    overwrite: bool,
    drop_values: bool,
    max_shard_nbytes: int | None,
    dtype: torch.dtype | None,
    config: CheckpointConfig | None,
    progress: Callable[[int, int], None] | None,
    stop: threading.Event | None = None,
) -> ConvertReport:
    """Convert, as `convert` does, which says what the others are. Blocks.

    Args:
        stop: Ends it soon, once it is set, as a failure would.
    """
    require_bool("overwrite", overwrite)
    require_bool("drop_values", drop_values)
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress= is a function of two numbers, not {shown(progress)}")
    _check_options(to, strip, max_shard_nbytes, dtype, drops_values=drop_values)
    target = _target_of(path, to)
    _require_no_other(target, to)
    with solo_engine(config) as core:
        read = Source(core, source, select, strip, dtype)
        ends = [core.own_storage(each).identity for each in (source, path)]
        if ends[0] == ends[1] or is_one(*ends):
            raise ConfigError(f"{target!r} is converted to itself; give another path")
        require_spared(read, target, to, overwrite=overwrite)
        read.check()
        is_all = to not in ("safetensors", "hf")
        leaves = [leaf for leaf in read.leaves() if is_all or is_written(leaf)]
        meter = _Meter(_nbytes_of(leaves, to), progress, stop)
        files = _write(
            read,
            target,
            to,
            overwrite=overwrite,
            drop_values=drop_values,
            max_shard_nbytes=MAX_SHARD_NBYTES if max_shard_nbytes is None else max_shard_nbytes,
            config=core.config,
            advance=meter.advance,
        )
    return ConvertReport(
        source=read.path,
        path=target,
        to=to,
        num_tensors=len(leaves),
        nbytes=sum(leaf.nbytes for leaf in leaves),
        files=tuple(files),
        notes=(*_lost(read.tree, leaves, to, strip), *notes_of(read.manifest)),
    )


def _nbytes_of(leaves: Sequence[Leaf], to: Format) -> int:
    """Count what is read or written in all, as it is told to `progress=`."""
    if to in ("safetensors", "hf"):
        return sum(leaf.nbytes for leaf in leaves)
    # DCP gets under each name what is only whole tensors; of the rest each is read once
    apart = {id(leaf.entry) for leaf in leaves if to == "ckptio" or not leaf.is_plain}
    once = {id(leaf.entry): leaf.entry for leaf in leaves if id(leaf.entry) in apart}
    return sum(entry.nbytes for entry in once.values()) + sum(
        leaf.nbytes for leaf in leaves if id(leaf.entry) not in apart
    )


def _require_no_other(target: str, to: str) -> None:
    """Refuse to write beside a checkpoint of another format, which some reader would find."""
    if any(os.path.lexists(f"{target}/{name}") for name in _OTHERS.get(to, ())):
        raise CheckpointExistsError(
            target, "it has another format; give another path, or remove it first"
        )


def _check_options(
    to: object, strip: object, max_shard_nbytes: object, dtype: object, *, drops_values: bool
) -> None:
    """Refuse a format that nobody knows, and what has no effect with the one that is given."""
    if not isinstance(to, str) or to not in FORMATS:
        raise ConfigError(f"to= is one of {', '.join(FORMATS)}, not {shown(to)}")
    if not isinstance(strip, str):
        raise ConfigError(f"strip= is a name, not {shown(strip)}")
    if drops_values and to not in ("safetensors", "hf"):
        raise ConfigError(f"drop_values has no effect with to={to!r}, which holds values too")
    if dtype is not None:
        require_convertible(dtype)
        if to not in ("safetensors", "hf"):
            raise ConfigError(
                f"dtype= is not for to={to!r}, which keeps what was saved: whoever loads it gives"
                " the type"
            )
    if max_shard_nbytes is None:
        return
    if type(max_shard_nbytes) is not int or max_shard_nbytes < 1:
        raise ConfigError(f"max_shard_nbytes must be a positive int, not {shown(max_shard_nbytes)}")
    if to != "hf":
        raise ConfigError(f"max_shard_nbytes has no effect with to={to!r}")


def _lost(tree: Json, leaves: list[Leaf], to: Format, strip: str) -> list[str]:
    """Say what the format does not keep, and what its readers do not find."""
    if to == "dcp":
        return lost_in_dcp(tree)
    if to == "ckptio":
        return []
    return [*left_by_wrappers(leaves, strip), *lost_in_safetensors(leaves)]


def _target_of(path: PathLike, to: Format) -> str:
    """Give the path or URL to write to.

    Raises:
        ConfigError: It is none, or the format is written to local paths alone.
    """
    url = remote_url(path)
    if url is not None and to != "ckptio":
        raise ConfigError(
            f"to={to!r} writes to local and mounted file systems alone, not to {shown_url(url)!r};"
            " convert to a local path and copy what is there"
        )
    return local_path(path) if url is None else url


async def convert(
    source: PathLike,
    path: PathLike,
    *,
    to: Format,
    select: Select | None = None,
    strip: str = "",
    overwrite: bool = False,
    drop_values: bool = False,
    max_shard_nbytes: int | None = None,
    dtype: torch.dtype | None = None,
    config: CheckpointConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Convert a checkpoint of any known format into one of another.

    It runs on threads of its own. Cancelling it ends it as a failure would, and is raised when it
    has ended.

    Memory: the pools of two engines and some 70 MiB, whatever the size of the checkpoint, and with
    `dtype=` what these become. Some things are in memory whole besides: a tensor that is stored as
    a view of another, and, where views lie between each other or DCP is written, the other one; of
    what DCP wrote, values that hold tensors (a tuple of some, say); and a file of `torch.save` that
    is no archive (from before torch 1.6), is of another byte order, or has tensors that torch makes
    as it loads them. Such a value is there twice while it is read, and while DCP is written.

    Args:
        source: A checkpoint of ours, a safetensors file, a Hugging Face folder, a directory
            of torch.distributed.checkpoint, or a file of `torch.save`; a path or a URL.
        path: What to write: a file for `"safetensors"`, a directory for the others, and for
            `"ckptio"` also a URL.
        to: The format.
        select: Names to take, as in `ckptio.load`; with `strip`, as they are without that.
        strip: Take only what is below this name, and drop it from the names: `"model"` makes
            `layers.0.weight` of `model.layers.0.weight`, and `"model._orig_mod"` of what
            `torch.compile` calls `model._orig_mod.layers.0.weight`.
        overwrite: Replace what is there. With it or without, a conversion that was stopped,
            killed or refused by the system goes on when it is run again with the same
            arguments: whole files of `"safetensors"` and `"hf"` that it wrote are kept without
            `overwrite`; of `"ckptio"` and `"dcp"` what is right, byte by byte, is not written
            again, but is compared with the source, which is read again. In object stores it
            begins anew, and so it does where the source is on a file system that says of files
            neither when they were written nor anything else that tells them apart.
        drop_values: Leave out what a safetensors file cannot hold.
        max_shard_nbytes: Bytes of tensors in a file of `"hf"`; 5 GB if not given.
        dtype: For `"safetensors"` and `"hf"`: the element type of all floating-point tensors,
            rounded as `Tensor.to` does it; their own if not given. As in `ckptio.load`, others
            stay as they are, and so do those that a quantised tensor is made of.
        config: Options; the defaults if not given. In every format what is made has the modes
            of `file_mode` and `dir_mode`, and is synced as `durability` says; a directory that
            was there keeps its own.
        progress: Called with bytes done and bytes in all, from any thread.

    Raises:
        CheckpointNotFoundError: There is nothing to convert.
        TargetError: `select` or `strip` takes nothing of it.
        CheckpointExistsError: Something else is at `path`. In a directory, `"hf"` and `"dcp"`
            replace only what has the same format, whatever `overwrite` says: whoever loaded
            the path would still find the other one. `"ckptio"` hides others, and leaves them.
        CommitConflictError: Another conversion is writing there.
        FormatError: The source is damaged, or has names or types that the format cannot hold.
        ConfigError: An option is wrong or has no effect, or values are in the way.
        StorageError: Something cannot be read or written.
    """
    stop = threading.Event()
    return await in_own_thread(
        lambda: run_convert(
            source,
            path,
            to=to,
            select=select,
            strip=strip,
            overwrite=overwrite,
            drop_values=drop_values,
            max_shard_nbytes=max_shard_nbytes,
            dtype=dtype,
            config=config,
            progress=progress,
            stop=stop,
        ),
        stop.set,
    )


def _write(
    read: Source,
    target: str,
    to: Format,
    *,
    overwrite: bool,
    drop_values: bool,
    max_shard_nbytes: int,
    config: CheckpointConfig,
    advance: Callable[[int], None],
) -> list[Written]:
    """Write in the format that was asked for."""
    if to == "safetensors":
        from ckptio.conversion.safetensors import write_file  # noqa: PLC0415  # only what is needed

        return write_file(
            read,
            target,
            overwrite=overwrite,
            drop_values=drop_values,
            config=config,
            advance=advance,
        )
    if to == "hf":
        from ckptio.conversion.hf import write_folder  # noqa: PLC0415  # as above

        return write_folder(
            read,
            target,
            overwrite=overwrite,
            drop_values=drop_values,
            max_shard_nbytes=max_shard_nbytes,
            config=config,
            advance=advance,
        )
    if to == "dcp":
        from ckptio.conversion.dcp import write_dcp  # noqa: PLC0415  # as above

        return write_dcp(read, target, overwrite=overwrite, config=config, advance=advance)
    from ckptio.conversion.ours import write_checkpoint  # noqa: PLC0415  # as above

    with solo_engine(config) as writer:
        return write_checkpoint(read, writer, target, overwrite=overwrite, advance=advance)
