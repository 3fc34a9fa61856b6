"""Carry out a save of many ranks: agree on who writes what, write, and commit as one.

    first save          a round: blocks of all ranks -> what each writes
    unchanged state     no round: each rank writes what it wrote the last time
    always              a round: receipts of all ranks -> the manifest, written by rank 0

A rank knows by itself whether its own blocks are those of the last save, and says in its
receipt which plan it followed. Where some ranks changed and others did not, those that did
wait for the receipts of the others, and share out what is new (`plan.replan_followed`); so no rank
ever waits for a round to learn that nothing has changed.

All ranks commit or none does. A failure anywhere before the manifest is written ends the
save on every rank, and each removes its own files when all have stopped. A rank that has
given its receipt and does not hear what became of it looks for the manifest, and leaves
its files alone where it finds none: rank 0 may be about to write it.

A manifest that is found so makes a save that was committed, on two conditions. Rank 0 may have
died before the name was on the disk, so whoever finds it makes that durable, and answers then.
And rank 0 has not lived to say that its commit failed: then the save is in doubt on all ranks,
as with one. To sync once more and believe that was rejected: a system that has told one program
that a write was lost tells the next that all is well. Nobody hears of less than is there.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from ckptio._aio import GRACE_S, outlive, run_blocking, shielded, take_back_cancel
from ckptio.engine.attempt_end import end_attempt
from ckptio.engine.decide import Decider
from ckptio.engine.doubt import OF_THE_PATH, doubt_of
from ckptio.engine.rounds import meet
from ckptio.engine.save import SaveReceipt, announce
from ckptio.engine.turns import place_for
from ckptio.engine.write import write_buckets
from ckptio.errors import CheckpointError, RankError, StorageError
from ckptio.format.checksum import pack_checksums
from ckptio.format.manifest import decode_manifest
from ckptio.plan.assign import Assignment
from ckptio.plan.save import plan_save
from ckptio.plan.trees import take_tree

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from ckptio.engine.context import EngineContext
    from ckptio.engine.save import SaveJob
    from ckptio.engine.turns import MyTurn
    from ckptio.plan.save import SavePlan
    from ckptio.plan.trees import RankTree
    from ckptio.ranks.interface import Json, Session
    from ckptio.storage.interface import Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What a rank keeps of what was agreed on, for as long as its blocks stay the same.

    Attributes:
        plan_id: Names the plan that all ranks follow.
        plan: Where this rank writes what.
        sends_tree: Whether this rank has to send its tree; another has the same if not.
        is_new: Whether the coordinator does not know yet where the parts lie.
        called_s: When the save was asked for that it is of, by `time.perf_counter`.
    """

    plan_id: str
    plan: SavePlan
    sends_tree: bool
    is_new: bool
    called_s: float


def save_id_of(nonce: str, key: str) -> str:
    """Make a save id that is the same on all ranks, and of no other save."""
    return hashlib.blake2b(f"{nonce}/{key}".encode(), digest_size=16).hexdigest()


async def save_together(job: SaveJob, context: EngineContext, my_turn: MyTurn) -> SaveReceipt:
    """Save this rank's part of a state. When this returns, the checkpoint exists.

    Raises:
        CheckpointExistsError: There is a checkpoint and `overwrite` is off; on every rank.
        CommitConflictError: Another job committed first; on every rank.
        RankError: It failed on some rank; nothing was committed, unless `in_doubt` says so.
        PeerLostError: A rank was lost.
        StorageError: It was cancelled, and may have been committed: `in_doubt` is set.
    """
    save = _JointSave(job, context, my_turn)
    try:
        title = f"save to {job.storage.path!r}"
        async with context.ranks.session(job.key, title, commits=True) as session:
            receipt = await save.run(session)
    except BaseException as error:
        # what was agreed on is agreed on anew, on all ranks
        context.agreements.clear()
        committed = await _settled(save, error)
        if committed is not None:
            return committed
        if isinstance(error, RankError) and not error.in_doubt and context.ranks.world_size > 1:
            for kind in OF_THE_PATH:
                if error.was_caused_by(kind, rank=0):
                    raise kind(job.storage.path) from error
        raise
    try:
        await shielded(save.end())
    except asyncio.CancelledError:
        take_back_cancel()
    return receipt


async def _settled(save: _JointSave, error: BaseException) -> SaveReceipt | None:
    """Clean up, to the end: an abort that comes meanwhile comes too late for what is committed.

    Behind it, or one that has ended the save, a silent store is not waited for until its last try.

    Raises:
        RankError, StorageError: Nobody can tell whether it is; as `_JointSave.clean_up`.
        asyncio.CancelledError: It is not, and was aborted meanwhile.
    """
    was_aborted = isinstance(error, asyncio.CancelledError)
    if was_aborted:
        save.hurry()
    cleaning = asyncio.ensure_future(save.clean_up(error))
    try:
        try:
            committed = await outlive(cleaning, on_cancel=save.hurry)
        except asyncio.CancelledError:
            committed = cleaning.result()  # or its doubt, which says more than the abort does
            if committed is None:
                raise
            take_back_cancel()
        if committed is not None and was_aborted:
            take_back_cancel()
        return committed
    finally:
        del cleaning, error  # it has an error that refers to this frame: no reference cycle


