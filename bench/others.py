"""Peers that few machines have: torchsnapshot, torch_checkpointing, Orbax, Run:ai's streamer.

Each at the settings that were fastest here: torchsnapshot puts small tensors together (by
default it writes a file for each); torch_checkpointing writes through the page cache (its direct
writes fail on sizes that are no multiple of the disk's blocks); Orbax takes zarr 3 without
compression. None of them but Orbax syncs what it wrote, so every file is synced after it.

All are imported, and what they keep is started, before a clock starts (`open`).

What is not installed is a line with that reason. Megatron-core is not among them: its save asks
for a CUDA device.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from bench.baselines import SafetensorsPeer, crc32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from bench.baselines import Peer
    from bench.states import State

_ITEM = "state"


def _missing(module: str, name: str) -> str:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # what it is in
        found = None
    return "" if found else f"{name} is not installed"


def sync_files(path: str) -> None:
    """Sync every file below a directory, and the directories."""
    for directory, _, files in os.walk(path):
        for name in (*files, "."):
            fd = os.open(os.path.join(directory, name), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _some(peer: Peer, path: str, names: Sequence[str], like: State) -> State:
    """Load all of a checkpoint, and give some."""
    state = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    peer.load(path, state)
    return {name: state[name] for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchsnapshotPeer:
    """`torchsnapshot.Snapshot`, tensors batched into slabs."""

    name: str = "torchsnapshot take + fsync (batched)"
    load_name: str = "torchsnapshot restore"
    is_slow: bool = False
    is_best: bool = True

    @property
    def missing(self) -> str:
        """Whether it is installed."""
        return _missing("torchsnapshot", "torchsnapshot")

    def open(self) -> None:
        """Import it."""
        import torchsnapshot  # noqa: F401, PLC0415  # may not be installed

    def save(self, state: State, path: str) -> None:
        """Take a snapshot."""
        import torchsnapshot  # noqa: PLC0415  # may not be installed

        with _batched():
            _without_loop(torchsnapshot.Snapshot.take, path, {_ITEM: _stateful(state)})
        sync_files(path)

    def start(self, state: State, path: str) -> Callable[[], None]:
        """Stage, and save in the background; gives what waits for the end."""
        import torchsnapshot  # noqa: PLC0415  # may not be installed

        with _batched():
            take = torchsnapshot.Snapshot.async_take
            pending = _without_loop(take, path, {_ITEM: _stateful(state)})

        def wait() -> None:
            pending.wait()
            sync_files(path)

        return wait

    def load(self, path: str, into: State) -> None:
        """Restore in place."""
        import torchsnapshot  # noqa: PLC0415  # may not be installed

        with warnings.catch_warnings(action="ignore"):
            _without_loop(torchsnapshot.Snapshot(path).restore, {_ITEM: _stateful(into)})

    def read(self, path: str, names: Sequence[str], like: State) -> State:
        """Restore all."""
        return _some(self, path, names, like)


def _without_loop(function: Callable[..., Any], *arguments: object) -> Any:
    """Call in a thread and wait: torchsnapshot's calls fail where an event loop runs."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function, *arguments).result()


def _stateful(state: State) -> Any:
    import torchsnapshot  # noqa: PLC0415  # may not be installed

    stateful = torchsnapshot.StateDict()
    stateful.update(state)
    return stateful


@contextmanager
def _batched() -> Iterator[None]:
    """Have torchsnapshot put small tensors together, and not warn of typed storages."""
    from torchsnapshot import knobs  # noqa: PLC0415  # may not be installed

    batching = knobs.override_is_batching_disabled(disabled=False)
    with warnings.catch_warnings(action="ignore"), batching:
        yield


