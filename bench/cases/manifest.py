"""`manifest_open`."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from bench.baselines import SafetensorsPeer
from bench.harness import Bench, Clock, Metric, Subject, case
from bench.states import tiny_tensors
from ckptio import Engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.states import State

OPEN = Metric(key="open_s", label="open, s", digits=4)
AGAIN = Metric(key="again_s", label="again, s", digits=4)
_NUM_CHUNKS = 65_536
_METADATA = ".metadata"


@case(rounds=7)
async def manifest_open(bench: Bench) -> None:
    """Time how long it takes to learn what is in a checkpoint of 65,536 chunks.

    ckptio's `inspect` in a new engine, and once more, unchanged, from its metadata cache;
    against the header of a safetensors file and DCP's `.metadata`, which neither keeps.
    Files are in the page cache. The `.metadata` is made here as DCP writes it, without the
    data: saving so many tensors with DCP takes half a minute.
    """
    state = tiny_tensors(max(64, round(_NUM_CHUNKS * bench.scale)))
    path = bench.path("opened")
    async with Engine() as engine:
        await engine.save(state, path)
    subjects = [_ckptio(path, len(state)), _safetensors(bench, state), _dcp(bench, state)]
    await bench.compare(
        f"open a checkpoint of {len(state):,} chunks", subjects, metrics=(OPEN, AGAIN)
    )


def _ckptio(path: str, count: int) -> Subject:
    async def run() -> dict[str, float]:
        figures: dict[str, float] = {}
        async with Engine() as engine:
            for metric in (OPEN, AGAIN):
                clock = Clock()
                manifest = await engine.inspect(path)
                figures[metric.key] = clock.elapsed_s()
                assert sum(len(t.chunks) for t in manifest.tensors) == count
            assert engine.cache_statistics().num_reads == 1
        return figures

    return Subject(name="ckptio inspect", kind="ckptio", run=run)


def _blocking(name: str, count: int, read: Callable[[], int], missing: str = "") -> Subject:
    """Call `read` twice; it gives how many chunks it found."""

    async def run() -> dict[str, float]:
        figures: dict[str, float] = {}
        for metric in (OPEN, AGAIN):
            clock = Clock()
            found = read()
            figures[metric.key] = clock.elapsed_s()
            assert found == count, f"{found} chunks of {count}"
        return figures

    return Subject(name=name, run=run, missing=missing)


def _safetensors(bench: Bench, state: State) -> Subject:
    peer = SafetensorsPeer(has_fsync=False)
    path = bench.path("opened-safetensors")
    if not peer.missing:
        peer.save(state, path)

    def read() -> int:
        from safetensors import safe_open  # noqa: PLC0415  # may not be installed

        with safe_open(os.path.join(path, "state.safetensors"), framework="pt") as file:
            return len(file.keys())

    return _blocking("safetensors safe_open, keys", len(state), read, peer.missing)


def _dcp(bench: Bench, state: State) -> Subject:
    path = bench.path("opened-dcp")
    os.mkdir(path)
    with open(os.path.join(path, _METADATA), "wb") as file:
        pickle.dump(_metadata(state), file)

    def read() -> int:
        metadata = FileSystemReader(path).read_metadata()
        entries = metadata.state_dict_metadata.values()
        return sum(1 if isinstance(e, BytesStorageMetadata) else len(e.chunks) for e in entries)

    return _blocking("DCP read_metadata", len(state), read)


def _metadata(state: State) -> Metadata:
    """Make what `FileSystemWriter.finish` pickles for such a state."""
    tensors = {}
    places = {}
    offset = 0
    for name, tensor in state.items():
        start = torch.Size([0] * tensor.dim())
        chunk = ChunkStorageMetadata(offsets=start, sizes=tensor.size())
        tensors[name] = TensorStorageMetadata(
            properties=TensorProperties.create_from_tensor(tensor),
            size=tensor.size(),
            chunks=[chunk],
        )
        length = tensor.nbytes + 1_000  # a zip archive each
        places[MetadataIndex(name, start)] = _StorageInfo("__0_0.distcp", offset, length)
        offset += length
    return Metadata(state_dict_metadata=dict(tensors), storage_data=places)
