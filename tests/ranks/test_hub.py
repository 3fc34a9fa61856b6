from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckptio._texts import name_ranks
from ckptio.ranks.frames import (
    MAX_CAUSES,
    Answer,
    End,
    Stop,
    Verdict,
    name_causes,
    pack_hosts,
    unpack_hosts,
)
from ckptio.ranks.hub import Hub
from ckptio.ranks.interface import Deadlines, Same

if TYPE_CHECKING:
    from ckptio.ranks.frames import Head
    from ckptio.ranks.hub import Outgoing
    from ckptio.ranks.interface import Json


class Post:
    """Takes what a hub sends."""

    def __init__(self, world_size: int) -> None:
        self.sent: list[tuple[int, Outgoing]] = []
        self.ready: dict[str, list[Json]] = {}
        self.now_s = 0.0
        self.hub = Hub(
            ["h"] * world_size,
            Deadlines(peer_s=10, meet_s=60),
            lambda: self.now_s,
            lambda rank, frame: self.sent.append((rank, frame)),
            self.ready.__setitem__,
        )

    def heads(self, kind: type[Head]) -> list[int]:
        return [rank for rank, frame in self.sent if isinstance(frame.head, kind)]

    def verdict(self) -> Verdict:
        verdicts = {id(f.body): f.body for _, f in self.sent if isinstance(f.head, End)}
        assert len(verdicts) == 1, "every rank gets the same"
        verdict = next(iter(verdicts.values()))
        assert isinstance(verdict, Verdict)
        return verdict


@pytest.mark.parametrize("world_size", [2, 1000, 16_384])
def test_a_round_is_a_frame_a_rank_and_one_encoding(world_size: int) -> None:
    """An answer that is the same for all is encoded once, whatever the number of ranks."""
    post = Post(world_size)
    for rank in reversed(range(world_size)):
        post.hub.say(rank, "save", "plan", rank)
    assert post.ready == {"save": list(range(world_size))}
    assert post.sent == []
    plan = {"plan": ["of", "all"]}
    post.hub.answer("save", [plan] * world_size)
    assert post.heads(Answer) == list(range(1, world_size))
    assert len({id(frame.encoded()) for _, frame in post.sent}) == 1
    assert post.hub.num_messages == 2 * (world_size - 1)
    for rank in range(world_size):
        post.hub.left(rank, "save")
    assert post.hub.num_sessions == 0
    assert len(post.sent) == world_size - 1


def test_when_all_fail_the_verdict_stays_small() -> None:
    """N causes for n ranks would be n² of them: a few are told, all are counted."""
    world_size = 16_384
    post = Post(world_size)
    for rank in range(world_size):
        post.hub.failed(rank, "save", f"OSError: of rank {rank}")
    verdict = post.verdict()
    assert len(verdict.causes) == MAX_CAUSES
    assert f"and on {world_size - MAX_CAUSES} more" in verdict.text
    assert post.heads(End) == list(range(world_size))
    assert len(post.sent) < 3 * world_size
    assert post.hub.num_sessions == 0


def test_when_all_leave_one_by_one_only_the_first_is_told_of() -> None:
    """N ranks that close their engines make n frames, not n²."""
    post = Post(1000)
    for rank in range(999, 0, -1):
        post.hub.lose(rank, "it closed its engine")
    assert len(post.sent) == 999


def test_ranks_lost_on_the_way_to_a_verdict_are_not_waited_for() -> None:
    """The kind of the verdict is that of the first trouble; later ones are among the causes."""
    post = Post(4)
    post.hub.say(0, "save", "plan", 1)
    post.hub.failed(2, "save", "ValueError: no")
    assert post.heads(Stop) == [0, 1, 3]
    post.hub.stopped(0, "save")
    post.hub.lose(3, "its connection ended")
    post.hub.stopped(1, "save")
    verdict = post.verdict()
    assert verdict.kind == "failed"
    assert verdict.causes == {2: "ValueError: no", 3: "lost, its connection ended (host 'h')"}
    assert post.heads(End) == [0, 1, 2]


def test_several_lost_ranks_are_all_named() -> None:
    """Those that are lost while the others stop, too."""
    post = Post(4)
    post.hub.say(0, "save", "plan", 1)
    post.hub.lose(2, "gone")
    post.hub.lose(3, "gone")
    for rank in (0, 1):
        post.hub.stopped(rank, "save")
    assert post.verdict().lost == [2, 3]
    assert "failed on ranks 2-3: lost, gone (host 'h')" in post.verdict().text


