"""The peers, each at its default and at its best settings.

All of them block. A peer saves to a directory of its own and loads into given tensors;
"+ fsync" is added from outside where a peer offers none, and costs it one call.

torch's zip writer sums every record with CRC32, which is most of its time on large
tensors: `torch.serialization.set_crc32_options(False)` turns that off, for `torch.save`
and for DCP, which writes a zip archive per tensor. ckptio always sums.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.states import State


class Peer(Protocol):
    """Another way to save and load.

    Attributes:
        name: As the tables have it, for a save.
        load_name: The same for a load.
        missing: Why it cannot be used here; empty if it can.
        is_slow: Measured in fewer rounds.
        is_best: Its settings are its best, or as good as any.
    """

    @property
    def name(self) -> str: ...  # noqa: D102  # documented by the class

    @property
    def load_name(self) -> str: ...  # noqa: D102  # as above

    @property
    def missing(self) -> str: ...  # noqa: D102  # as above

    @property
    def is_slow(self) -> bool: ...  # noqa: D102  # as above

    @property
    def is_best(self) -> bool: ...  # noqa: D102  # as above

    def save(self, state: State, path: str) -> None:
        """Save to the directory `path`, which does not exist."""

    def load(self, path: str, into: State) -> None:
        """Fill all tensors of `into`."""

    def read(self, path: str, names: Sequence[str], like: State) -> State:
        """Read some tensors, shaped as in `like`."""


@runtime_checkable
class SupportsOpen(Protocol):
    """A peer that imports or starts what it works with."""

    def open(self) -> None:
        """Have that done; more than once is once."""


def open_peer(peer: Peer) -> None:
    """Have a peer ready, so that no clock runs while it imports."""
    if isinstance(peer, SupportsOpen) and not peer.missing:
        peer.open()


@contextmanager
def crc32(*, is_on: bool) -> Iterator[None]:
    """Have torch's zip writer sum its records, or not."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(is_on)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@contextmanager
