"""What it takes to plan for very many ranks: time, memory, and bytes on the network.

A job is made up here without tensors: every rank says what it holds, and rank 0's part is
done as the engine does it, from the messages to the manifest. A process of its own, so
that its peak of memory is what this takes and nothing else.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from bench.harness import timed
from bench.isolate import peak_of
from ckptio import CheckpointConfig
from ckptio._gc import without_collection
from ckptio.config import GiB
from ckptio.engine.decide import _leaves
from ckptio.format.checksum import pack_checksums
from ckptio.format.compose import encode_manifest
from ckptio.format.manifest import FileEntry, Manifest
from ckptio.plan.exchange import decode_runs, plan_exchange
from ckptio.plan.job import merge_tables, plan_job
from ckptio.plan.save import plan_save
from ckptio.ranks.frames import decode
from ckptio.shards import LeafSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio.plan.exchange import Part
    from ckptio.plan.job import JobPlan

    Json = Any

_GROUP = 64
_COLUMNS = 1024
_RANK_NBYTES = 1 * GiB
_RANKS_PER_HOST = 8
_NUM_REPLICAS = 4
_REPLICA_NBYTES = 16 * GiB
_ITEM_NBYTES = 2


@dataclass(frozen=True, slots=True)
class Size:
    """How large a job is.

    Attributes:
        num_ranks: Its ranks. 64 of them share a tensor, or all if there are fewer.
        per_rank: Blocks that each rank holds. One of eight is a whole small tensor, which
            the others of the 64 hold too; others are rows of large ones, 1 GiB together.
    """

    num_ranks: int
    per_rank: int

    def __str__(self) -> str:
        return f"{self.num_ranks:,} ranks x {self.per_rank:,} blocks"

    def holds(self, rank: int) -> list[LeafSpec]:
        """Give the blocks of a rank."""
        group, place = divmod(rank, _GROUP)
        members = min(_GROUP, self.num_ranks - group * _GROUP)
        rows = max(1, _RANK_NBYTES // self.per_rank // _COLUMNS // _ITEM_NBYTES)
        leaves = []
        for i in range(self.per_rank):
            name = f"model.stages.{group}.layers.{i}.weight"
            if i % 8 == 7:
                leaves.append(LeafSpec(name, "bfloat16", (_COLUMNS,)))
                continue
            whole = (members * rows, _COLUMNS)
            leaves.append(LeafSpec(name, "bfloat16", (rows, _COLUMNS), whole, (place * rows, 0)))
        return leaves

    def hosts(self) -> list[str]:
        """Give the host of each rank."""
        return [f"node{rank // _RANKS_PER_HOST}" for rank in range(self.num_ranks)]


def measure_save(size: Size) -> dict[str, float]:
    """Do what rank 0 does in a first save."""
    figures: dict[str, float] = {}
    messages = [msgspec.json.encode(size.holds(rank)) for rank in range(size.num_ranks)]
    figures["listing_nbytes"] = sum(map(len, messages))

    def plan() -> JobPlan:
        with timed(figures, "decode_s"):
            listed = [_leaves(decode(message)) for message in messages]
        with timed(figures, "plan_s"):
            return plan_job(listed, hosts=size.hosts())

    job, figures["peak_nbytes"] = peak_of(plan)
    with timed(figures, "answer_s"):
        answers = [msgspec.json.encode(assigned) for assigned in job.assignments]
    figures["answer_nbytes"] = sum(map(len, answers))
    figures["manifest_nbytes"], figures["receipt_nbytes"] = _commit(size, job, figures)
    return figures


def _commit(size: Size, job: JobPlan, figures: dict[str, float]) -> tuple[int, int]:
    """Put the manifest together from the places of all ranks."""
    config = CheckpointConfig()
    places: list[Sequence[tuple[int, int]]] = []
    files: list[tuple[str, int, tuple[int, ...], int]] = []
    num_files = []
    for rank, assigned in enumerate(job.assignments):
        specs = size.holds(rank)
        with timed(figures, "own_s"):
            plan = plan_save(specs, config, assigned.parts(specs))
        places.append(plan.places)
        num_files.append(len(plan.buckets))
        for bucket in plan.buckets:
            sums = tuple(range(0xABCD0000, 0xABCD0000 - (-bucket.nbytes // config.block_nbytes)))
            name = f"data-{'0' * 32}-{rank:05}-{bucket.index}.safetensors"
            files.append((name, bucket.nbytes, sums, rank))
    receipts = sum(len(msgspec.json.encode(placed)) for placed in places)
    receipts += sum(len(name) + 8 + 4 * -(-len(sums) * 4 // 3) for name, _, sums, _ in files)
    with timed(figures, "manifest_s"):
        manifest = encode_manifest(
            writer="0",
            save_id="0" * 32,
            created="2026-01-01T00:00:00.000+00:00",
            block_nbytes=config.block_nbytes,
            files=files,
            tensors=merge_tables(job, places, num_files),
            tree=b"null",
            hosts=size.hosts(),
        )
    return len(manifest), receipts


def measure_exchange(size: Size) -> dict[str, float]:
    """Do what rank 0 does in a load: files of 1 GiB, each wanted by four ranks."""
    return _exchange(size, _RANK_NBYTES, _NUM_REPLICAS)


def measure_replicated(size: Size) -> dict[str, float]:
    """Do what rank 0 does in a load of 16 GiB, a file a rank, of which each rank wants all."""
    return _exchange(size, _REPLICA_NBYTES // size.num_ranks, size.num_ranks)


def _exchange(size: Size, file_nbytes: int, num_replicas: int) -> dict[str, float]:
    """Do what rank 0 does in a load of which several ranks want the same files."""
    figures: dict[str, float] = {}
    config = CheckpointConfig()
    num_blocks = -(-file_nbytes // config.block_nbytes)
    sums = pack_checksums([0] * num_blocks)
    manifest = Manifest(
        ckptio=2,
        writer="0",
        save_id="0" * 32,
        created="2026-01-01T00:00:00.000+00:00",
        block_nbytes=config.block_nbytes,
        files=tuple(
            FileEntry(f"data-{rank}", file_nbytes, sums, rank) for rank in range(size.num_ranks)
        ),
        tensors=(),
        hosts=tuple(size.hosts()),
        tree=msgspec.Raw(b"null"),
    )
    messages = []
    for rank in range(size.num_ranks):
        first = rank - rank % num_replicas
        wanted = range(first, min(size.num_ranks, first + num_replicas))
        messages.append(msgspec.json.encode([(file, (0, num_blocks)) for file in wanted]))
    figures["listing_nbytes"] = sum(map(len, messages))

    decode_all = without_collection(lambda: [decode_runs(decode(each)) for each in messages])
    planning = without_collection(plan_exchange)

    def plan() -> list[bytes]:
        with timed(figures, "decode_s"):
            wants = decode_all()
        with timed(figures, "plan_s"):
            planned = planning(manifest, wants, size.hosts(), config.slab_nbytes)
        with timed(figures, "answer_s"):
            return _encoded(planned.parts())

    answers, figures["peak_nbytes"] = peak_of(plan)
    figures["answer_nbytes"] = sum(map(len, answers))
    return figures


def _encoded(parts: Sequence[Part]) -> list[bytes]:
    """Encode what ranks are told, once for all that are told the same, as the hub does."""
    encoded: dict[int, bytes] = {}
    for part in parts:
        if id(part) not in encoded:
            encoded[id(part)] = msgspec.json.encode(part)
    return [encoded[id(part)] for part in parts]


def measure_dcp(size: Size) -> dict[str, float]:
    """Do what DCP does on rank 0: the plans of all ranks, pickled, to one plan."""
    figures: dict[str, float] = {}
    messages = [pickle.dumps(_dcp_plan(size, rank)) for rank in range(size.num_ranks)]
    figures["listing_nbytes"] = sum(map(len, messages))

    def plan() -> tuple[list[SavePlan], object]:
        with timed(figures, "decode_s"):
            plans = [pickle.loads(message) for message in messages]  # noqa: S301  # made above
        planner = DefaultSavePlanner()
        with timed(figures, "plan_s"):
            return planner.create_global_plan(plans)

    (plans, metadata), figures["peak_nbytes"] = peak_of(plan)
    with timed(figures, "answer_s"):
        figures["answer_nbytes"] = sum(len(pickle.dumps(plan)) for plan in plans)
    with timed(figures, "manifest_s"):  # without the places, which the writer adds
        figures["manifest_nbytes"] = len(pickle.dumps(metadata))
    return figures


def _dcp_plan(size: Size, rank: int) -> SavePlan:
    """Make the plan that DCP's planner makes of the same blocks."""
    properties = TensorProperties(dtype=torch.bfloat16)
    items = []
    for leaf in size.holds(rank):
        start = torch.Size(leaf.global_offset or (0,) * len(leaf.shape))
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=start, sizes=torch.Size(leaf.shape)),
            properties=properties,
            size=torch.Size(leaf.global_shape or leaf.shape),
        )
        kind = WriteItemType.TENSOR if leaf.global_shape is None else WriteItemType.SHARD
        items.append(WriteItem(index=MetadataIndex(leaf.name, start), type=kind, tensor_data=data))
    return SavePlan(items, planner_data={item.index.fqn: (item.index.fqn,) for item in items})
