"""Saves to one place: in which order they commit, and when it is asked whether it is one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING

import pytest

from ckptio.config import KiB
from ckptio.engine.turns import Line
from ckptio.errors import CommitConflictError, SaveAbortedError, StorageError
from ckptio.handle import SaveHandle
from ckptio.runtime.saving import begin_save
from ckptio.testing import MemoryStorage, fail_kind, run_virtual
from ckptio.testing.memory_attempt import MemoryAttempt
from tests.job_rig import job
from tests.rig import assert_same, config_with, filled_state, inline_engine
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from torch import Tensor

    from ckptio import Engine

SIZES = [KiB]


class SlowStorage(MemoryStorage):
    """Takes a minute to begin a save, so that later ones to other names are ready before it."""

    async def begin(self, save_id: str, *, overwrite: bool, resumes: bool = False) -> MemoryAttempt:
        await asyncio.sleep(60)
        return await super().begin(save_id, overwrite=overwrite, resumes=resumes)


class LostStorage(SlowStorage):
    """Does not say where it is for long, and is given up then."""

    async def identify_now(self) -> str | None:  # type: ignore[override]
        await asyncio.sleep(5)
        return None


class LostForNow(LostStorage):
    """Says where it is to whoever waits for that."""

    def another_name(self, path: str) -> MemoryStorage:
        twin = MemoryStorage(path, identity=self._identity)
        twin._place = self._place
        return twin


class LocatedStorage(MemoryStorage):
    """May block where it is asked for its place before that was found out."""

    is_located = False

    @property
    def identity(self) -> str:
        assert self.is_located
        return super().identity

    async def identify(self) -> str:
        return super().identity

    async def locate(self, *, gives_up: bool = True) -> bool:
        assert not gives_up  # one that is known by its path may be two
        self.is_located = True
        return True

    def another_name(self, path: str) -> MemoryStorage:
        twin = LocatedStorage(path, identity=self._identity)
        twin._place = self._place
        return twin


class UnsureAttempt(MemoryAttempt):
    """Publishes a manifest, and hears no more of it."""

    async def commit(self, manifest: bytes) -> None:
        await super().commit(manifest)
        raise StorageError("nobody knows", path="memory", in_doubt=True)


class UnsureStorage(MemoryStorage):
    """Leaves it open whether saves were committed."""

    attempt_type = UnsureAttempt


async def test_one_that_has_ended_is_kept_no_longer() -> None:
    """However it ended: an engine makes as many saves as there are steps."""
    line: Line[str] = Line()
    with contextlib.suppress(KeyError), line.enter("one"), line.enter("two") as before:
        assert [place for _, place in before] == ["one"]
        raise KeyError
    with line.enter("three") as before:
        assert before == []


@in_virtual_time
async def test_by_two_names_of_it_the_newest_state_stays() -> None:
    """It waits for the older one, though it is ready before."""
    one = SlowStorage("one")
    others = {"two": one.another_name("two"), "three": SlowStorage("three")}
    storages = {"one": one, **others}
    async with inline_engine(storages, config_with(max_saves=3)) as engine:
        engine.save(filled_state(SIZES, 0), "three")  # to another place, and before both
        older = engine.save(filled_state(SIZES, 1), "one")
        await engine.save(filled_state(SIZES, 2), "two", overwrite=True)
        assert older.committed.done()
        assert_same(await engine.load("one"), filled_state(SIZES, 2))


def test_one_that_waits_for_long_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes nothing meanwhile, and silence counts as its end."""
    said_s: list[float] = []

    async def stay(_: MemoryAttempt) -> None:
        said_s.append(asyncio.get_running_loop().time())

    async def scenario() -> None:
        one = SlowStorage("one", max_delay_s=1000.0)
        async with inline_engine({"one": one, "two": one.another_name("two")}) as engine:
            older = engine.save(filled_state(SIZES, 1), "one")
            await engine.save(filled_state(SIZES, 2), "two", overwrite=True)
            assert older.committed.done()

    monkeypatch.setattr(MemoryAttempt, "stay", stay)
    run_virtual(scenario(), seed=0)
    waits_s = [later - sooner for sooner, later in itertools.pairwise(said_s)]
    assert len(waits_s) > 3
    assert max(waits_s) < 100


