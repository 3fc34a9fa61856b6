"""Saves and loads of many ranks that end while something else happens, or that one refuses."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio._aio import shielded, take_back_cancel
from ckptio.engine.together import _JointSave
from ckptio.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitConflictError,
    ConfigError,
    PeerLostError,
    RankError,
    SaveAbortedError,
    StorageError,
    UnsupportedLeafError,
)
from ckptio.format.manifest import MANIFEST_NAME, decode_manifest
from ckptio.runtime import saving, streams
from ckptio.testing import MemoryStorage, run_virtual
from ckptio.testing.memory_attempt import MemoryAttempt
from tests.engine.test_turns import LocatedStorage
from tests.job_rig import Job, job
from tests.rig import (
    SAVE_IDS,
    InlineCore,
    asked_for,
    config_with,
    contents_of,
    inline_engine,
    read_files,
    write_files,
)
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Sequence
    from pathlib import Path

    from ckptio import Engine
    from ckptio.handle import SaveHandle
    from ckptio.moments import CheckpointInfo
    from ckptio.storage.interface import Storage

SOON_S = 5.0  # well before anybody gives up on a rank that does not come


def own_state(rank: int, value: float = 1.0) -> dict[str, Any]:
    """Make a state with a tensor of its own for each rank, and one that all have."""
    return {f"own{rank}": torch.full((5000,), value + rank), "all": torch.full((300,), value)}


def begin_saves(job: Job, value: float = 1.0, *, overwrite: bool = True) -> list[SaveHandle]:
    return [
        engine.save(own_state(rank, value), "memory", overwrite=overwrite)
        for rank, engine in enumerate(job.engines)
    ]


async def outcomes_of(handles: Sequence[SaveHandle]) -> list[CheckpointInfo | BaseException]:
    async def outcome(handle: SaveHandle) -> CheckpointInfo | BaseException:
        try:
            return await handle
        except Exception as error:  # the test looks at it
            return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(outcome(handle), name="wait") for handle in handles]
    return [task.result() for task in tasks]


def core_of(engine: Engine) -> InlineCore:
    assert isinstance(engine._core, InlineCore)
    return engine._core


def give_place(job: Job, rank: int, storage: Storage) -> None:
    """Let a rank find another place under the name that all save to."""
    core_of(job.engines[rank]).use_storages({"memory": storage})


def same_place(job: Job, kind: type[MemoryStorage]) -> Any:
    """Give the place of a job with other manners."""
    storage = kind("memory")
    storage._place = job.place._place
    return storage


async def check_saved(job: Job, value: float = 1.0) -> None:
    """Check that all files are there, and no others, and what they hold; on every rank."""
    assert job.place.manifest is not None
    manifest = decode_manifest(job.place.manifest)
    assert sorted(job.place.files) == sorted(entry.name for entry in manifest.files)

    async def load(_: int, engine: Engine) -> None:
        loaded = await engine.load("memory")
        for rank in range(len(job.engines)):
            for name, tensor in own_state(rank, value).items():
                assert torch.equal(loaded[name], tensor), name

    await job.all(load)


async def check_all_hear_of_it(job: Job, handles: Sequence[SaveHandle], own: int) -> None:
    """Check that all ranks hear of a commit, also one whose place is its own; it gets that back."""
    for outcome in await outcomes_of(handles):
        assert not isinstance(outcome, BaseException), outcome
    give_place(job, own, job.storages[own])
    await check_saved(job)


async def check_goes_on(job: Job) -> None:
    """Check that all ranks count their calls alike still: they save, and load it."""
    begun_s = asyncio.get_running_loop().time()
    for handle in begin_saves(job, 7.0):
        await handle
    await check_saved(job, 7.0)
    assert asyncio.get_running_loop().time() - begun_s < SOON_S


def run(scenario: Coroutine[Any, Any, None], *, seed: int) -> None:
    """Run a scenario; one in which somebody waits for ever fails."""

    async def bounded() -> None:
        async with asyncio.timeout(600):
            await scenario

    run_virtual(bounded(), seed=seed)


def now_s() -> float:
    return asyncio.get_running_loop().time()


# around the commit


@pytest.mark.parametrize("aborting", [1, 2])
@pytest.mark.parametrize("joins_pieces", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_files_stay_where_the_answer_and_a_stop_come_together(
    seed: int, aborting: int, *, joins_pieces: bool
) -> None:
    """A rank that reads of the commit and of another's abort at once keeps what is committed."""

    async def scenario() -> None:
        async with job(3, seed=seed, joins_pieces=joins_pieces) as ranks:
            for handle in begin_saves(ranks):
                await handle
            handles = begin_saves(ranks, 2.0)
            for rank in (1, 2):  # they have all they need to write and to give their receipts
                ranks.ranks.deafen(rank)
            await handles[0]
            handles[aborting].abort()
            await asyncio.sleep(1)
            for rank in (1, 2):
                ranks.ranks.thaw(rank)
            infos = [await handle for handle in handles]
            assert len({info.save_id for info in infos}) == 1
            assert {info.nbytes for info in infos} == {sum(map(len, ranks.place.files.values()))}
            await check_saved(ranks, 2.0)
            await check_goes_on(ranks)

    run(scenario(), seed=seed)


