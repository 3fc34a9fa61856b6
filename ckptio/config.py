"""`CheckpointConfig`: every option of an engine, checked when it is made.

An option that contradicts another, or can have no effect wherever it is used, is an error, not a
surprise at step 10,000. One that is for other places than this one is taken, so that one
`CheckpointConfig` serves a laptop and a job: what is for URLs where paths are local, for many
ranks where there is one, for direct I/O where the file system has none, and limits that nothing
comes near.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from ckptio._texts import shown
from ckptio.errors import ConfigError

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

#: Alignment of slabs, of headers and of tensors inside a bucket, in bytes: the page.
PAGE_NBYTES = 4096

Durability = Literal["none", "file", "full"]
Replicate = Literal["once", "local"]
Exchange = Literal["auto", "on", "off"]
DirectIO = Literal["auto", "off"]
S3Client = Literal["s3fs", "obstore"]
_CHOICES = {
    "durability": get_args(Durability),
    "direct_io": get_args(DirectIO),
    "replicate": get_args(Replicate),
    "exchange": get_args(Exchange),
    "s3_client": get_args(S3Client),
}
_ENV_PREFIX = "CKPTIO_"
_MIN_FOR_RESERVE = 8
_LOCAL_REPLICA_NBYTES = 1 * MiB
_END = 1 << 63
#: The longest time that can be asked for: libraries' clocks have an end. 31 years, in seconds.
MAX_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Options of an engine.

    Attributes:
        pool_nbytes: Hard budget of the staging pool, in bytes. If 8 or more slabs fit, one is left
            unused, for what a save needs besides (about 2 KB per tensor, so a slab is enough
            for some 8,000). A state up to the size of the others is copied at once, and
            `await handle.staged` takes one memory copy; a larger one flows through in waves.
            For the shortest stall, set it to a rank's bytes, plus a slab for each file, plus
            one slab. Memory is allocated when first needed, then kept and reused.
        slab_nbytes: Size of a slab of the pool, and so of one write: a tensor above it
            is written by several writers at once. 16 MiB is large enough to hide a hop to
            the event loop (50 to 100 µs), and small enough to pipeline.
        block_nbytes: Bytes under one checksum, and the unit in which files are written
            and read. 1 MiB stays in a core's cache between copy, checksum and write.
        bucket_nbytes: Approximate size of a data file. A larger tensor has a file of its own.
        max_writes: Slabs that are written to files at the same time (for object stores, see
            `max_requests`). With 1, a save writes file by file, each from front to back. Why
            12: to a virtual disk, 3.4 GB were saved in 0.85 of the time that 4 took, and 16
            were no faster. Where all of them, as reads, take 10 s, on a mount whose server is
            gone, they do not count until they end.
        max_reads: Ranges that are read at the same time. Why 12: 3.4 GB that were not in the
            page cache were read in 0.8 of the time that 4 took. Reads from the page cache are
            limited to the number of cores, and to 64 MiB of slabs.
        max_copies: Slabs that are copied (staged) at the same time.
        max_saves: Saves in flight at the same time; a further one waits for a place.
        max_tier_copies: Checkpoints that are copied to a second tier (`then=`) at the same
            time; a further one waits without delaying saves.
        durability: What `await handle` promises. `"full"`: data, manifest and every
            directory entry survive a power cut. `"file"`: files are synced, directories
            are not. `"none"`: nothing is synced, and only a crash of the process is survived.
        direct_io: `"auto"`: bypass the page cache where the file system can. `"off"`: write
            through it, with early write-back, and leave it there: a load that follows on this
            machine reads memory, which the system takes back where it needs it.
        file_mode: Permission bits of new files, whatever the umask; 0o600 by default. Owners must
            be able to read and write.
        dir_mode: Permission bits of new directories, whatever the umask; 0o700 by default. A
            directory whose parent has the set-group-ID bit has it, too. Owners must have all three.
        cache_entries: Maximum number of manifests in the metadata cache.
        cache_nbytes: Maximum bytes of manifests in the metadata cache.
        cache_ttl_s: Seconds for which a cached manifest is used without asking whether it is
            still current. At 0, every load asks: a stat, or one HEAD request. Above 0, a load
            may return a checkpoint that was replaced up to that long ago, if its files still
            exist; otherwise it raises `CheckpointChangedError`.
        replicate: What to do with tensors that several ranks hold. `"once"`: one of them writes
            each. `"local"`: each rank writes its own copy of those up to
            `local_replica_nbytes`, so that the same ranks later read one file each, their
            own, and another copy serves if a file is lost.
        local_replica_nbytes: See `replicate`.
        exchange: Whether ranks that load the same bytes read them once and pass them on. If they
            are on several machines, each rank then listens on a free port during the load.
            `"auto"`: where that is faster. `"on"`: wherever two ranks want the same bytes.
            `"off"`: each rank reads for itself.
        peer_timeout_s: Seconds without a sign of life after which a rank is given up, with
            `PeerLostError` on every rank. Must exceed the longest time for which an
            engine's own loop may be blocked.
        meet_timeout_s: Seconds to wait for a rank that is alive but does not make the call
            that the others make. Must exceed the difference in writing time between the
            slowest and the fastest rank; copies to a second tier may take any time.
        storage_options: As in fsspec, for URLs: endpoints, credentials. Or a mapping of
            protocols to such options, of which a URL uses those of its own protocol. Never
            shown or written anywhere.
        s3_client: The client for `s3://`. `"s3fs"`: the one that s3fs makes. `"obstore"`:
            obstore, from the extra `fast`; it retries parts of an upload itself, without events.
        max_requests: Simultaneous requests to an object store. Fewer are made while the store
            asks for that, or while sending takes longer than `request_timeout_s`. obstore
            always sends this many parts: on a slow link, give it fewer.
        request_timeout_s: Seconds without an answer after which a request is given up and
            retried; half of that for a part that obstore sends. Opening a store has as long,
            and at least 30 seconds.
        max_retries: How often a request is retried after a transient error.
        retry_timeout_s: Seconds without a successful request, counted from the first failure
            of a save or load, after which none of its requests is retried.
    """

    pool_nbytes: int = 256 * MiB
    slab_nbytes: int = 16 * MiB
    block_nbytes: int = 1 * MiB
    bucket_nbytes: int = 1 * GiB
    max_writes: int = 12
    max_reads: int = 12
    max_copies: int = 2
    max_saves: int = 2
    max_tier_copies: int = 2
    durability: Durability = "full"
    direct_io: DirectIO = "auto"
    file_mode: int = 0o600
    dir_mode: int = 0o700
    cache_entries: int = 64
    cache_nbytes: int = 256 * MiB
    cache_ttl_s: float = 0.0
    replicate: Replicate = "once"
    local_replica_nbytes: int = _LOCAL_REPLICA_NBYTES
    exchange: Exchange = "auto"
    peer_timeout_s: float = 30.0
    meet_timeout_s: float = 600.0
    storage_options: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, repr=False, hash=False
    )
    s3_client: S3Client = "s3fs"
    max_requests: int = 16
    request_timeout_s: float = 60.0
    max_retries: int = 8
    retry_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        """Check each option, and each against the others.

        Raises:
            ConfigError: An option is out of range or would have no effect.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, int) and not (type(value) is int and 0 < value < _END):
                raise ConfigError(
                    f"{field.name} must be a positive int below 2**63, not {shown(value)}"
                )
            if isinstance(field.default, float) and not _is_seconds(value, field.default):
                kind = f"a positive number{'' if field.default else ' or 0'}, at most {MAX_S:.0e}"
                raise ConfigError(f"{field.name} must be {kind}, not {shown(value)}")
        self._check_sizes()
        for name, allowed in _CHOICES.items():
            chosen = getattr(self, name)
            if not isinstance(chosen, str) or chosen not in allowed:
                words = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
                raise ConfigError(f"{name} must be {words}, not {shown(chosen)}")
        if self.local_replica_nbytes != _LOCAL_REPLICA_NBYTES and self.replicate != "local":
            raise ConfigError("local_replica_nbytes has no effect without replicate='local'")
        if not isinstance(self.storage_options, Mapping):
            raise ConfigError("storage_options must be a mapping")  # not shown: it has secrets
        for name, needed in (("file_mode", 0o600), ("dir_mode", 0o700)):
            mode = getattr(self, name)
            if mode & ~0o777 or mode & needed != needed:
                meant = f"; did you mean 0o{mode}?" if re.fullmatch("[0-7]{3}", f"{mode}") else ""
                raise ConfigError(
                    f"{name} must be permission bits, at most 0o777, with the owner's own"
                    f" ({needed:#o}), not {mode:#o}{meant}"
                )

    def _check_sizes(self) -> None:
        """Check that blocks make slabs, slabs the pool, and the pool enough of them."""
        if self.block_nbytes % PAGE_NBYTES:
            raise ConfigError(
                f"block_nbytes must be a multiple of {PAGE_NBYTES}, not {self.block_nbytes}"
            )
        if self.slab_nbytes % self.block_nbytes:
            raise ConfigError(
                f"slab_nbytes must be a multiple of block_nbytes ({self.block_nbytes}),"
                f" not {self.slab_nbytes}"
            )
        if self.pool_nbytes < self.slab_nbytes:
            raise ConfigError(
                f"pool_nbytes must be at least slab_nbytes ({self.slab_nbytes}),"
                f" not {self.pool_nbytes}; make slabs smaller for a smaller pool"
            )

    @property
    def num_slabs(self) -> int:
        """Slabs in the pool when it is full.

        One less than would fit, if there are many: a save takes some memory beside them
        (stacks of threads, plan, manifest), and the budget is to hold with it.
        """
        fitting = self.pool_nbytes // self.slab_nbytes
        return fitting - 1 if fitting >= _MIN_FOR_RESERVE else fitting

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> CheckpointConfig:
        """Read options from variables named `CKPTIO_` and the option in capitals.

        Integers may be written in any base with its prefix (`0o640`).

        Args:
            environ: Variables to read; `os.environ` if not given.

        Raises:
            ConfigError: A variable with the prefix names no option, or has a bad value; or
                `environ` is not a mapping of strings.
        """
        variables = os.environ if environ is None else environ
        if not isinstance(variables, Mapping):
            raise ConfigError(f"environ= is a mapping of variables, not {shown(variables)}")
        fields = {f.name: f for f in dataclasses.fields(cls)}
        options: dict[str, float | str] = {}
        for key, text in variables.items():
            if not isinstance(key, str) or not isinstance(text, str):
                raise ConfigError(f"environ= has strings alone, not {shown(key)}: {shown(text)}")
            if not key.startswith(_ENV_PREFIX):
                continue
            name = key.removeprefix(_ENV_PREFIX).lower()
            if name not in fields or name == "storage_options":
                raise ConfigError(f"{key} names no option; options are {', '.join(fields)}")
            if isinstance(fields[name].default, int):
                try:
                    options[name] = int(text, 0)
                except ValueError:
                    hint = " (octal: 0o640)" if name.endswith("_mode") else ""
                    raise ConfigError(f"{key} must be an int{hint}, not {shown(text)}") from None
            elif isinstance(fields[name].default, float):
                try:
                    options[name] = float(text)
                except ValueError:
                    raise ConfigError(f"{key} must be a number, not {shown(text)}") from None
            else:
                options[name] = text
        return cls(**options)  # type: ignore[arg-type]  # checked by __post_init__


def _is_seconds(value: object, default: float) -> bool:
    """Whether a value is a time; 0 is one where the option's default is 0."""
    if type(value) not in {int, float}:
        return False
    return 0 < cast("float", value) <= MAX_S or value == default


def require_bool(name: str, value: object) -> None:
    """Check an argument that is on or off: a word for "no" would count as on.

    Raises:
        ConfigError: It is neither `True` nor `False`; numbers and booleans of numpy are neither.
    """
    if type(value) is not bool:
        raise ConfigError(f"{name}= is True or False, not {shown(value)}")