def decided(post: Post) -> Hub:
    """Give a hub of three ranks in whose round rank 0 decides."""
    for rank in range(3):
        post.hub.say(rank, "save", "commit", rank)
    return post.hub


@pytest.mark.parametrize("is_on", [True, False])
def test_ranks_are_in_doubt_from_the_decision_on(*, is_on: bool) -> None:
    """Not while rank 0 checks what it is told; nor when it could not do what it began."""
    before = Post(3)
    decided(before).failed(2, "save", "ValueError: no")
    during = Post(3)
    decided(during).decisive("save", is_on=True)
    during.hub.failed(2, "save", "ValueError: no")
    during.hub.decisive("save", is_on=is_on)
    for post, in_doubt in ((before, False), (during, is_on)):
        for rank in (0, 1):
            post.hub.stopped(rank, "save")
        assert post.verdict().in_doubt == in_doubt
        assert ("look whether the checkpoint is there" in post.verdict().text) == in_doubt


def test_a_decision_that_begins_while_ranks_stop_leaves_them_in_doubt() -> None:
    """Rank 0 is told to stop and may be past that point; the verdict says so."""
    post = Post(3)
    decided(post).failed(2, "save", "ValueError: no")
    post.hub.decisive("save", is_on=True)
    for rank in (0, 1):
        post.hub.stopped(rank, "save")
    assert post.verdict().in_doubt


def test_doubt_of_one_session_is_none_in_another() -> None:
    """Saves that are in flight together end each for itself."""
    post = Post(3)
    decided(post).decisive("other", is_on=True)
    post.hub.failed(2, "save", "ValueError: no")
    for rank in (0, 1):
        post.hub.stopped(rank, "save")
    assert not post.verdict().in_doubt


def test_taking_back_a_decision_begins_no_session() -> None:
    """Rank 0 may come back to one that was ended because it did not stop in time."""
    post = Post(3)
    decided(post).decisive("save", is_on=True)
    post.hub.failed(2, "save", "ValueError: no")
    post.hub.stopped(1, "save")
    post.now_s = 61
    post.hub.tick()
    assert post.verdict().in_doubt
    post.hub.decisive("save", is_on=False)
    assert post.hub.num_sessions == 0


def test_who_does_not_come_to_a_later_round_is_named() -> None:
    """Each round is waited for from its first message on, and a decision for as long as it takes.

    Between rounds, nobody is waited for.
    """
    post = Post(3)
    post.now_s = 1000.0
    decided(post)
    for _ in range(2):
        post.now_s += 61
        post.hub.tick()
        assert post.sent == []
    assert post.hub.answer("save", Same(None))
    post.now_s += 61
    post.hub.tick()
    assert post.heads(Stop) == []
    for rank in (0, 1):
        post.hub.say(rank, "save", "commit", rank)
        post.now_s += 30
        post.hub.tick()
        assert post.heads(Stop) == []
    post.now_s += 1
    post.hub.tick()
    assert post.heads(Stop) == [0, 1, 2]
    for rank in range(3):
        post.hub.stopped(rank, "save")
    assert post.verdict().causes == {2: "did not come"}
    assert "rank 2 did not come to round 'commit' within 60 s" in post.verdict().text
    post.hub.say(2, "next", "plan", 2)  # it is at another call than the others now
    assert post.heads(Stop)[3:] == [0, 1, 2]


def test_who_does_not_stop_is_waited_for_from_the_failure_on() -> None:
    """What rank 0 answers afterwards is heard by nobody."""
    post = Post(3)
    decided(post)
    post.now_s = 1000.0
    post.hub.failed(2, "save", "ValueError: no")
    post.hub.stopped(1, "save")
    post.now_s += 60
    post.hub.tick()
    assert post.heads(End) == []
    post.now_s += 1
    post.hub.tick()
    assert post.verdict().causes == {0: "has not stopped within 60 s", 2: "ValueError: no"}
    assert not post.hub.answer("save", Same(None))
    assert post.heads(Answer) == []
    assert post.hub.num_sessions == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_who_leaves_before_a_round_fails_the_session_at_once(*, is_first: bool) -> None:
    """Whether others come to the round before or after; nobody waits until time is up."""
    post = Post(3)
    if is_first:
        post.hub.left(2, "save")
        assert post.heads(Stop) == []
    post.hub.say(1, "save", "plan", 1)
    if not is_first:
        post.hub.left(2, "save")
    assert {0, 1} <= {*post.heads(Stop)}
    for rank in (0, 1):
        post.hub.stopped(rank, "save")
    assert "rank 2 left before round 'plan'" in post.verdict().text
    assert post.heads(End) == [0, 1]


