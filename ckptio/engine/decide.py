"""What rank 0 decides for all in a save: who writes what, and whether it is a checkpoint.

It keeps what it decided: a plan by its id, with the blocks of every rank, the places of
their parts and the tensor table, so that from the second save on only names, sizes,
checksums and values cross the network.
"""

from __future__ import annotations

import base64
import datetime as dt
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ckptio._aio import run_blocking
from ckptio._version import __version__
from ckptio.errors import ConfigError, PlanError
from ckptio.format.checksum import unpack_checksums
from ckptio.format.manifest import encode_manifest
from ckptio.plan.job import merge_tables, plan_job
from ckptio.plan.replan import replan_job
from ckptio.plan.trees import RankTree, find_twins, merge_trees, missing_trees
from ckptio.ranks.interface import Same
from ckptio.shards import LeafSpec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ckptio.engine.context import EngineContext
    from ckptio.engine.save import SaveJob
    from ckptio.plan.job import JobPlan
    from ckptio.storage.interface import Attempt

    Json = Any
    Message = dict[str, Json]

_COMMON = ("path", "overwrite", "block_nbytes", "replicate", "local_replica_nbytes")


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """A plan that ranks follow, and what is known of it.

    Attributes:
        leaves: The blocks of each rank.
        job: Who writes what.
        places: Where the parts of each rank lie in its files; `None` until it has said so.
        num_files: Files of each rank.
        table: The manifest's tensor table, once all places are known.
    """

    leaves: list[tuple[LeafSpec, ...]]
    job: JobPlan
    places: list[list[tuple[int, int]] | None]
    num_files: list[int]
    table: bytes = b""
    numbers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Number the tensors."""
        self.numbers = {tensor.name: i for i, tensor in enumerate(self.job.tensors)}


class Decider:
    """Decides for one save. Of use on rank 0 alone; other ranks pass it on unused.

    Args:
        job: The save.
        context: The engine.
        my_turn: Waits until earlier saves to the same place have ended.

    Attributes:
        attempt: What is committed; set before the receipts are in.
    """

    def __init__(
        self, job: SaveJob, context: EngineContext, my_turn: Callable[[], Awaitable[None]]
    ) -> None:
        self._job = job
        self._context = context
        self._my_turn = my_turn
        self.attempt: Attempt | None = None

    async def decide(self, messages: Sequence[Message]) -> Sequence[Json] | Same:
        """Answer a round.

        Raises:
            ConfigError: Ranks save to different paths, or with different options.
            PlanError: What the ranks hold is no whole state, or values differ.
            CheckpointError: It could not be committed.
        """
        _check_common(messages)
        if all(message["kind"] == "receipt" for message in messages):
            return await self._commit(messages)
        return await run_blocking(self._context.executor, self._plan, messages)

    def _plan(self, messages: Sequence[Message]) -> Sequence[Json]:
        """Share out what the ranks hold. Blocks."""
        if all(message["kind"] == "listing" for message in messages):
            leaves = [_leaves(message["leaves"]) for message in messages]
            config = self._context.config
            job = plan_job(
                leaves,
                hosts=self._context.ranks.hosts,
                replicate=config.replicate,
                local_nbytes=config.local_replica_nbytes,
            )
            record = JobRecord(
                leaves=leaves,
                job=job,
                places=[None] * len(leaves),
                num_files=[0] * len(leaves),
            )
            return self._answers(record, messages)
        return self._replan(messages)

    def _replan(self, messages: Sequence[Message]) -> Sequence[Json]:
        """Share out what is new on some ranks, while others have written as before."""
        old = self._record_of([m for m in messages if m["kind"] == "receipt"])
        changed = {
            rank: _leaves(message["leaves"])
            for rank, message in enumerate(messages)
            if message["kind"] == "listing"
        }
        job, kept = replan_job(old.job, old.leaves, changed)
        record = JobRecord(
            leaves=[changed.get(rank, leaves) for rank, leaves in enumerate(old.leaves)],
            job=job,
            places=[
                _in_order(old.places[rank], order) if order is not None else None
                for rank, order in enumerate(kept)
            ],
            num_files=list(old.num_files),
        )
        return self._answers(record, messages)

    def _answers(self, record: JobRecord, messages: Sequence[Message]) -> Sequence[Json]:
        """Keep a plan, and tell each rank its part of it."""
        plan_id = secrets.token_hex(8)
        self._context.jobs.put(plan_id, record)
        twins = find_twins([message["tree"][0] for message in messages])
        answers = []
        for rank, message in enumerate(messages):
            answer: dict[str, Json] = {"plan": plan_id, "sends_tree": twins[rank] == rank}
            if message["kind"] == "listing":
                answer["parts"] = msgspec.to_builtins(record.job.assignments[rank])
            answers.append(answer)
        return answers

    def _record_of(self, receipts: Sequence[Message]) -> JobRecord:
        """Find the plan that ranks followed.

        Raises:
            PlanError: They followed different ones, or one that is forgotten.
        """
        plans = {message["plan"] for message in receipts}
        record = self._context.jobs.get(next(iter(plans))) if len(plans) == 1 else None
        if record is None:
            raise PlanError("the ranks followed plans of different saves; save again")
        return record

    async def _commit(self, receipts: Sequence[Message]) -> Sequence[Json] | Same:
        """Write the manifest."""
        record = self._record_of(receipts)
        trees = [RankTree(*message["tree"]) for message in receipts]
        if missing := missing_trees(trees):
            return Same({"trees": missing})
        manifest = await run_blocking(self._context.executor, self._encode, record, receipts, trees)
        assert self.attempt is not None  # noqa: S101  # rank 0 has written, too
        await self._my_turn()
        await self.attempt.commit(manifest)
        sizes = [nbytes for message in receipts for _, nbytes, _ in message["files"]]
        done = {
            "nbytes": sum(sizes),
            "num_files": len(sizes),
            "num_tensors": len(record.job.tensors),
        }
        twins = find_twins([tree.digest for tree in trees])
        return [{**done, "sends_tree": twin == rank} for rank, twin in enumerate(twins)]

    def _encode(
        self, record: JobRecord, receipts: Sequence[Message], trees: Sequence[RankTree]
    ) -> bytes:
        """Put the manifest together. Blocks."""
        for rank, message in enumerate(receipts):
            if message["places"] is not None:
                record.places[rank] = [(bucket, start) for bucket, start in message["places"]]
                record.num_files[rank] = len(message["files"])
        if not record.table:
            places = [placed or [] for placed in record.places]
            record.table = merge_tables(record.job, places, record.num_files)
        files = [
            (name, nbytes, unpack_checksums(base64.b64decode(sums)), rank)
            for rank, message in enumerate(receipts)
            for name, nbytes, sums in message["files"]
        ]
        tree = merge_trees(trees, record.numbers)
        hosts = self._context.ranks.hosts
        return encode_manifest(
            writer=__version__,
            save_id=self._job.save_id,
            created=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            block_nbytes=self._context.config.block_nbytes,
            files=files,
            tensors=record.table,
            tree=msgspec.json.encode(tree),
            hosts=hosts if len(hosts) > 1 else (),
        )


def _check_common(messages: Sequence[Message]) -> None:
    """Check that all ranks save to one path with the same options.

    Raises:
        ConfigError: They do not.
    """
    first = messages[0]
    for rank, message in enumerate(messages):
        for name in _COMMON:
            if message[name] != first[name]:
                raise ConfigError(
                    f"rank {rank} saves with {name} {message[name]!r} and rank 0 with"
                    f" {first[name]!r}; call save on all ranks alike and in one order"
                )


def _leaves(listed: Sequence[Json]) -> tuple[LeafSpec, ...]:
    """Read what a rank holds."""
    return tuple(
        LeafSpec(
            name,
            dtype,
            tuple(shape),
            None if global_shape is None else tuple(global_shape),
            None if global_offset is None else tuple(global_offset),
            replica,
        )
        for name, dtype, shape, global_shape, global_offset, replica in listed
    )


def _in_order(
    places: Sequence[tuple[int, int]] | None, order: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Give places in the order that another plan has for the same parts."""
    return None if places is None else [places[i] for i in order]