@in_virtual_time
async def test_one_that_ends_early_lets_nobody_pass_who_waited_behind_it() -> None:
    """What it waited for itself has not ended."""
    one = SlowStorage("one")
    storages = {name: one.another_name(name) for name in ("two", "three")}
    async with inline_engine({"one": one, **storages}) as engine:
        older = engine.save(filled_state(SIZES, 1), "one")
        aborted = engine.save(filled_state(SIZES, 2), "two", overwrite=True)
        newest = engine.save(filled_state(SIZES, 3), "three", overwrite=True)
        await asyncio.sleep(1)
        aborted.abort()
        with pytest.raises(SaveAbortedError):
            await aborted
        await newest
        assert older.committed.done()
        assert_same(await engine.load("one"), filled_state(SIZES, 3))


@in_virtual_time
async def test_a_save_to_another_place_is_not_waited_for() -> None:
    """Nor, for longer than it takes to give it up, one whose place does not say where it is."""
    loop = asyncio.get_running_loop()
    for first, wait_s in ((SlowStorage("one"), 0.0), (LostStorage("one"), 5.0)):
        storages = {"one": first, "two": MemoryStorage("two")}
        async with inline_engine(storages) as engine:
            older, called_s = engine.save(filled_state(SIZES, 1), "one"), loop.time()
            await engine.save(filled_state(SIZES, 2), "two")
            assert wait_s <= loop.time() - called_s < wait_s + 1
            assert not older.committed.done()
            await older


class SlowAtFirst(LostStorage):
    """Takes a minute to begin its first save alone."""

    _is_new = True

    async def begin(self, save_id: str, *, overwrite: bool, resumes: bool = False) -> MemoryAttempt:
        is_new, self._is_new = self._is_new, False
        begin = super().begin if is_new else super(SlowStorage, self).begin
        return await begin(save_id, overwrite=overwrite, resumes=resumes)


@in_virtual_time
async def test_one_path_is_one_place_though_it_does_not_answer() -> None:
    """By the same name: nobody has to be asked for that."""
    async with inline_engine({"one": SlowAtFirst("one")}) as engine:
        older = engine.save(filled_state(SIZES, 1), "one")
        await engine.save(filled_state(SIZES, 2), "one", overwrite=True)
        assert older.committed.done()
        assert_same(await engine.load("one"), filled_state(SIZES, 2))


@in_virtual_time
async def test_places_that_do_not_answer_are_given_up_together() -> None:
    """A save waits as long for three of them as for one."""
    loop = asyncio.get_running_loop()
    storages = {name: LostStorage(name) for name in ("one", "two", "three")}
    config = config_with(max_saves=4)
    async with inline_engine({**storages, "four": MemoryStorage("four")}, config) as engine:
        called_s = loop.time()
        older = [engine.save(filled_state(SIZES, 1), name) for name in storages]
        await engine.save(filled_state(SIZES, 2), "four")
        assert loop.time() - called_s < 6
        for handle in older:
            await handle


def save_slowly(engine: Engine, state: dict[str, Tensor], path: str, wait_s: float) -> SaveHandle:
    """Save over what is there; from when it may, it takes a while until it is committed."""

    async def permit() -> None:
        await asyncio.sleep(wait_s)

    moments = begin_save(engine._core, state, path, overwrite=True, then=None, permit=permit)
    return SaveHandle(moments)