@dataclass(slots=True, kw_only=True)
class TorchCheckpointingPeer:
    """`torch_checkpointing.CheckpointManager`, in this process or with a process that writes."""

    is_async: bool = False
    is_slow: bool = False
    is_best: bool = True
    load_name: str = "torch_checkpointing load"
    _manager: Any = field(default=None, init=False)

    @property
    def name(self) -> str:
        """Its settings."""
        return "torch_checkpointing save + fsync (crc32 off)"

    @property
    def missing(self) -> str:
        """Whether it is installed."""
        return _missing("torch_checkpointing", "torch_checkpointing")

    def open(self) -> None:
        """Import it, and start its process, if it has one."""
        self._opened()

    def _opened(self) -> Any:
        if self._manager is None:
            import torch_checkpointing as tc  # noqa: PLC0415  # may not be installed
            from torch_checkpointing.storage import filesystem  # noqa: PLC0415  # as above

            config = tc.CheckpointManager.Config
            made = config.with_async_save() if self.is_async else config.with_sync_save()
            made.storage_config = filesystem.LocalFileSystemStorageConfig(use_direct_io=False)
            if self.is_async:
                made.subprocess_init_fn = _without_crc32
            self._manager = made.build()
        return self._manager

    def save(self, state: State, path: str) -> None:
        """Save, and wait."""
        with crc32(is_on=False):
            self._opened().save(path, {_ITEM: state})
        sync_files(path)

    def start(self, state: State, path: str) -> Callable[[], None]:
        """Stage into shared memory; another process writes it. Gives what waits for the end."""
        manager = self._opened()
        written: Future[object] = manager.save(path, {_ITEM: state})
        with manager.lock():  # as its documents say of a step that changes parameters
            pass

        def wait() -> None:
            written.result()
            sync_files(path)

        return wait

    def load(self, path: str, into: State) -> None:
        """Load in place."""
        self._opened().load(path, into={_ITEM: into}, strict=True)

    def read(self, path: str, names: Sequence[str], like: State) -> State:
        """Load all."""
        return _some(self, path, names, like)

    def close(self) -> None:
        """End its process, if it has one."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None


def _without_crc32(*_: object) -> None:
    """Turn sums off in the process that writes."""
    torch.serialization.set_crc32_options(False)


@dataclass(slots=True, kw_only=True)
class OrbaxPeer:
    """`orbax.checkpoint` of numpy's views of the tensors, zarr 3, nothing compressed."""

    name: str = "orbax save (zarr 3, not compressed)"
    load_name: str = "orbax restore + copy_"
    is_slow: bool = True
    is_best: bool = True
    _checkpointer: Any = field(default=None, init=False)

    @property
    def missing(self) -> str:
        """Whether it is installed."""
        return _missing("orbax.checkpoint", "orbax-checkpoint")

    def open(self) -> None:
        """Import it, and JAX with it, which takes seconds; start its threads."""
        self._opened()

    def _opened(self) -> Any:
        if self._checkpointer is None:
            import orbax.checkpoint as ocp  # noqa: PLC0415  # may not be installed

            handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
            self._checkpointer = ocp.AsyncCheckpointer(handler)
        return self._checkpointer

    def save(self, state: State, path: str) -> None:
        """Save, and wait."""
        self.start(state, path)()

    def start(self, state: State, path: str) -> Callable[[], None]:
        """Copy, and save in the background; gives what waits for the end."""
        checkpointer = self._opened()
        checkpointer.save(path, {name: _as_numpy(tensor) for name, tensor in state.items()})

        def wait() -> None:
            checkpointer.wait_until_finished()

        return wait

    def load(self, path: str, into: State) -> None:
        """Restore, and copy: it has no targets."""
        for name, array in self._opened().restore(path).items():
            _as_torch_bytes(into[name]).copy_(_bytes_of(array))

    def read(self, path: str, names: Sequence[str], like: State) -> State:
        """Load all."""
        return _some(self, path, names, like)

    def close(self) -> None:
        """End its threads."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None


def _as_numpy(tensor: torch.Tensor) -> Any:
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes  # noqa: PLC0415  # comes with Orbax

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _as_torch_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _bytes_of(array: Any) -> torch.Tensor:
    import numpy as np  # noqa: PLC0415  # as the other modules of a peer

    flat = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)
    with warnings.catch_warnings(action="ignore"):  # it may not be written to, and is not
        return torch.from_numpy(flat)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunaiPeer:
    """Run:ai's model streamer: loads what safetensors wrote."""

    name: str = "safetensors, for Run:ai's streamer"
    load_name: str = "Run:ai's streamer + copy_"
    is_slow: bool = False
    is_best: bool = True

    @property
    def missing(self) -> str:
        """Whether it is installed."""
        return _missing("runai_model_streamer", "runai-model-streamer")

    def open(self) -> None:
        """Import it."""
        import runai_model_streamer  # noqa: F401, PLC0415  # may not be installed

    def save(self, state: State, path: str) -> None:
        """Save with safetensors."""
        SafetensorsPeer().save(state, path)

    def load(self, path: str, into: State) -> None:
        """Stream, and copy each tensor as it comes."""
        from runai_model_streamer import SafetensorsStreamer  # noqa: PLC0415  # may be missing

        logging.getLogger("runai_model_streamer").setLevel(logging.WARNING)
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(os.path.join(path, "state.safetensors"))
            for name, tensor in streamer.get_tensors():
                into[name].copy_(tensor)

    def read(self, path: str, names: Sequence[str], like: State) -> State:
        """Load all."""
        return _some(self, path, names, like)
