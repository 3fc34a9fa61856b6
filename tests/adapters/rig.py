"""What tests of the DCP plug-ins have in common."""

from __future__ import annotations

import contextlib
import gc
import resource
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from ckptio import events
from ckptio.adapters.dcp import StorageReader, StorageWriter
from ckptio.config import CheckpointConfig, KiB
from ckptio.runtime import aside
from tests.conftest import let_end
from tests.foreign.rig import NO_DIST
from tests.rig import config_with
from tests.strategies import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata

#: Small blocks, nothing synced.
QUICK = config_with(durability="none")


def save(state: dict[str, Any], path: Path | str | None = None, **options: Any) -> Metadata:
    """Save through DCP, on one rank."""
    writer = options.pop("storage_writer", None) or StorageWriter(path, config=QUICK)
    with _without_groups():
        metadata: Metadata = state_dict_saver.save(
            state, storage_writer=writer, **NO_DIST, **options
        )
    return metadata


def load(state: dict[str, Any], path: Path | str | None = None, **options: Any) -> dict[str, Any]:
    """Load through DCP, on one rank; gives the state."""
    reader = options.pop("storage_reader", None) or StorageReader(path, config=QUICK)
    with _without_groups():
        state_dict_loader.load(state, storage_reader=reader, **NO_DIST, **options)
    return state


@contextlib.contextmanager
def _without_groups() -> Iterator[None]:
    """Keep DCP from warning that there is no process group, which is what is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ")
        yield


def end_garbage() -> None:
    """Collect writers that nobody has, and wait until what they left is removed, on a thread."""
    gc.collect()
    aside._end_aside()
    let_end({thread for thread in threading.enumerate() if thread.name == "ckptio-dcp"})


@contextlib.contextmanager
def cause() -> Iterator[list[BaseException]]:
    """Expect DCP to fail, and give what it wraps."""
    causes: list[BaseException] = []
    try:
        yield causes
    except CheckpointException as error:
        causes += [failure for failure, _ in error.failures.values()]
    else:
        raise AssertionError("DCP did not fail")


@contextlib.contextmanager
def small_disk(nbytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond `nbytes`: a write is short, the next fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Reads:
    """An observer that adds up what is read."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.ReadProgressed) and event.read_nbytes == event.nbytes:
            self.nbytes += event.nbytes


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal: types, element types, shapes and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and bytes_of(one) == bytes_of(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def blank(value: Any) -> Any:
    """Give the same state with zeros in it, and with nothing where there is no tensor."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(v, (torch.Tensor, dict, list)) for v in value):
        return [blank(item) for item in value]
    return None


def large_blocks(**options: Any) -> CheckpointConfig:
    """Give a config whose blocks are 64 KiB."""
    return config_with(
        **{
            "pool_nbytes": 4096 * KiB,
            "slab_nbytes": 512 * KiB,
            "block_nbytes": 64 * KiB,
            "durability": "none",
            **options,
        }
    )