@pytest.mark.parametrize("aborting", [0, 1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_an_abort_while_the_manifest_is_made_durable_comes_too_late(
    seed: int, aborting: int
) -> None:
    """The commit takes no notice of it, rank 0 does not hang, and all say that it is saved."""

    async def scenario() -> None:
        place = MemoryStorage("memory", seed=seed, max_delay_s=0.5)
        async with job(3, place, seed=seed) as ranks:
            handles = begin_saves(ranks)
            while place.manifest is None:
                await asyncio.sleep(0.001)
            handles[aborting].abort()
            begun_s = now_s()
            infos = [await handle for handle in handles]
            assert now_s() - begun_s < SOON_S
            assert len({info.save_id for info in infos}) == 1
            await check_saved(ranks)
            await check_goes_on(ranks)

    run(scenario(), seed=seed)


class _SlowAttempt(MemoryAttempt):
    async def leave(self) -> None:
        storage = self._storage
        assert isinstance(storage, SlowToLeave)
        storage.leaving.set()
        await asyncio.sleep(0.1)
        await super().leave()


class SlowToLeave(MemoryStorage):
    """Takes a while to let go of files, as a thread does."""

    attempt_type = _SlowAttempt
    leaving: asyncio.Event


def test_an_abort_after_the_commit_comes_too_late() -> None:
    """What a rank lets go of is saved: it does not say that nothing has changed."""

    async def scenario() -> None:
        async with job(2) as ranks:
            slow = same_place(ranks, SlowToLeave)
            slow.leaving = asyncio.Event()
            give_place(ranks, 1, slow)
            handles = begin_saves(ranks)
            await slow.leaving.wait()
            handles[1].abort()
            infos = [await handle for handle in handles]
            assert len({info.save_id for info in infos}) == 1
            assert slow.counts.num_open_attempts == 0
            await check_saved(ranks)

    run(scenario(), seed=0)


class _LostAttempt(MemoryAttempt):
    async def commit(self, manifest: bytes) -> None:
        await super().commit(manifest)
        raise StorageError("cannot commit: Input/output error", path="memory", code=5)


class LosesItsVoice(MemoryStorage):
    """Publishes manifests, and fails then: a disk that breaks in the sync of the directory."""

    attempt_type = _LostAttempt


def test_a_commit_that_fails_when_the_manifest_is_out_leaves_all_in_doubt() -> None:
    """As with one rank: it may not be there for good. What it names stays on every rank."""

    async def scenario() -> None:
        async with job(3) as ranks:
            give_place(ranks, 0, same_place(ranks, LosesItsVoice))
            for error in await outcomes_of(begin_saves(ranks)):
                assert isinstance(error, RankError)
                assert error.in_doubt
            give_place(ranks, 0, ranks.storages[0])
            await check_saved(ranks)
            await check_goes_on(ranks)

    run(scenario(), seed=0)


class _SlowToBegin(MemoryStorage):
    async def begin(self, save_id: str, *, overwrite: bool, resumes: bool = False) -> MemoryAttempt:
        await asyncio.sleep(30)
        return await super().begin(save_id, overwrite=overwrite, resumes=resumes)


def test_no_rank_waits_for_a_place_to_write_to_before_it_trains_on() -> None:
    """Rank 0 makes it, and clears it."""

    async def scenario() -> None:
        async with job(3) as ranks:
            for handle in begin_saves(ranks):
                await handle
            give_place(ranks, 0, same_place(ranks, _SlowToBegin))
            handles = begin_saves(ranks)
            for handle in handles:
                await handle.staged
            assert asyncio.get_running_loop().time() < 10
            for handle in handles:
                await handle
            give_place(ranks, 0, ranks.storages[0])
            await check_saved(ranks)

    run(scenario(), seed=0)


class _SlowFailure(_LostAttempt):
    async def commit(self, manifest: bytes) -> None:
        try:
            await super().commit(manifest)
        except StorageError as error:
            with contextlib.suppress(asyncio.CancelledError):
                await shielded(asyncio.sleep(3.0))
            error.in_doubt = True
            raise


class FailsSlowly(LosesItsVoice):
    """Publishes a manifest, and takes a while to find out that it may not be there for good."""

    attempt_type = _SlowFailure


@pytest.mark.parametrize("aborting", [0, 1])
def test_who_aborts_a_save_in_doubt_is_told_of_the_doubt(aborting: int) -> None:
    """Not that nothing has changed; nor that it was committed, where that may not last."""

    async def scenario() -> None:
        async with job(3) as ranks:
            give_place(ranks, 0, same_place(ranks, FailsSlowly))
            handles = begin_saves(ranks)
            while ranks.place.manifest is None:
                await asyncio.sleep(0.001)
            handles[aborting].abort()
            for rank, error in enumerate(await outcomes_of(handles)):
                assert isinstance(error, (RankError, StorageError)), rank
                assert error.in_doubt
            give_place(ranks, 0, ranks.storages[0])
            await check_saved(ranks)

    run(scenario(), seed=0)


def tasks_of_rank_1(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Task[Any]]:
    """Give a list that takes the tasks in which rank 1 saves."""
    tasks: list[asyncio.Task[Any]] = []
    run_save = _JointSave.run

    async def seen(self: _JointSave, session: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        if self._context.ranks.rank == 1:
            tasks.append(task)
        return await run_save(self, session)

    monkeypatch.setattr(_JointSave, "run", seen)
    return tasks


@pytest.mark.parametrize("is_out", [True, False])
def test_who_does_not_wait_for_the_verdict_acknowledges_nothing(
    monkeypatch: pytest.MonkeyPatch, *, is_out: bool
) -> None:
    """Rank 0 lives and is not through: that its manifest is there, or not, says nothing yet."""
    tasks = tasks_of_rank_1(monkeypatch)

    async def scenario() -> None:
        async with job(3) as ranks:
            slow = same_place(ranks, FailsSlowly if is_out else SlowToPublish)
            give_place(ranks, 0, slow)
            handles = begin_saves(ranks)
            begun = "commit" if is_out else "publish"
            await asked_for(slow, begun)
            for _ in range(2):
                for task in tasks:
                    task.cancel()
                await asyncio.sleep(0.5)
            error = (await outcomes_of(handles))[1]
            assert isinstance(error, StorageError)
            assert error.in_doubt

    run(scenario(), seed=0)


class CannotRead(MemoryStorage):
    """Cannot tell a rank what is there."""

    async def read_manifest(self) -> tuple[int, bytes]:
        raise StorageError("the connection broke", path="memory", code=110)


class SaysNoMore(LosesItsVoice, CannotRead):
    """Publishes manifests, and cannot tell of it."""


def test_a_commit_in_doubt_is_not_hidden_by_what_was_loaded_before() -> None:
    """Also where rank 0, whose manifest all load by, cannot look what became of the save."""

    async def scenario() -> None:
        config = config_with(cache_ttl_s=1e6)
        async with job(3, config=config) as ranks:
            for handle in begin_saves(ranks):
                await handle
            await check_saved(ranks)
            give_place(ranks, 0, same_place(ranks, SaysNoMore))
            for error in await outcomes_of(begin_saves(ranks, 2.0)):
                assert isinstance(error, RankError)
                assert error.in_doubt
            give_place(ranks, 0, ranks.storages[0])
            await check_saved(ranks, 2.0)

    run(scenario(), seed=0)


def test_who_aborts_and_cannot_see_the_manifest_is_not_told_that_there_is_none() -> None:
    """The others are told that it was committed: what was there is not untouched."""

    async def scenario() -> None:
        async with job(3, MemoryStorage("memory", max_delay_s=0.5)) as ranks:
            give_place(ranks, 1, same_place(ranks, CannotRead))
            handles = begin_saves(ranks)
            while ranks.place.manifest is None:
                await asyncio.sleep(0.001)
            handles[1].abort()
            outcomes = await outcomes_of(handles)
            error = outcomes.pop(1)
            assert isinstance(error, RankError)
            assert error.in_doubt
            assert not any(isinstance(outcome, BaseException) for outcome in outcomes)
            give_place(ranks, 1, ranks.storages[1])
            await check_saved(ranks)

    run(scenario(), seed=0)


class LooksSlowly(MemoryStorage):
    """Takes a while to tell a rank what is there."""

    async def read_manifest(self) -> tuple[int, bytes]:
        self.step("look")
        await asyncio.sleep(1.0)
        return await super().read_manifest()


@pytest.mark.parametrize("late", [0, 2])
def test_who_aborts_while_it_looks_what_became_of_a_save_is_told_of_that(late: int) -> None:
    """Another rank had aborted it first, when rank 0 had committed it."""

    async def scenario() -> None:
        async with job(3, MemoryStorage("memory", max_delay_s=0.5)) as ranks:
            slow = same_place(ranks, LooksSlowly)
            give_place(ranks, late, slow)
            slow._max_delay_s = 0.5
            handles = begin_saves(ranks)
            while ranks.place.manifest is None:
                await asyncio.sleep(0.001)
            handles[1].abort()
            await asked_for(slow, "look")
            handles[late].abort()
            for outcome in await outcomes_of(handles):
                assert not isinstance(outcome, BaseException), outcome
            give_place(ranks, late, ranks.storages[late])
            await check_saved(ranks)
            assert slow.counts.num_open_attempts == 0

    run(scenario(), seed=0)


class SaysNothing(MemoryStorage):
    """Does not tell a rank what is there, until a request for it is tried no more."""

    async def read_manifest(self) -> tuple[int, bytes]:
        self.step("look")
        await asyncio.sleep(500.0)
        raise StorageError("no answer", path="memory", code=errno.ETIMEDOUT)


@pytest.mark.parametrize("late", [0, 2])
def test_who_aborts_while_it_looks_does_not_wait_for_a_silent_store(late: int) -> None:
    """It gets ten seconds more; what became of the save is in doubt then."""

    async def scenario() -> None:
        async with job(3, MemoryStorage("memory", max_delay_s=0.5)) as ranks:
            silent = same_place(ranks, SaysNothing)
            give_place(ranks, late, silent)
            silent._max_delay_s = 0.5
            handles = begin_saves(ranks)
            while ranks.place.manifest is None:
                await asyncio.sleep(0.001)
            handles[1].abort()
            await asked_for(silent, "look")
            begun_s = now_s()
            handles[late].abort()
            error = (await outcomes_of(handles))[late]
            assert isinstance(error, RankError)
            assert error.in_doubt
            assert now_s() - begun_s < 15
            give_place(ranks, late, ranks.storages[late])
            await check_saved(ranks)
            assert silent.counts.num_open_attempts == 0

    run(scenario(), seed=0)


def test_who_has_aborted_does_not_wait_for_a_silent_store_either() -> None:
    """It is told so once, and by nobody again; the others hear that it is committed."""

    async def scenario() -> None:
        async with job(3, MemoryStorage("memory", max_delay_s=0.5)) as ranks:
            silent = same_place(ranks, SaysNothing)
            give_place(ranks, 1, silent)
            handles = begin_saves(ranks)
            while ranks.place.manifest is None:
                await asyncio.sleep(0.001)
            begun_s = now_s()
            handles[1].abort()
            outcomes = await outcomes_of(handles)
            error = outcomes.pop(1)
            assert isinstance(error, RankError)
            assert error.in_doubt
            assert now_s() - begun_s < 15
            assert not any(isinstance(outcome, BaseException) for outcome in outcomes)
            give_place(ranks, 1, ranks.storages[1])
            await check_saved(ranks)
            assert silent.counts.num_open_attempts == 0

    run(scenario(), seed=0)


class AnswersLate(MemoryStorage):
    """Looks as a file system does whose server is slow: its thread is waited for, and answers."""

    is_outlived = True

    async def read_manifest(self) -> tuple[int, bytes]:
        self.step("look")
        await asyncio.sleep(60.0)
        return await super().read_manifest()


@pytest.mark.parametrize("is_first", [True, False])
def test_who_aborts_hears_what_is_waited_for_in_any_case(*, is_first: bool) -> None:
    """Given up after a while, the answer would come at the same time, and be lost."""

    async def scenario() -> None:
        async with job(3, MemoryStorage("memory", max_delay_s=0.5)) as ranks:
            late = same_place(ranks, AnswersLate)
            give_place(ranks, 1, late)
            handles = begin_saves(ranks)
            while ranks.place.manifest is None:
                await asyncio.sleep(0.001)
            handles[1 if is_first else 2].abort()
            await asked_for(late, "look")
            handles[1].abort()
            await check_all_hear_of_it(ranks, handles, 1)

    run(scenario(), seed=0)


class _SlowEnder(MemoryAttempt):
    async def commit(self, manifest: bytes) -> None:
        await super().commit(manifest)
        self._storage.step("committed")
        await asyncio.sleep(500.0)

    async def abort(self) -> None:
        await asyncio.sleep(20.0)
        await super().abort()


class SlowToEnd(MemoryStorage):
    """Has nothing more to remove, and takes a while to find that out."""

    attempt_type = _SlowEnder


def test_who_has_aborted_looks_after_it_has_removed_what_it_made() -> None:
    """However long that took: the time for the look is its own."""

    async def scenario() -> None:
        async with job(3) as ranks:
            slow = same_place(ranks, SlowToEnd)
            give_place(ranks, 0, slow)
            handles = begin_saves(ranks)
            await asked_for(slow, "committed")
            handles[0].abort()
            await check_all_hear_of_it(ranks, handles, 0)

    run(scenario(), seed=0)


class _SlowPublisher(MemoryAttempt):
    async def commit(self, manifest: bytes) -> None:
        self._storage.step("publish")

        async def late() -> None:
            await asyncio.sleep(3.0)
            await super(_SlowPublisher, self).commit(manifest)

        try:
            await shielded(late())
        except asyncio.CancelledError:
            take_back_cancel()


class SlowToPublish(MemoryStorage):
    """Takes a while to publish a manifest, whatever happens meanwhile."""

    attempt_type = _SlowPublisher


def test_who_aborts_while_a_lost_rank_0_commits_is_in_doubt() -> None:
    """As all others are: nothing is there yet, and may be in a moment."""

    async def scenario() -> None:
        async with job(3) as ranks:
            slow = same_place(ranks, SlowToPublish)
            give_place(ranks, 0, slow)
            handles = begin_saves(ranks)
            await asked_for(slow, "publish")
            ranks.ranks.kill(0)
            handles[1].abort()
            for error in (await outcomes_of(handles))[1:]:
                assert isinstance(error, PeerLostError)
                assert error.in_doubt
            assert ranks.place.manifest is not None
            found = decode_manifest(ranks.place.manifest)
            assert {entry.name for entry in found.files} <= ranks.place.files.keys()

    run(scenario(), seed=0)


@pytest.mark.parametrize("aborting", [0, 1])
def test_an_abort_before_anything_is_published_leaves_nobody_in_doubt(aborting: int) -> None:
    """Rank 0 had begun to commit, and says that it has not got to it."""

    async def scenario() -> None:
        async with job(3, MemoryStorage("memory", max_delay_s=0.5)) as ranks:
            handles = begin_saves(ranks)
            await asked_for(ranks.storages[0], "commit")
            handles[aborting].abort()
            errors = await outcomes_of(handles)
            assert isinstance(errors.pop(aborting), SaveAbortedError)
            for error in errors:
                assert isinstance(error, RankError)
                assert not error.in_doubt
            assert ranks.place.manifest is None
            assert ranks.place.leftovers() == []

    run(scenario(), seed=0)


def test_a_rank_that_gives_up_before_rank_0_begins_leaves_nothing() -> None:
    """Nobody else knows of its file, as rank 0 had made nothing that could be found."""

    async def scenario() -> None:
        async with job(2) as ranks:
            await outcomes_of(begin_saves(ranks))
            ahead = ranks.engines[1].save(own_state(1, 2.0), "memory", overwrite=True)
            await ahead.staged
            await asyncio.sleep(SOON_S)
            assert ranks.place.leftovers()  # it has written, and waits for rank 0
            ahead.abort()
            late = ranks.engines[0].save(own_state(0, 2.0), "memory", overwrite=True)
            (error, own) = await outcomes_of([late, ahead])
            assert isinstance(error, RankError)
            assert isinstance(own, SaveAbortedError)
            assert ranks.place.leftovers() == []

    run(scenario(), seed=0)


class _LateAttempt(MemoryAttempt):
    manifest = b""

    @property
    def is_published(self) -> bool:
        return bool(self.manifest)

    async def commit(self, manifest: bytes) -> None:
        assert isinstance(self._storage, CommitsLate)
        self._storage.late = self
        self.manifest = manifest
        raise StorageError("nobody knows whether it was committed", path="memory", code=5)

    async def abort(self) -> None:
        await self.leave()  # it may be published

    async def land(self) -> None:
        await super().commit(self.manifest)


class CommitsLate(MemoryStorage):
    """Does not know whether it has published a manifest: a store that carries it out later."""

    attempt_type = _LateAttempt
    late: _LateAttempt


def test_a_commit_that_comes_after_all_ranks_gave_up_finds_their_files() -> None:
    """Every rank is in doubt, finds nothing, and leaves what it wrote."""

    async def scenario() -> None:
        async with job(3) as ranks:
            slow = same_place(ranks, CommitsLate)
            give_place(ranks, 0, slow)
            for error in await outcomes_of(begin_saves(ranks)):
                assert isinstance(error, RankError)
                assert error.in_doubt
            assert ranks.place.manifest is None
            await slow.late.land()
            give_place(ranks, 0, ranks.storages[0])
            await check_saved(ranks)
            await check_goes_on(ranks)

    run(scenario(), seed=0)


class _SlowSayer(MemoryAttempt):
    async def commit(self, manifest: bytes) -> None:
        await super().commit(manifest)
        try:
            await shielded(asyncio.sleep(3.0))
        except asyncio.CancelledError:  # the commit came first, as with the local one
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()


class SlowToSay(MemoryStorage):
    """Publishes manifests, and takes a while to say so."""

    attempt_type = _SlowSayer


class _SealedOnce(MemoryAttempt):
    async def seal(self) -> None:
        await super().seal()
        assert isinstance(self._storage, SealsOnce)
        self._storage.num_seals += 1
        if self._storage.manifest is not None and self._storage.fails:
            raise StorageError("Input/output error", path="memory", code=5)


class SealsOnce(LocatedStorage):
    """Cannot make names durable after a commit, unless told that it can; found when asked."""

    attempt_type = _SealedOnce
    num_seals = 0
    fails = True


@pytest.mark.parametrize("fails", [True, False])
def test_who_finds_what_a_dead_rank_0_committed_makes_it_durable_first(*, fails: bool) -> None:
    """It died before it could: what is not on the disk is in doubt, and its files stay."""

    async def scenario() -> None:
        async with job(2) as ranks:
            slow = same_place(ranks, SlowToSay)
            give_place(ranks, 0, slow)
            sealing = same_place(ranks, SealsOnce)
            sealing.fails = fails
            give_place(ranks, 1, sealing)
            handles = begin_saves(ranks)
            while ranks.place.manifest is None:
                await asyncio.sleep(0.001)
            ranks.ranks.kill(0)
            outcome = (await outcomes_of(handles))[1]
            assert sealing.num_seals == 2
            if fails:
                assert isinstance(outcome, PeerLostError)
                assert outcome.in_doubt
                assert isinstance(outcome.__cause__, StorageError)
            else:
                assert not isinstance(outcome, BaseException)
            found = decode_manifest(ranks.place.manifest)
            assert {entry.name for entry in found.files} <= ranks.place.files.keys()

    run(scenario(), seed=0)


@pytest.mark.parametrize("fails", [True, False])
def test_who_finds_a_commit_without_a_verdict_is_in_doubt(
    monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """Cancelled twice, it hears nothing of rank 0: also where it fails to make that durable."""
    tasks = tasks_of_rank_1(monkeypatch)

    async def scenario() -> None:
        async with job(2) as ranks:
            give_place(ranks, 0, same_place(ranks, SlowToSay))
            sealing = same_place(ranks, SealsOnce)
            sealing.fails = fails
            give_place(ranks, 1, sealing)
            handles = begin_saves(ranks)
            while ranks.place.manifest is None:
                await asyncio.sleep(0.001)
            for _ in range(2):
                for task in tasks:
                    task.cancel()
                await asyncio.sleep(0.5)
            outcome = (await outcomes_of(handles))[1]
            assert isinstance(outcome, StorageError)
            assert outcome.in_doubt
            found = decode_manifest(ranks.place.manifest)
            assert {entry.name for entry in found.files} <= ranks.place.files.keys()

    run(scenario(), seed=0)


@pytest.mark.parametrize("silent", ["dead", "frozen"])
@pytest.mark.parametrize("first", ["dead", "aborting"])
@pytest.mark.parametrize("seed", range(3))
def test_files_stay_where_two_ranks_fail_around_the_commit(
    seed: int, first: str, silent: str
) -> None:
    """One fails while the manifest is out; then rank 0, before it could say what became of it."""

    async def scenario() -> None:
        async with job(3, seed=seed) as ranks:
            for handle in begin_saves(ranks):
                await handle
            manifest = ranks.place.manifest
            give_place(ranks, 0, same_place(ranks, SlowToSay))
            handles = begin_saves(ranks, 2.0)
            while ranks.place.manifest == manifest:
                await asyncio.sleep(0.001)
            if first == "dead":
                ranks.ranks.kill(2)
            else:
                handles[2].abort()
            await asyncio.sleep(0.5)
            if silent == "dead":
                ranks.ranks.kill(0)
            else:
                ranks.ranks.freeze(0)
            outcomes = await outcomes_of(handles[1:])
            assert not isinstance(outcomes[0], BaseException)
            assert not isinstance(outcomes[1], BaseException) or first == "dead"
            assert ranks.place.manifest is not None
            found = decode_manifest(ranks.place.manifest)
            assert found.save_id == outcomes[0].save_id
            assert {entry.name for entry in found.files} <= ranks.place.files.keys()

    run(scenario(), seed=seed)


@pytest.mark.parametrize("seed", range(5))
def test_another_writer_that_was_first_leaves_nobody_in_doubt(seed: int) -> None:
    """All ranks hear of the conflict; what the other has committed is untouched."""
    theirs = contents_of(SAVE_IDS[0], 5000, 9000)

    async def scenario() -> None:
        async with job(2, seed=seed) as ranks:
            handles = begin_saves(ranks, overwrite=False)
            while not any(op.kind == "begin" for op in ranks.place.operations):
                await asyncio.sleep(0.0001)
            other = ranks.place.another_name("other")
            await write_files(other, SAVE_IDS[0], theirs)
            errors = await outcomes_of(handles)
            assert len({str(error) for error in errors}) == 1
            for error in errors:
                assert isinstance(error, CommitConflictError)
                assert "another save committed a checkpoint here" in str(error)
                assert isinstance(error.__cause__, RankError)
                assert not error.__cause__.in_doubt
            assert ranks.place.leftovers() == []
            assert await read_files(other) == theirs
            await check_goes_on(ranks)

    run(scenario(), seed=seed)


def test_a_refusal_leaves_nobody_in_doubt() -> None:
    """What rank 0 refuses to decide was not decided: nobody is sent to look."""

    async def scenario() -> None:
        async with job(2) as ranks:

            async def save(rank: int, engine: Engine) -> None:
                await engine.save({"w": torch.zeros(4), "step": rank}, "memory")

            for error in await ranks.each(save):
                assert isinstance(error, RankError)
                assert not error.in_doubt
                assert "look whether" not in str(error)

            async def load(_: int, engine: Engine) -> None:
                await engine.load("memory")

            for absent in await ranks.each(load):
                assert type(absent) is CheckpointNotFoundError
            await check_goes_on(ranks)

    run(scenario(), seed=0)


# aborted early


@pytest.mark.parametrize("aborting", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_a_save_that_is_aborted_at_once_is_aborted_for_all(seed: int, aborting: int) -> None:
    """The others hear of a save that had not taken a step, and its handle says how it ended."""

    async def scenario() -> None:
        async with job(2, seed=seed) as ranks:
            handles = begin_saves(ranks)
            handles[aborting].abort()
            errors = await outcomes_of(handles)
            assert isinstance(errors[aborting], SaveAbortedError)
            error = errors[1 - aborting]
            assert isinstance(error, RankError)
            assert error.causes == {aborting: "it was cancelled there"}
            assert now_s() < SOON_S
            await check_goes_on(ranks)

    run(scenario(), seed=seed)


@pytest.mark.parametrize("aborting", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_a_save_that_waits_for_a_place_is_aborted_for_all(seed: int, aborting: int) -> None:
    """The others do not wait for a rank whose save never began; earlier and later ones go on."""

    async def scenario() -> None:
        place = MemoryStorage("memory", seed=seed, max_delay_s=0.5)
        async with job(2, place, config_with(max_saves=1), seed=seed) as ranks:
            saves = []
            for value in (1.0, 2.0, 3.0):
                saves.append(begin_saves(ranks, value))
                await asyncio.sleep(0.001)  # they queue in this order on every rank
            first, second, third = saves
            second[aborting].abort()
            error = (await outcomes_of(second))[1 - aborting]
            assert isinstance(error, RankError)
            assert error.causes == {aborting: "it was cancelled there"}
            assert not error.in_doubt
            with pytest.raises(SaveAbortedError):
                await second[aborting]
            for handle in (*first, *third):
                await handle
            assert now_s() < SOON_S
            await check_saved(ranks, 3.0)

    run(scenario(), seed=seed)


@pytest.mark.parametrize("cancelled", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_a_load_that_is_cancelled_between_rounds_ends_on_all(seed: int, cancelled: int) -> None:
    """A rank that has the manifest and does not come to read is not waited for."""

    async def scenario() -> None:
        loop: Any = asyncio.get_running_loop()
        async with job(2, seed=seed) as ranks:
            for handle in begin_saves(ranks):
                await handle
            begun_s = now_s()

            loads = [
                loop.create_task(engine.load("memory"), name=f"load {rank}")
                for rank, engine in enumerate(ranks.engines)
            ]
            while not loop.calls["decode_manifest"]:
                await asyncio.sleep(0.0001)
            loads[cancelled].cancel()
            await asyncio.wait(loads)
            assert now_s() - begun_s < SOON_S
            assert loads[cancelled].cancelled()
            assert isinstance(loads[1 - cancelled].exception(), RankError)
            await check_goes_on(ranks)

    run(scenario(), seed=seed)


# refused at the call


class Stateful:
    """Raises when it is asked for its state."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        raise self.error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


@pytest.mark.parametrize("refusing", [0, 1])
@pytest.mark.parametrize(
    ("value", "kind", "cause"),
    [
        (object(), UnsupportedLeafError, "UnsupportedLeafError"),
        (Stateful(ZeroDivisionError("in the model")), UnsupportedLeafError, "in the model"),
        (Stateful(KeyboardInterrupt()), KeyboardInterrupt, "it was stopped there"),
    ],
    ids=["refused", "failed", "interrupted"],
)
def test_a_state_that_one_rank_does_not_give_fails_the_save_alone(
    value: object, kind: type[BaseException], cause: str, refusing: int
) -> None:
    """The others hear of it at once; every later call of all ranks is the same one still."""

    async def scenario() -> None:
        async with job(2) as ranks:

            async def save(rank: int, engine: Engine) -> None:
                state = {**own_state(rank), "x": value if rank == refusing else 1}
                await engine.save(state, "memory")

            results = await ranks.each(save)
            assert isinstance(results[refusing], kind)
            error = results[1 - refusing]
            assert isinstance(error, RankError)
            assert list(error.causes) == [refusing]
            assert cause in error.causes[refusing]
            assert now_s() < SOON_S
            await check_goes_on(ranks)

    run(scenario(), seed=0)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_device_that_fails_at_the_call_fails_the_save_on_all(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that cannot be pinned, say, when the save has its number already."""

    async def scenario() -> None:
        async with job(2) as ranks:
            broken = core_of(ranks.engines[failing])
            real = streams.caller_streams

            def failing_streams(tensors: Any, core: Any, *, saving: bool) -> Any:
                if core is broken and saving:
                    raise RuntimeError("no memory left to pin")
                return real(tensors, core, saving=saving)

            async def save(rank: int, engine: Engine) -> None:
                await engine.save(own_state(rank), "memory")

            with monkeypatch.context() as patch:
                patch.setattr(saving, "caller_streams", failing_streams)
                results = await ranks.each(save)
            assert isinstance(results[failing], RuntimeError)
            error = results[1 - failing]
            assert isinstance(error, RankError)
            assert error.causes == {failing: "RuntimeError: no memory left to pin"}
            assert now_s() < SOON_S
            await check_goes_on(ranks)

    run(scenario(), seed=0)


@pytest.mark.parametrize("refusing", [0, 1])
@pytest.mark.parametrize(
    "options",
    [{"strict": "maybe"}, {"into": {"all": torch.zeros(300)}, "device": "cpu"}],
    ids=["strict", "device"],
)
def test_options_that_one_rank_refuses_fail_the_load_alone(
    options: dict[str, Any], refusing: int
) -> None:
    """A call that was refused has its number as well: the ones after it do not mix."""

    async def scenario() -> None:
        async with job(2) as ranks:
            for handle in begin_saves(ranks):
                await handle

            async def load(rank: int, engine: Engine) -> None:
                await engine.load("memory", **(options if rank == refusing else {}))

            begun_s = now_s()
            for _ in range(2):
                results = await ranks.each(load)
                assert isinstance(results[refusing], ConfigError)
                error = results[1 - refusing]
                assert isinstance(error, RankError)
                assert error.causes[refusing].startswith("ConfigError: ")
            assert now_s() - begun_s < SOON_S
            await check_goes_on(ranks)

    run(scenario(), seed=0)


@pytest.mark.parametrize("refusing", [0, 1, 2])
def test_a_refused_state_makes_all_ranks_plan_anew(refusing: int) -> None:
    """Who was refused goes by no older plan than those whose save failed for it."""
    config = config_with(replicate="local")
    norm = torch.arange(1 << 15, dtype=torch.float32).view(256, 128)

    async def scenario() -> None:
        place = MemoryStorage("memory")
        async with job(3, place, config) as ranks:

            def state_of(rank: int) -> dict[str, Any]:
                return {f"own{rank}": torch.zeros(1000), "norm": norm}

            async def save(rank: int, engine: Engine) -> CheckpointInfo:
                return await engine.save(state_of(rank), "memory", overwrite=True)

            async def refused(rank: int, engine: Engine) -> CheckpointInfo:
                state = {**state_of(rank), **({"x": object()} if rank == refusing else {})}
                return await engine.save(state, "memory", overwrite=True)

            await ranks.all(save)
            assert [info.plan_reused for info in await ranks.all(save)] == [True] * 3
            for rank, error in enumerate(await ranks.each(refused)):
                kind = UnsupportedLeafError if rank == refusing else RankError
                assert isinstance(error, kind)
            assert [info.plan_reused for info in await ranks.all(save)] == [False] * 3
            assert place.leftovers() == []
        async with inline_engine({"memory": place}) as engine:
            assert torch.equal((await engine.load("memory"))["norm"], norm)

    run(scenario(), seed=0)


# ranks that differ


@pytest.mark.parametrize(
    ("option", "value", "others"),
    [
        ("durability", "none", {}),
        ("block_nbytes", 8192, {}),
        ("replicate", "local", {}),
        ("local_replica_nbytes", 77, {"replicate": "local"}),
    ],
)
def test_options_that_differ_are_named_on_every_rank(
    option: str, value: object, others: dict[str, str]
) -> None:
    """One that syncs its files and one that does not make no checkpoint that is durable."""

    async def scenario() -> None:
        async with job(2, config=config_with(**others)) as ranks:
            core_of(ranks.engines[1]).context.config = config_with(**{**others, option: value})
            errors = await outcomes_of(begin_saves(ranks))
            assert len({str(error) for error in errors}) == 1
            error = errors[1]
            assert isinstance(error, RankError)
            assert f"rank 1 saves with {option} {value!r} and rank 0 with" in str(error)
            assert not error.in_doubt
            assert ranks.place.manifest is None
            assert ranks.place.leftovers() == []

    run(scenario(), seed=0)


def test_a_path_that_is_another_disk_elsewhere_is_refused() -> None:
    """A checkpoint whose files are on two machines is none; nothing is left on either."""

    async def scenario() -> None:
        async with job(2, hosts=["a", "b"]) as ranks:
            elsewhere = MemoryStorage("memory")
            give_place(ranks, 1, elsewhere)
            errors = await outcomes_of(begin_saves(ranks))
            assert len({str(error) for error in errors}) == 1
            for error in errors:
                assert isinstance(error, RankError)
                assert "rank 1 has written" in error.causes[0]
                assert "save to a path that is the same place on all hosts" in error.causes[0]
                assert not error.in_doubt
            for place in (ranks.place, elsewhere):
                assert place.manifest is None
                assert place.leftovers() == []

    run(scenario(), seed=0)


class FallsBehind(MemoryStorage):
    """Sees files of others late, and smaller at first, as a network file system may."""

    num_looks = 0

    async def sizes(self, names: Sequence[str]) -> list[int | None]:
        self.num_looks += 1
        sizes = await super().sizes(names)
        first: list[int | None] = [None, 0]
        return [*sizes[:-1], first[self.num_looks - 1]] if self.num_looks <= len(first) else sizes


def test_files_that_are_seen_late_are_waited_for() -> None:
    """Rank 0 looks a few times before it says that a path is not the same place."""

    async def scenario() -> None:
        async with job(2) as ranks:
            behind = same_place(ranks, FallsBehind)
            give_place(ranks, 0, behind)
            for handle in begin_saves(ranks):
                await handle
            assert behind.num_looks == 3
            give_place(ranks, 0, ranks.storages[0])
            await check_saved(ranks)

    run(scenario(), seed=0)


def test_a_host_that_no_manifest_takes_fails_the_save() -> None:
    """What could not be read again is not written: the checkpoint that is there stays."""

    async def scenario() -> None:
        place = MemoryStorage("memory")
        async with job(2, place) as ranks:
            for handle in begin_saves(ranks):
                await handle
        before = place.manifest
        async with job(2, place, hosts=["büro-1", "node 2"]) as ranks:
            for error in await outcomes_of(begin_saves(ranks, 2.0)):
                assert isinstance(error, RankError)
                assert not error.in_doubt
            assert place.manifest == before
            await check_saved(ranks)

    run(scenario(), seed=0)


@pytest.mark.parametrize("seed", range(10))
@in_virtual_time
async def test_of_two_jobs_that_race_one_commits(seed: int) -> None:
    """Every rank of the other is told so by the error that says it, as a process alone is."""
    place = MemoryStorage("memory", seed=seed)
    async with job(2, place, seed=seed) as one, job(2, place, seed=seed + 100) as other:

        async def save(rank: int, engine: Engine) -> None:
            await engine.save(own_state(rank), "memory")

        ends = await asyncio.gather(one.each(save), other.each(save))
        lost, won = sorted(ends, key=lambda end: end == [None, None])
        assert won == [None, None]
        assert {type(error) for error in lost} <= {CommitConflictError, CheckpointExistsError}
        assert len({type(error) for error in lost}) == 1
        assert (await one.engines[0].verify("memory")).is_whole


@pytest.mark.parametrize("way", ["one save more", "another path", "a load"])
def test_after_different_calls_no_rank_meets_the_next_one_of_another(way: str) -> None:
    """Each save would meet the other rank's next one, and what they wrote would be of two steps."""

    async def scenario() -> None:
        async with job(2, MemoryStorage("memory")) as ranks:
            for handle in begin_saves(ranks):
                await handle
            before = ranks.place.manifest
            zero, one = ranks.engines
            more: list[Awaitable[object]] = []
            if way == "one save more":
                more.append(zero.save(own_state(0, 2.0), "memory", overwrite=True))
            elif way == "another path":
                places = {"memory": ranks.place, "other": MemoryStorage("other")}
                core_of(zero).use_storages(places)
                more.append(zero.save(own_state(0, 2.0), "other"))
                more.append(one.save(own_state(1, 2.0), "memory", overwrite=True))
            else:
                more.append(zero.save(own_state(0, 2.0), "memory", overwrite=True))
                more.append(one.load("memory"))
            for error in await asyncio.gather(*more, return_exceptions=True):
                assert isinstance(error, RankError)
            for value in (3.0, 4.0):
                for error in await outcomes_of(begin_saves(ranks, value)):
                    assert isinstance(error, RankError)
            assert "close the engine on all ranks, and open another" in str(error)
            assert ranks.place.manifest == before

    run(scenario(), seed=0)


def test_a_link_that_moves_behind_the_commit_fails_it_on_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others ask where it leads when rank 0 has committed, and it cannot be read just then."""
    link, read, followed = tmp_path / "link", os.readlink, [""]
    (tmp_path / "place").mkdir()
    link.symlink_to("place")

    def fail(path: Any, *args: Any, **options: Any) -> Any:
        if path == str(link) and (tmp_path / "place" / MANIFEST_NAME).exists():
            followed.append(path)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return read(path, *args, **options)

    async def scenario() -> None:
        async with job(3, directory=link) as ranks:
            infos = await outcomes_of(begin_saves(ranks))
            assert not any(isinstance(info, BaseException) for info in infos), infos

    monkeypatch.setattr(os, "readlink", fail)
    run(scenario(), seed=0)
    assert str(link) in followed