class _JointSave:
    """One rank's part of a save.

    What becomes of its files, if it fails, depends on how far it has come:

        no receipt given    they go: no manifest names them
        receipt given       they stay if the manifest names them, or may yet; they go if it is not
                            there, and the ranks were told that the save has failed
    """

    def __init__(self, job: SaveJob, context: EngineContext, my_turn: MyTurn) -> None:
        self._job = job
        self._context = context
        self._decider = Decider(job, context, my_turn)
        self._leads = context.ranks.rank == 0
        self._attempt: Attempt | None = None
        self._vouched = False  # whether the receipt is given, or about to be
        self._failure: StorageError | None = None  # this rank's own; of the commit, on rank 0
        self._look: asyncio.Timeout | None = None
        self._is_hurried = False

    async def run(self, session: Session) -> SaveReceipt:
        """Agree, write, commit."""
        self._decider.session = session
        async with place_for(self._job, self._context):
            try:
                return await self._run(session)
            except StorageError as error:
                self._failure = error
                raise

    async def _meet(self, session: Session, phase: str, message: Json) -> Json:
        """Go into a round."""
        return await meet(
            session,
            phase,
            message,
            self._decider.decide,
            path=self._job.storage.path,
            context=self._context,
        )

    async def _run(self, session: Session) -> SaveReceipt:
        specs = self._job.flat.specs
        tree = await run_blocking(
            self._context.executor, take_tree, self._job.flat.tree, self._job.flat.names
        )
        agreement = self._context.agreements.get(specs)
        reused = agreement is not None
        if agreement is None:
            answer = await self._meet(session, "plan", self._listing(tree))
            self._forget_replaced(answer)
            agreement = await self._adopt(answer)
        files = await self._write(agreement, reused=reused)
        self._vouched = True
        phase = "plan" if reused else "commit"  # the first round of a save has one name
        answer = await self._meet(session, phase, self._receipt(files, tree, agreement))
        if "plan" in answer:  # others have changed: the same files, under another plan
            self._forget_replaced(answer)
            agreement = replace(agreement, plan_id=answer["plan"], sends_tree=answer["sends_tree"])
            answer = await self._meet(session, "commit", self._receipt(files, tree, agreement))
        if "trees" in answer:
            message = self._receipt(files, tree, agreement)
            if self._context.ranks.rank in answer["trees"]:
                message["tree"] = list(tree)
            answer = await self._meet(session, "trees", message)
        self._keep(replace(agreement, is_new=False, sends_tree=answer["sends_tree"]))
        return SaveReceipt(
            nbytes=answer["nbytes"],
            num_files=answer["num_files"],
            num_tensors=answer["num_tensors"],
            plan_reused=reused,
        )

    def _keep(self, agreement: Agreement) -> None:
        """Keep what was agreed on, unless a save that was asked for later has ended before."""
        agreements, called_s = self._context.agreements, self._job.started_s
        if all(held.called_s <= called_s for held in agreements.values()):
            agreements.put(self._job.flat.specs, replace(agreement, called_s=called_s))

    def _forget_replaced(self, answer: dict[str, Json]) -> None:
        """Forget what was agreed on before, if other ranks go by another plan from now on."""
        if answer["replaces"]:
            self._context.agreements.clear()

    async def end(self) -> None:
        """Let go of files that are part of a checkpoint now."""
        if self._attempt is not None and not self._leads:
            await self._attempt.leave()
        await self._forget()

    async def _forget(self) -> None:
        """Forget what was loaded there: it may have been replaced."""
        await self._job.storage.locate(gives_up=False)  # rank 0 has
        self._context.cache.forget(self._job.storage)

    async def clean_up(self, error: BaseException) -> SaveReceipt | None:
        """Remove this rank's files, or find out that they are part of a checkpoint.

        Returns:
            What was saved, if it was; `None` if it was not, or if nobody can tell.

        Raises:
            RankError: Its manifest is there, or may be, and nobody can tell whether for good:
                `in_doubt` is set. `error`, or what the others were told if that is a cancellation.
            StorageError: The same, where the others were not waited for.
        """
        attempt = self._attempt
        if attempt is None:
            return None
        if self._leads:
            await end_attempt(attempt, self._job, error)  # removes nothing of a commit
        elif not self._vouched:
            await attempt.abort()
        if not self._vouched:
            return None
        found: SaveReceipt | None = None
        problem: StorageError | None = None
        if isinstance(error, (RankError, asyncio.CancelledError)):
            found = await self._look_back()
        await self._forget()  # also where nobody can tell
        if not self._leads:
            if found is not None:
                problem = await _problem_of(attempt.seal())  # rank 0 may not have got to it
            told = error.__cause__ if isinstance(error, asyncio.CancelledError) else error
            failed = isinstance(told, RankError) and not told.in_doubt
            # what a manifest names stays, whatever anybody says
            await (attempt.abort() if found is None and failed else attempt.leave())
        path = self._job.storage.path
        doubt = doubt_of(
            error, self._failure, problem, leads=self._leads, is_found=found is not None, path=path
        )
        if doubt is not None:
            raise doubt from problem or doubt.__cause__
        return found

    async def _look_back(self) -> SaveReceipt | None:
        """Look whether the save was committed by a rank that did not live to say so."""
        try:
            async with asyncio.timeout(GRACE_S if self._is_hurried else None) as self._look:
                return await self._find_own()
        except (CheckpointError, TimeoutError):  # nothing that can be read: in doubt
            return None
        finally:
            self._look = None

    async def _find_own(self) -> SaveReceipt | None:
        """Read the manifest that is there, and say what was saved if it is this save's."""
        _, data = await self._job.storage.read_manifest()
        if not isinstance(data, bytes):  # of what another program wrote
            return None
        manifest = await run_blocking(self._context.executor, decode_manifest, data)
        if manifest.save_id != self._job.save_id:
            return None
        return SaveReceipt(
            nbytes=manifest.nbytes,
            num_files=len(manifest.files),
            num_tensors=len(manifest.tensors),
            plan_reused=False,
        )

    def hurry(self) -> None:
        """Look for the manifest for `GRACE_S` at the most: somebody has given up.

        Not where the answer is waited for in any case: it says what is there.
        """
        if self._is_hurried or self._job.storage.is_outlived:
            return
        self._is_hurried = True
        if self._look is not None:
            self._look.reschedule(asyncio.get_running_loop().time() + GRACE_S)

    def _common(self, kind: str) -> dict[str, Json]:
        """Say what has to be the same on all ranks."""
        config = self._context.config
        return {
            "kind": kind,
            "path": self._job.storage.path,
            "overwrite": self._job.overwrite,
            "durability": config.durability,
            "block_nbytes": config.block_nbytes,
            "replicate": config.replicate,
            "local_replica_nbytes": config.local_replica_nbytes,
        }

    def _listing(self, tree: RankTree) -> dict[str, Json]:
        """Say what this rank holds."""
        leaves = [*self._job.flat.specs]
        return {**self._common("listing"), "leaves": leaves, "tree": [tree.digest]}

    async def _adopt(self, answer: dict[str, Json]) -> Agreement:
        """Lay out what this rank is to write."""
        specs = self._job.flat.specs
        parts = msgspec.convert(answer["parts"], Assignment).parts(specs)
        plan = await run_blocking(
            self._context.executor, plan_save, specs, self._context.config, parts
        )
        return Agreement(
            plan_id=answer["plan"],
            plan=plan,
            sends_tree=answer["sends_tree"],
            is_new=True,
            called_s=self._job.started_s,
        )

    async def _write(
        self, agreement: Agreement, *, reused: bool
    ) -> list[tuple[str, int, list[int]]]:
        """Write this rank's files, and make sure that they are there."""
        job, context = self._job, self._context
        announce(job, context, agreement.plan, reused=reused)
        files = await write_buckets(job, context, agreement.plan, self._begin)
        if not self._leads and self._attempt is not None:
            await self._attempt.seal()
        return files

    async def _begin(self) -> Attempt:
        job = self._job
        if self._leads:
            self._attempt = await job.storage.begin(
                job.save_id, overwrite=job.overwrite, resumes=job.resumes
            )
            self._decider.attempt = self._attempt
        else:
            self._attempt = await job.storage.join(job.save_id)
        return self._attempt

    def _receipt(
        self,
        files: Sequence[tuple[str, int, Sequence[int]]],
        tree: RankTree,
        agreement: Agreement,
    ) -> dict[str, Json]:
        """Say what this rank has written."""
        return {
            **self._common("receipt"),
            "plan": agreement.plan_id,
            "places": [*agreement.plan.places] if agreement.is_new else None,
            "files": [
                (name, nbytes, base64.b64encode(pack_checksums(sums)).decode())
                for name, nbytes, sums in files
            ],
            "tree": list(tree if agreement.sends_tree else tree.without_tree()),
        }


async def _problem_of(sealing: Awaitable[None]) -> StorageError | None:
    """Seal, and give what was wrong with that instead of raising it."""
    try:
        await sealing
    except StorageError as error:
        return error
    return None
