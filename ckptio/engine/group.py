"""Load as a group of ranks: one reads the manifest, and all end alike.

    a round   rank 0 reads the manifest, the others are given it, or told that the one they
              have is current
    a round   what each rank wants, and lacks; rank 0 plans who reads what for whom, where that
              pays, or ends the load where no rank has what the checkpoint has
    a round   where each rank is reached, if they pass on what they read to other hosts
    a round   everybody is through

Between the first and the second each rank matches its own target with the manifest and
checks the files that it needs, so that no target changes on any rank before all of them
know that they can be filled.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
from typing import TYPE_CHECKING, Any

from ckptio._aio import run_blocking
from ckptio._gc import without_collection
from ckptio._texts import written
from ckptio.engine.exchange import plan_part, read_shared
from ckptio.engine.load import announce, plan_and_read, telling_of_changes
from ckptio.engine.rounds import meet
from ckptio.errors import CheckpointNotFoundError, ConfigError, PeerLostError
from ckptio.events import ExchangePlanned
from ckptio.format.compose import encode_again
from ckptio.format.manifest import decode_manifest
from ckptio.plan.exchange import block_runs, decode_part, decode_runs, plan_exchange
from ckptio.plan.explain import explain, explain_text
from ckptio.plan.worth import is_worth_exchanging
from ckptio.ranks.interface import Same, require_alike
from ckptio.storage.keys import shown_url

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ckptio.engine.context import EngineContext
    from ckptio.engine.exchange import SharedPart
    from ckptio.engine.landing import Reading
    from ckptio.errors import MismatchError
    from ckptio.exchange.link import BulkLink
    from ckptio.format.manifest import Manifest
    from ckptio.plan.exchange import ExchangePlan
    from ckptio.plan.load import Wanted
    from ckptio.ranks.interface import Json, Session
    from ckptio.storage.interface import Storage
    from ckptio.storage.resolve import PathLike


#: Ranges that are looked at to tell whether a checkpoint is in the page cache, about.
_NUM_SAMPLES = 32


class Course:
    """How far a load has come, as the other ranks see it.

    Args:
        key: Names the load among those of the engine, on all ranks alike.
        path: The checkpoint.

    Attributes:
        title: What errors call the load.
        next_session: The session in which the others will wait for this rank, or may, if
            it does not come; none when all of them end together.
    """

    def __init__(self, key: str, path: PathLike) -> None:
        self._key = key
        self.title = f"load of {shown_url(written(path))!r}"
        self.next_session = self.of("manifest")

    def of(self, phase: str) -> str:
        """Name a session."""
        return f"{self._key} {phase}"


async def fetch_manifest(
    storage: Storage, context: EngineContext, course: Course, phase: str = "manifest"
) -> Manifest:
    """Read the manifest, on rank 0 for all.

    Args:
        storage: The checkpoint.
        context: The engine.
        course: How far the load has come.
        phase: Names the session in which ranks meet.

    Raises:
        CheckpointNotFoundError: There is none; on every rank.
        RankError: It cannot be read, or ranks load different paths.
        CheckpointError: The same, for one rank alone.
    """
    if context.ranks.world_size == 1:
        return await context.cache.get(storage)

    async def decide(messages: Sequence[Json]) -> Same:
        require_alike([repr(message["path"]) for message in messages], "loads", "load")
        try:
            manifest = await context.cache.get(storage)
        except CheckpointNotFoundError as error:
            # raised as such on every rank: whoever resumes catches it
            return Same({"save_id": None, "hint": error.message})
        context.received.put(storage.path, manifest)
        answer = {"save_id": manifest.save_id, "manifest": None}
        if any(message["has"] != manifest.save_id for message in messages):
            encoded = await run_blocking(context.executor, encode_again, manifest)
            answer["manifest"] = encoded.decode()
        return Same(answer)

    has = context.received.get(storage.path)
    course.next_session = ""
    async with context.ranks.session(course.of(phase), course.title) as session:
        # if this rank fails from here on, others may be through with this session already
        course.next_session = course.of("read")
        message = {"path": storage.path, "has": None if has is None else has.save_id}
        answer = await meet(
            session, "manifest", message, decide, path=storage.path, context=context
        )
    if answer["save_id"] is None:
        course.next_session = ""
        raise CheckpointNotFoundError(storage.path, answer["hint"])
    # loads of other paths may have pushed out what this rank said that it has
    for known in (has, context.received.get(storage.path)):
        if known is not None and known.save_id == answer["save_id"]:
            return known
    latest = await run_blocking(
        context.executor, decode_manifest, answer["manifest"].encode(), is_passed_on=True
    )
    context.received.put(storage.path, latest)
    return latest


async def read_together(
    reading: Reading,
    wanted: Sequence[Wanted],
    context: EngineContext,
    course: Course,
    unclaimed: MismatchError | None,
    *,
    is_strict: bool,
) -> int:
    """Read, verify and land what this rank wants, and help the others.

    Args:
        reading: The checkpoint.
        wanted: The ranges.
        context: The engine.
        course: How far the load has come.
        unclaimed: Raised, of those names alone, if no rank has names in its target that this
            one lacks, and one of them is strict.
        is_strict: Whether this one is.

    Returns:
        Bytes that came to this rank, read or passed on.

    Raises:
        MismatchError: As above; on every rank, before anything was read.
        RankError: It failed on some rank.
        PeerLostError: A rank was lost.
    """
    lacked = () if unclaimed is None else unclaimed.unexpected
    want_round = _WantRound(reading, context, lacked, is_strict=is_strict)
    course.next_session = ""
    # links are left when all ranks are through: the session ends first
    async with (
        contextlib.AsyncExitStack() as links,
        context.ranks.session(course.of("read"), course.title) as session,
    ):
        message = await run_blocking(context.executor, want_round.wish, wanted)
        message["cached"] = await want_round.is_cached(wanted)
        answer = await meet(
            session,
            "want",
            message,
            want_round.decide,
            path=reading.storage.path,
            context=context,
        )
        if not answer["unclaimed"]:  # else the session is over, on every rank
            if answer["link"] is None:
                await plan_and_read(reading, wanted, context, whole_files=False)
            else:
                await _read_and_pass_on(answer, reading, wanted, context, session, links)
            await meet(session, "done", None, _all_done, path=reading.storage.path, context=context)
    if answer["unclaimed"]:
        assert unclaimed is not None  # noqa: S101  # all ranks lack it, and so does this one
        lacking = set(answer["unclaimed"])
        names = [name for name in unclaimed.unexpected if _short(name) in lacking]
        raise unclaimed.of_unexpected(names)
    return reading.read_nbytes


async def _read_and_pass_on(
    answer: Json,
    reading: Reading,
    wanted: Sequence[Wanted],
    context: EngineContext,
    session: Session,
    links: contextlib.AsyncExitStack,
) -> None:
    """Do this rank's part of the exchange that rank 0 has planned in its `answer`."""
    part = await run_blocking(
        context.executor,
        plan_part,
        reading.manifest,
        decode_part(answer["units"]),
        wanted,
        context.ranks.rank,
    )
    announce(reading, part.nbytes, len({unit.file for unit, _ in part.reads}), context)
    opening = context.linker.open(answer["link"], context, session, reading.storage.path)
    await _pass_on(part, reading, context, opening, links)


