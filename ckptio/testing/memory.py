"""A checkpoint's place in memory, with the rules of a real one.

It keeps what `storage.interface` promises: a manifest appears in one step or not at all,
exclusively without `overwrite`; the checkpoint it replaces stays whole until then; an
attempt that ends otherwise leaves nothing. It passes the same conformance tests as the
local storage.

Everything is counted, any operation can be failed, and what may wait waits for a time
drawn from a seed: on a `VirtualLoop` that costs nothing and shuffles the schedule.
"""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ckptio.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitConflictError,
)
from ckptio.format.manifest import decode_manifest
from ckptio.testing.faults import Operation, as_storage_fault
from ckptio.testing.memory_attempt import MemoryAttempt
from ckptio.testing.memory_files import MemoryNote, MemorySource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.format.manifest import Manifest
    from ckptio.storage.streams import Open
    from ckptio.testing.faults import Fault


@dataclass(slots=True)
class StorageCounts:
    """What a storage was asked to do.

    Attributes:
        num_manifest_reads: Manifests read.
        num_version_checks: Versions asked for.
        written_nbytes: Bytes of data files written.
        read_nbytes: Bytes of data files read.
        num_open_sinks: Data files that are being written now.
        num_open_sources: Data files that are being read now.
        num_open_attempts: Attempts that have neither committed nor aborted.
    """

    num_manifest_reads: int = 0
    num_version_checks: int = 0
    written_nbytes: int = 0
    read_nbytes: int = 0
    num_open_sinks: int = 0
    num_open_sources: int = 0
    num_open_attempts: int = 0


@dataclass(slots=True)
class _Place:
    """What is stored."""

    files: dict[str, bytearray] = field(default_factory=dict)
    notes: dict[str, bytes] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    manifest: bytes | None = None
    version: int = 0  # one more with each commit, by whatever name


