"""What rank 0 decides for all in a save: who writes what, and whether it is a checkpoint.

It keeps what it decided: a plan by its id, with the blocks of every rank, the places of
their parts and the tensor table, so that from the second save on only names, sizes,
checksums and trees cross the network: of ranks with equal trees, one sends it.

Trees are merged in each save. To keep the merged one by the digests of all was rejected: a
step or a learning rate among the values of a state changes them every time.
"""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import errno
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ckptio._aio import run_blocking
from ckptio._gc import without_collection
from ckptio._version import __version__
from ckptio.errors import OutOfStepError, StalePlanError, StorageError
from ckptio.format.checksum import unpack_checksums
from ckptio.format.compose import encode_manifest
from ckptio.plan.job import merge_tables, plan_job
from ckptio.plan.replan_changed import plan_again
from ckptio.plan.replan_followed import Followed, replan_job
from ckptio.plan.trees import RankTree, find_twins, merge_trees, missing_trees
from ckptio.ranks.interface import Same
from ckptio.shards import LeafSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptio.engine.context import EngineContext
    from ckptio.engine.save import SaveJob
    from ckptio.engine.turns import MyTurn
    from ckptio.plan.job import JobPlan
    from ckptio.ranks.interface import Json, Session
    from ckptio.storage.interface import Attempt

    Message = dict[str, Json]