@pytest.mark.parametrize("end", ["commits", "fails", "in doubt"])
@pytest.mark.parametrize("commit_s", [0.0, 60.0])
@in_virtual_time
async def test_one_that_was_passed_is_not_committed_over_what_passed_it(
    commit_s: float, end: str
) -> None:
    """Its place was given up, and turns out to be the same; also while the newer one commits.

    Nor over what may be there: nobody knows of the newer one whether it was committed.
    """
    one = LostForNow("one")
    two = one.another_name("two")
    if end == "fails":
        two.fault = fail_kind("commit")
    if end == "in doubt":
        two = UnsureStorage("two", identity=one.identity)
        two._place = one._place

    async with inline_engine({"one": one, "two": two}) as engine:
        older = engine.save(filled_state(SIZES, 1), "one", overwrite=True)
        newer = save_slowly(engine, filled_state(SIZES, 2), "two", commit_s)
        with contextlib.nullcontext() if end == "commits" else pytest.raises(StorageError):
            await newer
        if end == "fails":
            await older
        else:
            with pytest.raises(CommitConflictError):
                await older
        assert_same(await engine.load("one"), filled_state(SIZES, 1 if end == "fails" else 2))


@in_virtual_time
async def test_one_that_answers_while_others_are_waited_for_goes_before_the_newest() -> None:
    """It was given up once, and is about to commit by the time that the others have ended."""
    one, twin = LostForNow("one"), SlowStorage("two")
    twin._place, twin._identity = one._place, one._identity
    storages = {"one": one, "two": twin, "three": one.another_name("two")}
    async with inline_engine(storages, config_with(max_saves=3)) as engine:
        states = [filled_state(SIZES, value) for value in range(3)]
        older = save_slowly(engine, states[0], "one", 60.0)
        aborted = engine.save(states[1], "two", overwrite=True)
        newest = engine.save(states[2], "three", overwrite=True)
        await asyncio.sleep(90)
        aborted.abort()
        await newest
        assert older.committed.done()
        assert_same(await engine.load("one"), states[2])


@in_virtual_time
async def test_where_a_place_is_whose_save_has_ended_is_not_asked() -> None:
    """It may not answer, and no save is to wait for that."""
    loop = asyncio.get_running_loop()
    storages = {"one": LostStorage("one"), "two": SlowStorage("two")}
    async with inline_engine(storages) as engine:
        older, called_s = engine.save(filled_state(SIZES, 1), "one"), loop.time()
        await asyncio.sleep(1)
        newer = engine.save(filled_state(SIZES, 2), "two")
        await older
        await newer
        assert loop.time() - called_s < 65


@in_virtual_time
async def test_where_a_place_is_is_found_out_before_that_is_needed() -> None:
    """On no rank does the loop wait for a mount that hangs."""
    place = LocatedStorage("memory")
    async with job(3, place) as ranks:

        async def save(rank: int, engine: Engine) -> None:
            state = {f"{rank}": filled_state(SIZES, rank)}
            await engine.save(state, "memory", then="far").durable

        await ranks.all(save)
    async with job(3, place) as ranks:

        async def load(rank: int, engine: Engine) -> None:
            found = await engine.load("memory")
            assert_same(found[f"{rank}"], filled_state(SIZES, rank))

        await ranks.all(load)
    for call in ("save", "load"):
        async with inline_engine({"memory": place.another_name("memory")}) as engine:
            if call == "save":
                await engine.save(filled_state(SIZES, 0), "memory", overwrite=True)
            else:
                assert_same(await engine.load("memory"), filled_state(SIZES, 0))


@pytest.mark.parametrize("call", ["load", "finish_copies"])
@in_virtual_time
async def test_so_it_is_where_there_is_a_second_tier(call: str) -> None:
    """Which may be the first, by another name; and may be owed a copy."""
    near, far = LocatedStorage("near/a"), MemoryStorage("far/a")
    far.fault = fail_kind("begin")
    async with inline_engine({"near/a": near, "far/a": far}) as engine:
        with pytest.raises(StorageError):
            await engine.save(filled_state(SIZES, 1), "near/a", then="far/a").durable
    far.fault = None
    storages = {"near/a": near.another_name("near/a"), "far/a": far}
    async with inline_engine(storages) as engine:
        if call == "load":
            assert_same(await engine.load("near/a", then="far/a"), filled_state(SIZES, 1))
        else:
            assert await engine.finish_copies("near") == ("far/a",)