def quiet_dcp() -> Iterator[None]:
    """Keep DCP from warning, at every call and in every thread, that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _sync_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _settings(*words: str) -> str:
    return ", ".join(word for word in words if word)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPeer:
    """`torch.save`, and `torch.load` with `mmap` and a copy."""

    has_crc: bool = False
    has_fsync: bool = True
    has_mmap: bool = True
    missing: str = ""

    @property
    def name(self) -> str:
        """Its settings."""
        sync = " + fsync" if self.has_fsync else ""
        return f"torch.save{sync} ({'default' if self.has_crc else 'crc32 off'})"

    @property
    def load_name(self) -> str:
        """Its settings when it loads."""
        return f"torch.load({'mmap=True' if self.has_mmap else ''}) + copy_"

    @property
    def is_slow(self) -> bool:
        """With its default."""
        return self.has_crc

    @property
    def is_best(self) -> bool:
        """Without sums."""
        return not self.has_crc

    def save(self, state: State, path: str) -> None:
        """Save to one file."""
        os.mkdir(path)
        file = os.path.join(path, "state.pt")
        with crc32(is_on=self.has_crc):
            torch.save(state, file)
        if self.has_fsync:
            _sync_file(file)

    def load(self, path: str, into: State) -> None:
        """Load lazily where it can, and copy."""
        for name, tensor in self._open(path).items():
            into[name].copy_(tensor)

    def read(self, path: str, names: Sequence[str], like: State) -> State:  # noqa: ARG002  # a peer
        """Map the file and clone some of it."""
        state = self._open(path)
        return {name: state[name].clone() for name in names}

    def _open(self, path: str) -> State:
        file = os.path.join(path, "state.pt")
        # where there is a device, copied there from the map, not into new memory first
        state: State = torch.load(
            file, map_location="cpu", mmap=self.has_mmap or None, weights_only=True
        )
        return state


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsPeer:
    """safetensors: `save_file`, and `safe_open` or `load_file` with a copy."""

    has_fsync: bool = True
    has_load_file: bool = False
    device: str = "cpu"
    is_slow: bool = False
    is_best: bool = True

    @property
    def name(self) -> str:
        """Its settings."""
        return f"safetensors save_file{' + fsync' if self.has_fsync else ''}"

    @property
    def load_name(self) -> str:
        """Its settings when it loads."""
        where = "" if self.device == "cpu" else f"(device={self.device!r})"
        return f"safetensors {'load_file' if self.has_load_file else 'safe_open'}{where} + copy_"

    @property
    def missing(self) -> str:
        """Whether it is installed."""
        found = importlib.util.find_spec("safetensors")
        return "" if found else "safetensors is not installed"

    def save(self, state: State, path: str) -> None:
        """Save to one file."""
        from safetensors.torch import save_file  # noqa: PLC0415  # may not be installed

        os.mkdir(path)
        file = os.path.join(path, "state.safetensors")
        save_file(state, file)
        if self.has_fsync:
            _sync_file(file)

    def load(self, path: str, into: State) -> None:
        """Copy tensor by tensor out of the mapped file."""
        from safetensors import safe_open  # noqa: PLC0415  # may not be installed
        from safetensors.torch import load_file  # noqa: PLC0415  # as above

        file = os.path.join(path, "state.safetensors")
        if self.has_load_file:
            for name, tensor in load_file(file, device=self.device).items():
                into[name].copy_(tensor)
            return
        with safe_open(file, framework="pt", device=self.device) as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                into[name].copy_(opened.get_tensor(name))

    def read(self, path: str, names: Sequence[str], like: State) -> State:  # noqa: ARG002  # a peer
        """Read some tensors of the file."""
        from safetensors import safe_open  # noqa: PLC0415  # may not be installed

        file = os.path.join(path, "state.safetensors")
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name).clone() for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpPeer:
    """`torch.distributed.checkpoint` with its file system writer, one process."""

    num_threads: int = 1
    has_crc: bool = False
    has_fsync: bool = True
    missing: str = ""

    @property
    def name(self) -> str:
        """Its settings."""
        words = _settings(
            f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}",
            "default crc32" if self.has_crc else "crc32 off",
            "" if self.has_fsync else "no sync",
        )
        return f"dcp.save ({words})"

    @property
    def load_name(self) -> str:
        """It has no settings when it loads."""
        return "dcp.load"

    @property
    def is_slow(self) -> bool:
        """With its default."""
        return self.has_crc

    @property
    def is_best(self) -> bool:
        """Without sums, with one thread; more only help where sums are the bottleneck."""
        return not self.has_crc and self.num_threads == 1

    def writer(self, path: str) -> FileSystemWriter:
        """Make the writer with these settings."""
        return FileSystemWriter(path, thread_count=self.num_threads, sync_files=self.has_fsync)

    def save(self, state: State, path: str) -> None:
        """Save to a directory."""
        with crc32(is_on=self.has_crc):
            dcp_save(dict(state), storage_writer=self.writer(path), no_dist=True)

    def load(self, path: str, into: State) -> None:
        """Load into given tensors, as it always does."""
        dcp_load(dict(into), storage_reader=FileSystemReader(path), no_dist=True)

    def read(self, path: str, names: Sequence[str], like: State) -> State:
        """Load some tensors."""
        state = {name: torch.empty_like(like[name]) for name in names}
        self.load(path, state)
        return state


def savers(*, is_durable: bool) -> list[Peer]:
    """Give the peers that a save is compared with."""
    threads = (1, 2, 4)
    return [
        SafetensorsPeer(has_fsync=is_durable),
        TorchPeer(has_fsync=is_durable),
        TorchPeer(has_fsync=is_durable, has_crc=True),
        *(DcpPeer(num_threads=n, has_fsync=is_durable) for n in threads),
        DcpPeer(has_fsync=is_durable, has_crc=True),
    ]


def loaders() -> list[Peer]:
    """Give the peers that a load into given tensors is compared with."""
    return [
        SafetensorsPeer(),
        SafetensorsPeer(has_load_file=True),
        TorchPeer(),
        DcpPeer(num_threads=2),
    ]
