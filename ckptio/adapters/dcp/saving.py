"""One save, as one rank of it sees it.

    prepare_global_plan   the coordinator begins the attempt, and names the save to all
    write_data            each rank writes its files, under names of its own
    finish                the coordinator writes the manifest: the commit

DCP does not say when a save failed on another rank. The coordinator's attempt stays open
until `finish`, or until the next save, the end of the writer or of the process. On a file
system its lock says that the save lives, and whoever finds the lock free removes the files
of all ranks; in an object store an hour without a sign of it does (`storage.object_attempt`).
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.distributed.checkpoint.planner import WriteItemType

from ckptio._version import __version__
from ckptio.adapters.dcp.document import encode_document
from ckptio.adapters.dcp.packing import Packing
from ckptio.adapters.dcp.place import place_at
from ckptio.adapters.dcp.source import PlannerSource, take_value
from ckptio.adapters.dcp.table import make_table
from ckptio.engine.save import SaveJob, announce
from ckptio.engine.write import write_buckets
from ckptio.errors import PlanError, StorageError
from ckptio.events import SaveCommitted, SaveProgressed, SaveStaged, SaveStarted, notify
from ckptio.format.compose import encode_manifest, encode_rows
from ckptio.format.manifest import DOCUMENT_NAME
from ckptio.moments import SaveMoments
from ckptio.plan.save import plan_save
from ckptio.ranks.solo import SoloRanks
from ckptio.runtime.aside import run_aside
from ckptio.runtime.solo import solo_engine
from ckptio.shards import LeafSpec
from ckptio.staging.copy import SourceState
from ckptio.state.flatten import FlatState
from ckptio.state.leaves import as_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan as DcpPlan
    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult

    from ckptio.adapters.dcp.table import Table
    from ckptio.config import CheckpointConfig
    from ckptio.engine.context import EngineContext
    from ckptio.events import Event, Observer
    from ckptio.plan.save import SavePlan
    from ckptio.runtime.core import EngineCore
    from ckptio.storage.interface import Attempt, Storage

    Files = list[tuple[str, int, list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """What a writer was told.

    Attributes:
        config: Options of the engine.
        overwrite: Whether a checkpoint that is there may be replaced.
        at_once: Whether the planner may be asked for several tensors at once.
        observer: Takes events, if anybody does.
    """

    config: CheckpointConfig
    overwrite: bool
    at_once: bool
    observer: Observer | None


def new_save_id() -> str:
    """Name a save."""
    return secrets.token_hex(16)


class RankSave:
    """One rank's part of a save.

    Args:
        path: Where to.
        save_id: The id of the save, if this rank coordinates; unused on others, which are told.
        rank: This rank; `None` where DCP does not say, as older versions do not.
        options: What the writer was told.
    """

    def __init__(self, path: str, save_id: str, rank: int | None, options: SaveOptions) -> None:
        self.save_id = save_id
        self._rank = rank
        self._options = options
        self._place = place_at(path, options.config, options.observer)
        #: Whether this rank coordinates, and may still remove what the save left: from `begin`
        #: until the manifest is written, or may be.
        self._holds_attempt = False
        self._world_size = 1
        self._started_s = time.perf_counter()
        self._pid = os.getpid()

    def begin(self, num_plans: int) -> list[dict[str, Any]]:
        """Begin the attempt, as the coordinator.

        Returns:
            What each rank has to be told.

        Raises:
            CheckpointExistsError: There is a checkpoint and `overwrite` is off.
            StorageError: The place cannot be written.
        """
        self._world_size = num_plans
        self._place.begin(self.save_id, overwrite=self._options.overwrite)
        self._holds_attempt = True
        return [{"save_id": self.save_id, "rank": rank, "used": False} for rank in range(num_plans)]

    def write(self, plan: DcpPlan, planner: SavePlanner) -> list[WriteResult]:
        """Write what this rank has to write. Blocks.

        Raises:
            UnsupportedLeafError: A value has no portable form.
            CheckpointError: The first failure of any part; also what the planner raises.
        """
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        others = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        try:
            packing = Packing(
                tensors,
                [(item, take_value(planner, item)) for item in others],
                self._options.config,
            )
            source = PlannerSource(
                tensors,
                packing.specs,
                packing.sources,
                planner,
                packing.plan,
                at_once=self._options.at_once,
            )
            rank, save_id = self._names(plan.storage_data)
            files = self._write(packing.specs, source, packing.plan, rank, save_id)
        except BaseException:
            self.abandon()
            raise
        return packing.results(files)

    def _names(self, ticket: Any) -> tuple[int, str]:
        """Say under which rank and id this rank writes.

        A planner that caches plans hands over the ticket of an earlier save, and another may
        drop it. Then only the coordinator knows the id of this save; another rank takes an id of
        its own, so that no two files have one name.
        """
        if not isinstance(ticket, dict):
            ticket = {}
        rank = ticket.get("rank", self._rank)
        if rank is None:
            rank = 0 if self._holds_attempt else 1
        if self._holds_attempt:
            return rank, self.save_id
        if ticket.get("used", True):
            return rank, new_save_id()
        ticket["used"] = True
        return rank, ticket["save_id"]

    def _write(
        self,
        specs: Sequence[LeafSpec],
        source: PlannerSource,
        plan: SavePlan,
        rank: int,
        save_id: str,
    ) -> Files:
        """Write this rank's files, as the coordinator or beside it."""
        options = self._options
        with solo_engine(options.config, options.observer) as core:
            source.begin(core)
            storage = self._place.storage(core)
            attempt = core.call_blocking(lambda _: self._attempt(storage, save_id), "begin")
            try:
                files = self._write_in(attempt, storage, core, specs, source, plan, rank, save_id)
                if not self._holds_attempt:
                    core.call_blocking(lambda _: attempt.seal(), "seal")
            except BaseException:
                core.call_blocking(lambda _: attempt.abort(), "abort")
                raise
            if not self._holds_attempt:
                core.call_blocking(lambda _: attempt.leave(), "leave")
            return files

    async def _attempt(self, storage: Storage, save_id: str) -> Attempt:
        """Give this rank's part of the save, for the length of a call."""
        if self._holds_attempt:
            return await self._place.attempt(storage)
        return await storage.join(save_id)

    def _write_in(
        self,
        attempt: Attempt,
        storage: Storage,
        core: EngineCore,
        specs: Sequence[LeafSpec],
        source: SourceState,
        plan: SavePlan,
        rank: int,
        save_id: str,
    ) -> Files:
        path = self._place.path
        job = SaveJob(
            save_id=save_id,
            key="dcp",
            storage=storage,
            flat=FlatState(tuple(specs), (), (), None, ()),
            source=source,
            overwrite=self._options.overwrite,
            moments=SaveMoments(path, save_id),
            started_s=self._started_s,
        )
        ranks = SoloRanks()
        ranks.rank = rank  # in the names of files
        core.context.ranks = ranks

        async def write(context: EngineContext) -> Files:
            announce(job, context, plan, reused=False)
            return await write_buckets(job, context, plan, begun)

        async def begun() -> Attempt:
            return attempt

        return core.call_blocking(write, f"write {path}")

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Write the manifest. When this returns, the checkpoint exists.

        Raises:
            StorageError: Files of a rank are not there, or the manifest cannot be written.
            CommitConflictError: Somebody else committed meanwhile.
        """
        if not self._holds_attempt:
            raise PlanError("finish() without prepare_global_plan(): DCP calls it on one rank")
        try:
            table = make_table(metadata, results)
            with solo_engine(self._options.config, self._observe) as core:
                nbytes = self._commit(table, core)
        except BaseException:
            self.abandon()
            raise
        self._holds_attempt = False
        notify(
            self._options.observer,
            SaveCommitted(
                path=self._place.path,
                save_id=self.save_id,
                nbytes=nbytes,
                elapsed_s=time.perf_counter() - self._started_s,
            ),
        )

    def _observe(self, event: Event) -> None:
        """Pass on what happens while it is committed; the document's file is no save of its own."""
        if not isinstance(event, (SaveStarted, SaveStaged, SaveProgressed)):
            notify(self._options.observer, event)

    def _commit(self, table: Table, core: EngineCore) -> int:
        """Look whether everything is there, and write the manifest; give the bytes of all files."""
        storage = self._place.storage(core)
        attempt = core.call_blocking(lambda _: self._place.attempt(storage), "resume")
        try:
            core.call_blocking(lambda _: self._check_files(table, storage), "look for files")
            manifest, nbytes = self._encode(table, attempt, storage, core)
            core.call_blocking(lambda _: attempt.commit(manifest), "commit")
        except BaseException:
            core.call_blocking(lambda _: attempt.abort(), "abort")
            if attempt.is_published:
                self._holds_attempt = False  # or it may be: nothing may be removed any more
            raise
        return nbytes

    async def _check_files(self, table: Table, storage: Storage) -> None:
        """Look whether what every rank wrote is where the manifest will say.

        Raises:
            StorageError: It is not: the ranks do not share the place, or somebody removed it.
        """
        sizes = await storage.sizes([name for name, _, _, _ in table.files])
        for (name, nbytes, _, rank), size in zip(table.files, sizes, strict=True):
            if size != nbytes:
                raise StorageError(
                    f"file {name!r} of rank {rank} is not there with its {nbytes} bytes; save to a"
                    " place that all ranks share",
                    path=self._place.path,
                )

    def _encode(
        self, table: Table, attempt: Attempt, storage: Storage, core: EngineCore
    ) -> tuple[bytes, int]:
        """Write the document for DCP; give the manifest, and the bytes of all files."""
        data = encode_document(table.document)
        spec = LeafSpec(DOCUMENT_NAME, "uint8", (len(data),))
        plan = plan_save([spec], self._options.config)
        tensor = as_bytes(np.frombuffer(data, dtype=np.uint8))
        # of a rank that there is not, so that its name is nobody's
        (written,) = self._write_in(
            attempt,
            storage,
            core,
            [spec],
            SourceState([tensor], None),
            plan,
            self._world_size,
            self.save_id,
        )
        place = (len(table.files), plan.places[0][1])
        manifest = encode_manifest(
            writer=__version__,
            save_id=self.save_id,
            created=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            block_nbytes=self._options.config.block_nbytes,
            files=[*table.files, written],
            tensors=encode_rows([*table.rows, (spec.name, spec.dtype, spec.shape, [place])]),
            tree=table.tree,
            hosts=table.hosts,
        )
        return manifest, written[1] + sum(nbytes for _, nbytes, _, _ in table.files)

    def abandon(self) -> None:
        """As the coordinator, remove what the save left, of all ranks. Blocks.

        Raises nothing, unless it is interrupted. May be called again: other ranks may still have
        been writing at the first time. On another rank it does nothing: there `write` has removed
        that rank's files if it failed.
        """
        if self._is_left():
            with contextlib.suppress(Exception):  # what stays is removed by a later save
                self._place.abandon()

    def abandon_aside(self) -> None:
        """Do what `abandon` does on a thread of its own, and do not wait: the writer is garbage."""
        if self._is_left():
            run_aside(self.abandon, "ckptio-dcp")

    def _is_left(self) -> bool:
        return self._holds_attempt and self._pid == os.getpid()