async def _pass_on(
    part: SharedPart,
    reading: Reading,
    context: EngineContext,
    opening: contextlib.AbstractAsyncContextManager[BulkLink],
    links: contextlib.AsyncExitStack,
) -> None:
    """Read for all, and take from others, over a link that is left with `links`.

    Raises:
        PeerLostError: The link broke, and nobody in the group says why.
        CheckpointError: The first failure on this rank.
    """
    try:
        link = await links.enter_async_context(opening)
        async with telling_of_changes(reading, context):
            await read_shared(part, reading, link, context)
    except PeerLostError as error:
        # a rank that failed, or died, has left the link: the group is about to hear of that,
        # and then stops this one; what it has to say itself would only hide the cause. Where no
        # rank is to blame, this one alone knows the cause
        if error.ranks:
            await asyncio.sleep(context.config.peer_timeout_s)
        raise


class _WantRound:
    """The round of a load in which ranks say what they want, and rank 0 plans who reads it."""

    def __init__(
        self, reading: Reading, context: EngineContext, unclaimed: Sequence[str], *, is_strict: bool
    ) -> None:
        self._reading = reading
        self._context = context
        self._unclaimed = unclaimed
        self._is_strict = is_strict

    def wish(self, wanted: Sequence[Wanted]) -> Json:
        """Make this rank's message. Blocks."""
        config = self._context.config
        runs: Sequence[Any] = ()
        if config.exchange != "off":
            runs = block_runs(wanted, self._reading.manifest.block_nbytes)
        return {
            "runs": runs,
            "exchange": config.exchange,
            "slab_nbytes": config.slab_nbytes,
            "unclaimed": [_short(name) for name in self._unclaimed],
            "is_strict": self._is_strict,
        }

    async def is_cached(self, wanted: Sequence[Wanted]) -> bool:
        """Whether most of what this rank wants is in the memory of its host."""
        if self._context.config.exchange != "auto" or not wanted:
            return False
        files = self._reading.manifest.files
        sample = wanted[:: max(1, len(wanted) // _NUM_SAMPLES)]
        return await self._reading.storage.is_cached(
            [(files[want.file].name, want.start, want.nbytes) for want in sample]
        )

    async def decide(self, messages: Sequence[Json]) -> Sequence[Json] | Same:
        """Plan who reads what for whom, on rank 0; or let each rank read for itself."""
        lacking = set.intersection(*(set(message["unclaimed"]) for message in messages))
        if lacking and any(message["is_strict"] for message in messages):
            return Same({"link": None, "unclaimed": sorted(lacking)})
        ways = {message["exchange"] for message in messages}
        if len(ways) > 1:
            raise ConfigError(f"ranks load with exchange {sorted(ways)}; it is one for all ranks")
        if ways == {"off"}:
            return Same({"link": None, "unclaimed": []})
        context = self._context
        plan, pays = await run_blocking(context.executor, self._plan, messages)
        self._say(plan, is_exchanged=pays)
        if not pays:
            return Same({"link": None, "unclaimed": []})
        offer = context.linker.offer(context)
        parts = await run_blocking(context.executor, plan.parts)
        answers = {id(units): {"link": offer, "units": units, "unclaimed": []} for units in parts}
        return [answers[id(units)] for units in parts]  # equal ones are one, and encoded once

    def _plan(self, messages: Sequence[Json]) -> tuple[ExchangePlan, bool]:
        """Plan who would read what for whom, and say whether that pays. Blocks."""
        hosts = self._context.ranks.hosts
        plan = _planned(self._reading.manifest, messages, hosts)
        if messages[0]["exchange"] == "on":
            return plan, plan.shared_nbytes() > 0
        cached = [message["cached"] for message in messages]
        return plan, is_worth_exchanging(plan, hosts, cached)

    def _say(self, plan: ExchangePlan, *, is_exchanged: bool) -> None:
        """Tell the observer, if there is one, who reads what."""
        if self._context.observer is None:
            return
        explained = functools.partial(
            _explain, plan, self._reading.manifest, is_exchanged=is_exchanged
        )
        self._context.emit(
            ExchangePlanned(
                path=self._reading.storage.path,
                is_exchanged=is_exchanged,
                read_nbytes=tuple(plan.read_nbytes() if is_exchanged else plan.wanted_nbytes()),
                sent_nbytes=plan.sent_nbytes() if is_exchanged else 0,
                explainer=explained,
            )
        )


def _explain(
    plan: ExchangePlan, manifest: Manifest, names: Collection[str] | None, *, is_exchanged: bool
) -> str:
    """Explain a plan; a function of the module, so that the event can be pickled."""
    return explain_text(explain(plan, manifest, names, is_exchanged=is_exchanged))


def _short(name: str) -> str:
    """Stand for a name: a rank of a pipeline lacks those of nearly all layers."""
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


async def _all_done(messages: Sequence[Json]) -> Same:
    """Nothing to decide: that all ranks came is the answer."""
    del messages
    return Same(None)


@without_collection  # if all want everything, wants are as many as ranks x files
def _planned(manifest: Manifest, messages: Sequence[Json], hosts: Sequence[str]) -> ExchangePlan:
    runs = [decode_runs(message["runs"]) for message in messages]
    return plan_exchange(manifest, runs, hosts, min(each["slab_nbytes"] for each in messages))