class MemoryStorage:
    """An implementation of `storage.interface.Storage`. Thread-safe where that is.

    Args:
        path: What it is called.
        identity: The same for two names of one place; `path` if not given.
        seed: Draws how long what may wait waits.
        max_delay_s: The longest of these waits, in seconds; 0 for none.
        fault: Looks at each operation before it happens; its `OSError`s become
            `StorageError`s.

    Attributes:
        attempt_type: What `begin` and `join` make; a subclass may give another.
        operations: What was asked for by this name, in order.
        counts: The same in numbers.
    """

    is_outlived = False  # it waits for nothing but time
    attempt_type: ClassVar[type[MemoryAttempt]] = MemoryAttempt

    def __init__(
        self,
        path: str = "memory",
        *,
        identity: str | None = None,
        seed: int = 0,
        max_delay_s: float = 0.0,
        fault: Fault | None = None,
    ) -> None:
        self._path = path
        self._identity = identity or path
        self._rng = random.Random(seed)  # noqa: S311  # delays, nothing secret
        self._max_delay_s = max_delay_s
        self._place = _Place()
        self._lock = threading.Lock()
        self.fault = fault
        self.operations: list[Operation] = []
        self.counts = StorageCounts()

    @property
    def path(self) -> str:
        """What it is called."""
        return self._path

    @property
    def identity(self) -> str:
        """The same for two names of one place."""
        return self._identity

    async def identify(self) -> str:
        """The same; see `interface.Storage`."""
        return self.identity

    identify_now = identify  # it has always answered

    async def locate(self, *, gives_up: bool = True) -> bool:  # noqa: ARG002  # as others are
        """Do nothing: its name says where it is; see `interface.Storage`."""
        return True

    @property
    def gap_nbytes(self) -> int:
        """What is not wanted is left out: a seek costs nothing here."""
        return 0

    @property
    def files(self) -> dict[str, bytearray]:
        """Data files by name; changing one is how a test damages it."""
        return self._place.files

    @property
    def manifest(self) -> bytes | None:
        """The manifest, if there is a checkpoint."""
        return self._place.manifest

    @property
    def notes(self) -> dict[str, bytes]:
        """Notes by the id of their save."""
        return self._place.notes

    def die(self) -> None:
        """Let go of what a process that is dead by now held."""
        self._place.held.clear()

    def leftovers(self) -> list[str]:
        """Name the data files that the manifest does not."""
        needed: set[str] = set()
        if self._place.manifest is not None:
            needed = {entry.name for entry in decode_manifest(self._place.manifest).files}
        return sorted(self._place.files.keys() - needed)

    def another_name(self, path: str) -> MemoryStorage:
        """Give the same place under another name, as a link would.

        It counts its own operations, has no fault and no delays, and is a plain `MemoryStorage`.
        """
        twin = MemoryStorage(path, identity=self._identity)
        twin._place = self._place
        return twin

    def step(self, kind: str, name: str = "", nbytes: int = 0) -> None:
        """Count an operation, and fail it if it is to fail."""
        with self._lock:
            path = f"{self._path}/{name}" if name else self._path
            operation = Operation(len(self.operations), kind, path, nbytes)
            self.operations.append(operation)
        if self.fault is not None:
            as_storage_fault(self.fault)(operation)

    async def wait(self) -> None:
        """Wait for as long as the seed says."""
        if self._max_delay_s:
            await asyncio.sleep(self._rng.uniform(0, self._max_delay_s))

    async def version(self) -> int:
        """Tell manifests apart; see `interface.Storage`."""
        self.counts.num_version_checks += 1
        self.step("version")
        await self.wait()
        if self._place.manifest is None:
            raise CheckpointNotFoundError(self._path)
        return self._place.version

    async def read_manifest(self) -> tuple[int, bytes]:
        """Read the manifest and its version; see `interface.Storage`."""
        self.counts.num_manifest_reads += 1
        self.step("read_manifest")
        await self.wait()
        if self._place.manifest is None:
            raise CheckpointNotFoundError(self._path)
        read = self._place.version, self._place.manifest
        await self.wait()
        return read

    async def peek_manifest(self) -> bytes:
        """Read the manifest, which never hangs here; see `interface.Storage`."""
        return (await self.read_manifest())[1]

    async def find_below(self) -> str:
        """Find nothing: there are no directories; see `interface.Storage`."""
        return ""

    def remember(self, manifest: Manifest) -> None:
        """Do nothing with a manifest that is known; see `interface.Storage`."""

    async def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Give the sizes of data files; see `interface.Storage`."""
        self.step("sizes")
        await self.wait()
        files = self._place.files
        return [len(files[name]) if name in files else None for name in names]

    async def open(self, name: str, nbytes: int) -> MemorySource:
        """Open a data file; see `interface.Storage`."""
        self.step("open", name)
        await self.wait()
        return self._open(name, nbytes)

    async def opener(self) -> Open:
        """Give what opens a data file on the calling thread; see `interface.Storage`."""

        def open_here(name: str, nbytes: int) -> MemorySource:
            self.step("open", name)
            return self._open(name, nbytes)

        return open_here

    def _open(self, name: str, nbytes: int) -> MemorySource:
        data = self._place.files.get(name)
        if data is None:
            raise CheckpointChangedError(self._path)
        return MemorySource(self, name, data, nbytes)

    async def is_cached(self, ranges: Sequence[tuple[str, int, int]]) -> bool:
        """Say no, so that every read is made and counted; see `interface.Storage`."""
        del ranges
        return False

    async def begin(self, save_id: str, *, overwrite: bool, resumes: bool = False) -> MemoryAttempt:
        """Begin a save; see `interface.Storage`."""
        del resumes  # nothing is in the way of files here
        self.step("begin")
        await self.wait()
        if self._place.manifest is not None and not overwrite:
            raise CheckpointExistsError(self._path)
        return self.attempt_type(self, save_id, overwrite=overwrite, leads=True)

    async def join(self, save_id: str) -> MemoryAttempt:
        """Take part in a save of many ranks; see `interface.Storage`."""
        self.step("join")
        await self.wait()
        return self.attempt_type(self, save_id, overwrite=True, leads=False)

    async def commit(self, made: Sequence[str], manifest: bytes, *, overwrite: bool) -> None:
        """Publish a manifest in one step. Called by an attempt."""
        self.step("commit", nbytes=len(manifest))
        await self.wait()
        place = self._place
        if place.manifest is not None and not overwrite:
            raise CommitConflictError(self._path)
        replaced = None if place.manifest is None else decode_manifest(place.manifest)
        place.manifest = manifest
        place.version += 1
        if replaced is not None:
            for entry in replaced.files:
                if entry.name not in made:
                    place.files.pop(entry.name, None)
            if replaced.save_id != decode_manifest(manifest).save_id:
                place.notes.pop(replaced.save_id, None)

    async def take_note(self, save_id: str) -> MemoryNote | None:
        """Take a note; see `interface.Storage`."""
        self.step("take_note")
        await self.wait()
        if save_id not in self.notes or save_id in self._place.held:
            return None
        return self.hold(save_id)

    def hold(self, save_id: str) -> MemoryNote:
        """Hold a note that nobody has."""
        self._place.held.add(save_id)
        return MemoryNote(self, save_id, self._place.notes[save_id])

    async def read_note(self, save_id: str) -> bytes | None:
        """Read a note; see `interface.Storage`."""
        self.step("read_note")
        await self.wait()
        return self._place.notes.get(save_id)

    async def has_note(self, save_id: str | None) -> bool:
        """Look for a note; see `interface.Storage`."""
        self.step("has_note")
        await self.wait()
        return bool(self.notes) if save_id is None else save_id in self.notes

    def let_go(self, save_id: str, *, drop: bool) -> None:
        """Let go of a note, or remove it. Called by the note."""
        if drop:
            self.step("drop_note")
            self._place.notes.pop(save_id, None)
        self._place.held.discard(save_id)