def test_who_comes_to_a_round_twice_fails_the_session() -> None:
    """The second message would be taken for one of the next round, or replace the first."""
    post = Post(2)
    for _ in range(2):
        post.hub.say(1, "save", "plan", 1)
    for rank in (0, 1):
        post.hub.stopped(rank, "save")
    assert "rank 1 came to a round before the last one was over" in post.verdict().text


def test_a_rank_that_is_lost_last_gives_the_others_their_verdict() -> None:
    """They have stopped and wait for it alone."""
    post = Post(3)
    post.hub.failed(1, "save", "ValueError: no")
    post.hub.stopped(0, "save")
    assert post.heads(End) == []
    post.hub.lose(2, "its connection ended")
    assert post.heads(End) == [0, 1]
    assert post.hub.num_sessions == 0


def test_the_cause_on_rank_0_is_told_however_many_there_are() -> None:
    """It decides for all: what a single process would be told is told by its class."""
    post = Post(100)
    for rank in reversed(range(100)):
        post.hub.failed(rank, "save", f"OSError: of rank {rank}")
    verdict = post.verdict()
    assert verdict.causes[0] == "OSError: of rank 0"
    assert len(verdict.causes) == MAX_CAUSES + 1
    assert f"and on {100 - MAX_CAUSES - 1} more" in verdict.text


def test_no_session_begins_when_calls_may_belong_together_no_more() -> None:
    """The first reason is what all hear. Sessions that have begun go on."""
    post = Post(2)
    post.hub.say(1, "load", "plan", 1)
    post.hub.part("ranks made different calls")
    post.hub.part("something else")
    post.hub.say(0, "load", "plan", 0)
    assert post.ready == {"load": [0, 1]}
    post.hub.say(1, "save", "plan", 1)
    assert post.heads(Stop) == [0, 1]
    for rank in (0, 1):
        post.hub.stopped(rank, "save")
    assert "ranks made different calls, so the calls of the ranks may" in post.verdict().text


def test_a_key_used_twice_fails_the_session() -> None:
    """A rank that comes back to what it has left is told so, and so are the others."""
    post = Post(2)
    post.hub.say(0, "save", "plan", 1)
    post.hub.say(1, "save", "plan", 1)
    post.hub.answer("save", [1, 1])
    post.hub.left(1, "save")
    post.hub.say(1, "save", "plan", 1)
    post.hub.stopped(0, "save")
    assert "rank 1 used the key twice" in post.verdict().text


def test_too_many_sessions_at_a_time_are_refused() -> None:
    """What is kept for ranks that have not come is bounded."""
    post = Post(2)
    for number in range(1100):
        post.hub.say(1, f"s{number}", "plan", 1)
    assert len(post.heads(Stop)) == 2 * (1100 - 1024)
    for number in range(1024, 1100):
        for rank in range(2):
            post.hub.stopped(rank, f"s{number}")
    assert post.hub.num_sessions == 1024


def test_ranks_and_causes_are_named_shortly() -> None:
    """Runs of ranks, equal causes together, a few at most."""
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 0, 1, 2]) == "ranks 0-2, 5"
    assert name_ranks(range(0, 100, 2)).endswith("28, 30 and 34 more")
    assert name_causes({4: "b", 0: "a", 1: "a"}) == "ranks 0-1: a; rank 4: b"
    assert name_causes({i: str(i) for i in range(20)}).endswith("rank 15: 15; and 4 more")


def test_hosts_are_sent_as_runs() -> None:
    """What each rank is sent grows with the hosts, not with the ranks."""
    hosts = ("a",) * 8 + ("b",) * 8 + ("a",)
    assert pack_hosts(hosts) == [("a", 8), ("b", 8), ("a", 1)]
    assert unpack_hosts(pack_hosts(hosts), 17) == hosts
    for runs, world_size in ([("a", 2)], 3), ([("a", -1), ("b", 4)], 3):
        with pytest.raises(ValueError, match="hosts of 3 ranks"):
            unpack_hosts(runs, world_size)