#: Looks for files of other ranks, and waits between them, in seconds.
_PAUSES_S = (0.05, 0.2, 0.5, 1.0, 2.0, 0.0)
_COMMON = (
    "path",
    "overwrite",
    "durability",
    "block_nbytes",
    "replicate",
    "local_replica_nbytes",
)


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """A plan that ranks follow, and what is known of it.

    Attributes:
        leaves: The blocks of each rank.
        job: Who writes what.
        places: Where the parts of each rank lie in its files; `None` until it has said so.
        num_files: Files of each rank.
        plan_id: A digest of the blocks and of who writes what, so that overlapping saves of one
            state share a plan.
        table: The manifest's tensor table, once all places are known.
        numbers: Place of each tensor in that table, by name.
    """

    leaves: list[tuple[LeafSpec, ...]]
    job: JobPlan
    places: list[list[tuple[int, int]] | None]
    num_files: list[int]
    plan_id: str = ""
    table: bytes = b""
    numbers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Name the plan, and number the tensors."""
        said = msgspec.msgpack.encode((self.leaves, self.job.assignments))
        self.plan_id = hashlib.blake2b(said, digest_size=16).hexdigest()
        self.numbers = {tensor.name: i for i, tensor in enumerate(self.job.tensors)}

    def learn(self, other: JobRecord) -> None:
        """Take over where parts lie from a record of the same plan, of ranks not known yet."""
        for rank, (places, found) in enumerate(zip(self.places, other.places, strict=True)):
            if places is None and found is not None:
                self.places[rank] = found
                self.num_files[rank] = other.num_files[rank]


class Decider:
    """Decides for one save. Of use on rank 0 alone; other ranks pass it on unused.

    Args:
        job: The save.
        context: The engine.
        my_turn: Waits until this save may commit; see `turns.turn`.

    Attributes:
        attempt: What is committed; set before the receipts are in.
        session: The ranks; set before anything is decided.
    """

    def __init__(self, job: SaveJob, context: EngineContext, my_turn: MyTurn) -> None:
        self._job = job
        self._context = context
        self._my_turn = my_turn
        self.attempt: Attempt | None = None
        self.session: Session | None = None

    async def decide(self, messages: Sequence[Message]) -> Sequence[Json] | Same:
        """Answer a round.

        Raises:
            OutOfStepError: Ranks save to different paths, or with different options.
            PlanError: What the ranks hold is no whole state, or values differ.
            CheckpointError: It could not be committed.
        """
        _check_common(messages)
        receipts = [message for message in messages if message["kind"] == "receipt"]
        # listings name no plan: where all messages name one, and there is a receipt, all are
        if len({message.get("plan") for message in messages}) == 1 and receipts:
            return await self._commit(receipts)
        followed = {
            rank: self._record_of(message)
            for rank, message in enumerate(messages)
            if message["kind"] == "receipt"
        }
        context = self._context
        async with context.planning:
            record, answers = await run_blocking(context.executor, self._plan, messages, followed)
            known = context.jobs.get(record.plan_id)
            if known is None:
                context.jobs.put(record.plan_id, record)
            else:  # planned for a save that is still under way, as a rule
                known.learn(record)
            context.last_job = known or record
        plan_id = record.plan_id
        return [{**answer, "plan": plan_id, "replaces": bool(followed)} for answer in answers]

    def _plan(
        self, messages: Sequence[Message], followed: Mapping[int, JobRecord]
    ) -> tuple[JobRecord, list[dict[str, Json]]]:
        """Share out what the ranks hold, or what some hold now while others did not change.

        Blocks. Gives the plan, and what each rank is told of it.
        """
        config, last = self._context.config, self._context.last_job
        listed = {
            rank: _leaves(message["leaves"])
            for rank, message in enumerate(messages)
            if message["kind"] == "listing"
        }
        held = {rank: record.leaves[rank] for rank, record in followed.items()} | listed
        leaves = [held[rank] for rank in range(len(messages))]
        options: dict[str, Any] = {
            "hosts": self._context.ranks.hosts,
            "replicate": config.replicate,
            "local_nbytes": config.local_replica_nbytes,
        }
        if followed:
            job = replan_job(_followed(followed), listed, **options)
        elif last is not None:
            job = plan_again(last.job, last.leaves, leaves, **options)
        else:
            job = plan_job(leaves, **options)
        records = [followed.get(rank) for rank in range(len(messages))]
        places = [record.places[rank] if record else None for rank, record in enumerate(records)]
        num_files = [record.num_files[rank] if record else 0 for rank, record in enumerate(records)]
        record = JobRecord(leaves=leaves, job=job, places=places, num_files=num_files)
        twins = find_twins([message["tree"][0] for message in messages])
        answers: list[dict[str, Json]] = []
        for rank in range(len(messages)):
            answers.append({"sends_tree": twins[rank] == rank})
            if rank in listed:
                answers[rank]["parts"] = msgspec.to_builtins(job.assignments[rank])
        return record, answers

    def _record_of(self, receipt: Message) -> JobRecord:
        """Find the plan that a rank followed.

        Raises:
            StalePlanError: It is forgotten.
        """
        record = self._context.jobs.get(receipt["plan"])
        if record is None:
            raise StalePlanError("a rank followed a plan that is forgotten; save again")
        return record

    async def _commit(self, receipts: Sequence[Message]) -> Sequence[Json] | Same:
        """Write the manifest."""
        record = self._record_of(receipts[0])
        trees = [RankTree(*message["tree"]) for message in receipts]
        if missing := missing_trees(trees):
            return Same({"trees": missing})
        manifest = await run_blocking(self._context.executor, self._encode, record, receipts, trees)
        await self._check_files(receipts)
        attempt, session = self.attempt, self.session
        assert attempt is not None  # noqa: S101  # rank 0 has written, too
        await self._my_turn(attempt)
        assert session is not None  # noqa: S101  # and met the others
        await self._context.notes.leave(self._job, attempt, self._context)
        session.decisive(is_on=True)
        try:
            await attempt.commit(manifest)
        except BaseException:  # a cancellation that came before, too
            if not attempt.is_published:
                session.decisive(is_on=False)
            raise
        sizes = [nbytes for message in receipts for _, nbytes, _ in message["files"]]
        done = {
            "nbytes": sum(sizes),
            "num_files": len(sizes),
            "num_tensors": len(record.job.tensors),
        }
        twins = find_twins([tree.digest for tree in trees])
        return [{**done, "sends_tree": twin == rank} for rank, twin in enumerate(twins)]

    async def _check_files(self, receipts: Sequence[Message]) -> None:
        """Look for the files of all ranks from here: a path may be another place elsewhere.

        Raises:
            StorageError: A rank has written where rank 0 does not see it.
        """
        files = [
            (rank, name, nbytes)
            for rank, message in enumerate(receipts)
            for name, nbytes, _ in message["files"]
        ]
        storage = self._job.storage
        for pause_s in _PAUSES_S:  # a network file system may be a moment behind
            sizes = await storage.sizes([name for _, name, _ in files])
            unseen = [
                (rank, name, nbytes, size)
                for (rank, name, nbytes), size in zip(files, sizes, strict=True)
                if size != nbytes
            ]
            if not unseen:
                return
            await asyncio.sleep(pause_s)
        rank, name, nbytes, size = unseen[0]
        found = "does not see it" if size is None else f"sees {size} bytes"
        raise StorageError(
            f"rank {rank} has written {name!r} of {nbytes} bytes and rank 0 {found}; save to a"
            " path that is the same place on all hosts",
            path=storage.path,
            code=errno.ENOENT,
        )

    def _encode(
        self, record: JobRecord, receipts: Sequence[Message], trees: Sequence[RankTree]
    ) -> bytes:
        """Put the manifest together. Blocks.

        Raises:
            StalePlanError: A rank has not said where its parts lie, now or before.
        """
        for rank, message in enumerate(receipts):
            if message["places"] is not None:
                record.places[rank] = [(bucket, start) for bucket, start in message["places"]]
                record.num_files[rank] = len(message["files"])
        if not record.table:
            places = [placed for placed in record.places if placed is not None]
            if len(places) < len(receipts):
                raise StalePlanError("a rank has not said where its parts lie; save again")
            record.table = merge_tables(record.job, places, record.num_files)
        files = [
            (name, nbytes, unpack_checksums(base64.b64decode(sums)), rank)
            for rank, message in enumerate(receipts)
            for name, nbytes, sums in message["files"]
        ]
        tree = _merged(trees, record.numbers)
        hosts = self._context.ranks.hosts
        return encode_manifest(
            writer=__version__,
            save_id=self._job.save_id,
            created=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            block_nbytes=self._context.config.block_nbytes,
            files=files,
            tensors=record.table,
            tree=tree,
            hosts=hosts if len(hosts) > 1 else (),
            metadata=self._job.metadata,
        )


def _followed(records: Mapping[int, JobRecord]) -> list[Followed]:
    """Give the plans that ranks followed, each once.

    Ranks follow several where saves overlap and the state of each changes: whoever came late to
    one save was early enough to go by it in the next. Each has written by then, so the plan
    has to leave to each what it wrote.
    """
    ranks: dict[int, list[int]] = {}
    for rank, record in records.items():
        ranks.setdefault(id(record), []).append(rank)
    return [
        Followed(records[some[0]].job, records[some[0]].leaves, some) for some in ranks.values()
    ]


def _check_common(messages: Sequence[Message]) -> None:
    """Check that all ranks save to one path with the same options.

    Raises:
        OutOfStepError: They do not.
    """
    first = messages[0]
    for rank, message in enumerate(messages):
        for name in _COMMON:
            if message[name] != first[name]:
                raise OutOfStepError(
                    f"rank {rank} saves with {name} {message[name]!r} and rank 0 with"
                    f" {first[name]!r}; call save on all ranks alike and in one order"
                )


@without_collection  # half the time of a million leaves was collections
def _merged(trees: Sequence[RankTree], numbers: Mapping[str, int]) -> bytes:
    """Put the trees of all ranks together. Blocks."""
    return msgspec.json.encode(merge_trees(trees, numbers))


@without_collection
def _leaves(listed: Sequence[Json]) -> tuple[LeafSpec, ...]:
    """Read what a rank holds. Blocks: half a microsecond a block, if no collection starts."""
    return msgspec.convert(listed, tuple[LeafSpec, ...])
