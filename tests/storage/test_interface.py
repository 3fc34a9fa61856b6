"""What every storage keeps: files, objects, and the fake in memory pass the same tests."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from ckptio.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitConflictError,
    CorruptionError,
    StorageError,
)
from ckptio.storage.local import LocalStorage
from ckptio.storage.store import StoreTraits
from ckptio.storage.streams import AwaitedSink, AwaitedSource
from ckptio.testing import EventLog, MemoryBucket, MemoryStorage, MemoryStore
from tests.rig import (
    SAVE_IDS,
    SMALL,
    contents_of,
    fill_attempt,
    manifest_of,
    names_in,
    object_storage,
    page_aligned,
    read_files,
    write_files,
)

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path

    from ckptio.storage.interface import Storage

A, B, C = SAVE_IDS[:3]
pytestmark = pytest.mark.usefixtures("no_leaks", "no_tasks")


@dataclass(frozen=True)
class Place:
    """A storage, and a way to look behind it."""

    storage: Storage
    directory: Path | None
    bucket: MemoryBucket | None = None

    def names(self) -> list[str]:
        if self.bucket is not None:
            assert self.bucket.open_uploads == {}
            names = [key.rpartition("/")[2] for key in self.bucket.keys]
            return [name for name in names if name != "manifest.json"]
        if self.directory is None:
            assert isinstance(self.storage, MemoryStorage)
            return sorted(self.storage.files)
        if not self.directory.exists():
            return []
        return [name for name in names_in(self.directory) if name != "manifest.json"]

    def data_names(self) -> list[str]:
        """Without the mark in a store, which is the leading rank's to remove."""
        return [name for name in self.names() if not name.startswith(".attempt-")]


@pytest.fixture(params=["local", "memory", "objects", "objects without conditions"])
async def place(request: pytest.FixtureRequest, tmp_path: Path, executor: Executor) -> Place:
    if request.param == "memory":
        return Place(MemoryStorage("somewhere"), None)
    if request.param.startswith("objects"):
        is_good = request.param == "objects"
        traits = StoreTraits(conditional="atomic" if is_good else "none", in_order=not is_good)
        store = MemoryStore(traits=traits)
        return Place(object_storage(store), None, store.bucket)
    directory = tmp_path / "a" / "b"
    return Place(LocalStorage(str(directory), SMALL, executor, EventLog()), directory)


async def test_nothing_is_there_before_a_commit(place: Place) -> None:
    """Without a manifest there is no checkpoint, whatever files there are."""
    for read in (place.storage.version, place.storage.read_manifest):
        with pytest.raises(CheckpointNotFoundError):
            await read()
    attempt = await place.storage.begin(A, overwrite=False)
    await fill_attempt(attempt, contents_of(A, 5000))
    with pytest.raises(CheckpointNotFoundError):
        await place.storage.read_manifest()
    await attempt.abort()


async def test_what_was_written_is_read_back(place: Place) -> None:
    """Files of any size come back byte for byte, and so does the manifest."""
    contents = contents_of(A, 1, 4096, 4097, 50_001)
    await write_files(place.storage, A, contents)
    assert await read_files(place.storage) == contents
    assert (await place.storage.read_manifest())[1] == manifest_of(A, contents)
    assert await place.storage.sizes([*contents, "nothing"]) == [1, 4096, 4097, 50_001, None]
    assert place.names() == sorted(contents)


async def test_a_version_changes_with_the_manifest_and_only_then(place: Place) -> None:
    """The version of a read is that of a check, until the checkpoint is overwritten."""
    await write_files(place.storage, A, contents_of(A, 10))
    first, _ = await place.storage.read_manifest()
    assert await place.storage.version() == first
    assert (await place.storage.read_manifest())[0] == first
    await write_files(place.storage, B, contents_of(B, 10), overwrite=True)
    assert await place.storage.version() != first


async def test_a_version_changes_by_whatever_name_the_place_is_written_to() -> None:
    """Two names of a place in memory count its manifests together, as links of a directory do."""
    one = MemoryStorage("one")
    two = one.another_name("two")
    await write_files(one, A, contents_of(A, 10))
    first = await one.version()
    await write_files(two, B, contents_of(B, 10), overwrite=True)
    assert await one.version() == await two.version() != first


async def test_a_taken_place_is_refused_without_overwrite(place: Place) -> None:
    """`begin` says so at once, and changes nothing."""
    await write_files(place.storage, A, contents_of(A, 10))
    with pytest.raises(CheckpointExistsError):
        await place.storage.begin(B, overwrite=False)
    assert await read_files(place.storage) == contents_of(A, 10)


async def test_of_two_writers_without_overwrite_one_wins(place: Place) -> None:
    """Who commits second is told so; the first one's checkpoint stands."""
    one = await place.storage.begin(A, overwrite=False)
    two = await place.storage.begin(B, overwrite=False)
    await fill_attempt(one, contents_of(A, 10))
    await fill_attempt(two, contents_of(B, 10))
    await two.commit(manifest_of(B, contents_of(B, 10)))
    with pytest.raises(CommitConflictError):
        await one.commit(manifest_of(A, contents_of(A, 10)))
    await one.abort()
    assert await read_files(place.storage) == contents_of(B, 10)
    assert place.names() == sorted(contents_of(B, 10))


async def test_overwriting_keeps_the_old_until_the_commit(place: Place) -> None:
    """The old checkpoint is whole until the new one is there; then its files go."""
    old, new = contents_of(A, 10, 9000), contents_of(B, 20)
    await write_files(place.storage, A, old)
    attempt = await place.storage.begin(B, overwrite=True)
    assert await read_files(place.storage) == old
    await fill_attempt(attempt, new)
    assert await read_files(place.storage) == old
    await attempt.commit(manifest_of(B, new))
    assert await read_files(place.storage) == new
    assert place.names() == sorted(new)


async def test_writers_that_overwrite_each_other_leave_the_last(place: Place) -> None:
    """Three attempts at once with overwrite: the last to commit stands, and nothing else."""
    attempts = {i: await place.storage.begin(i, overwrite=True) for i in (A, B, C)}
    for save_id, attempt in attempts.items():
        await fill_attempt(attempt, contents_of(save_id, 5000))
    for save_id in (B, A, C):
        await attempts[save_id].commit(manifest_of(save_id, contents_of(save_id, 5000)))
        assert await read_files(place.storage) == contents_of(save_id, 5000)
    assert place.names() == sorted(contents_of(C, 5000))


async def test_an_aborted_attempt_leaves_nothing(place: Place) -> None:
    """Half-written files go, and aborting twice does no harm."""
    attempt = await place.storage.begin(A, overwrite=False)
    sink = await attempt.create(next(iter(contents_of(A, 1))), 100_000)
    if isinstance(sink, AwaitedSink):
        await sink.write(0, memoryview(bytes(SMALL.slab_nbytes)))
    else:
        with page_aligned(bytes(8192)) as view:
            sink.pwrite(8192, view)
    await attempt.abort()
    await attempt.abort()
    assert place.names() == []
    assert place.directory is None or not place.directory.parent.exists()


async def test_aborting_after_the_commit_does_nothing(place: Place) -> None:
    """A late abort takes nothing away."""
    attempt = await place.storage.begin(A, overwrite=False)
    await fill_attempt(attempt, contents_of(A, 10))
    await attempt.commit(manifest_of(A, contents_of(A, 10)))
    await attempt.abort()
    assert await read_files(place.storage) == contents_of(A, 10)


async def test_a_file_that_went_away_means_the_checkpoint_changed(place: Place) -> None:
    """Opening what the manifest named and nobody has any more is told apart from damage."""
    with pytest.raises(CheckpointChangedError):
        source = await place.storage.open("data", 10)
        assert isinstance(source, AwaitedSource)  # it opens nothing, and so finds out later
        await source.read_into(0, memoryview(bytearray(10)))


async def test_reading_past_the_end_is_damage(place: Place) -> None:
    """A file that ends too soon raises `CorruptionError`, and does not hang."""
    contents = contents_of(A, 5000)
    await write_files(place.storage, A, contents)
    source = await place.storage.open(next(iter(contents)), 20_000)
    if isinstance(source, AwaitedSource):
        for start in (0, 8192):
            with pytest.raises(CorruptionError, match="ends at byte 5000"):
                await source.read_into(start, memoryview(bytearray(8192)))
        return
    try:
        with page_aligned(bytes(16384)) as room:
            with pytest.raises(CorruptionError):
                source.pread_into(0, room, 16384)
            with pytest.raises(CorruptionError):
                source.pread_into(8192, room, 4096)
    finally:
        source.close()


def rank_files(save_id: str, rank: int) -> dict[str, bytes]:
    return {
        name.replace("-00000-", f"-{rank:05d}-", 1): data
        for name, data in contents_of(save_id, 5000, 70).items()
    }


async def test_ranks_write_one_checkpoint(place: Place) -> None:
    """Files of a rank that joined are part of what the leading rank commits."""
    leader = await place.storage.begin(A, overwrite=False)
    member = await place.storage.join(A)
    files = [rank_files(A, rank) for rank in range(2)]
    await fill_attempt(leader, files[0])
    await fill_attempt(member, files[1])
    await member.seal()
    await leader.commit(manifest_of(A, {**files[0], **files[1]}))
    await member.leave()
    await member.abort()
    assert place.names() == sorted([*files[0], *files[1]])
    assert await read_files(place.storage) == {**files[0], **files[1]}


async def test_a_member_may_be_ahead_of_the_leader(place: Place) -> None:
    """A rank that joins first makes what it needs, and the leading rank leaves it alone."""
    member = await place.storage.join(A)
    await fill_attempt(member, rank_files(A, 1))
    leader = await place.storage.begin(A, overwrite=False)
    assert set(rank_files(A, 1)) <= set(place.names())
    await member.abort()
    await leader.abort()
    assert place.data_names() == []


async def test_the_leader_clears_up_behind_dead_ranks(place: Place) -> None:
    """Files of a rank that died before it could remove them go with the leader's."""
    leader = await place.storage.begin(A, overwrite=False)
    member = await place.storage.join(A)
    await fill_attempt(member, rank_files(A, 1))
    await member.leave()
    await leader.abort()
    assert place.names() == []


async def test_leaving_removes_nothing(place: Place) -> None:
    """A rank that does not know how a save ended leaves its files to who does."""
    member = await place.storage.join(A)
    await fill_attempt(member, rank_files(A, 1))
    await member.leave()
    assert place.data_names() == sorted(rank_files(A, 1))


@pytest.mark.parametrize("resumes", [False, True])
async def test_who_has_left_removes_nothing_later(place: Place, *, resumes: bool) -> None:
    """Not even the rank that leads: somebody may go on with the files by then."""
    leader = await place.storage.begin(A, overwrite=False, resumes=resumes)
    member = await place.storage.join(A)
    for rank, attempt in enumerate((leader, member)):
        await fill_attempt(attempt, rank_files(A, rank))
    for attempt in (leader, member):
        await attempt.leave()
        await attempt.abort()
    assert place.data_names() == sorted([*rank_files(A, 0), *rank_files(A, 1)])


@pytest.mark.parametrize("place", ["local"], indirect=True)
async def test_files_of_ranks_of_another_job_get_an_hour(place: Place) -> None:
    """Files of a rank whose leader has not begun yet are no leftovers to another save."""
    assert place.directory is not None
    member = await place.storage.join(A)
    await fill_attempt(member, rank_files(A, 1))
    await write_files(place.storage, B, contents_of(B, 100), overwrite=True)
    assert set(rank_files(A, 1)) < set(place.names())
    for name in rank_files(A, 1):
        os.utime(place.directory / name, (0, 0))
    await write_files(place.storage, C, contents_of(C, 100), overwrite=True)
    assert place.names() == sorted(contents_of(C, 100))
    await member.leave()


@pytest.mark.parametrize("place", ["local"], indirect=True)
async def test_sealing_notices_a_file_that_was_removed(place: Place) -> None:
    """A rank does not vouch for files that somebody has removed meanwhile."""
    assert place.directory is not None
    member = await place.storage.join(A)
    await fill_attempt(member, rank_files(A, 1))
    (place.directory / next(iter(rank_files(A, 1)))).unlink()
    with pytest.raises(StorageError, match="end the files"):
        await member.seal()
    await member.abort()


@pytest.mark.parametrize("commits", [True, False])
async def test_a_directory_that_the_end_of_another_save_took_along_is_made_again(
    place: Place, *, commits: bool
) -> None:
    """A rank that is in the next save already writes on, while others end the one that failed."""
    failed = await place.storage.join(A)
    member = await place.storage.join(B)
    await failed.abort()
    if place.directory is not None:
        assert not place.directory.parent.exists()
    await fill_attempt(member, rank_files(B, 1))
    await member.seal()
    if commits:
        leader = await place.storage.begin(B, overwrite=False)
        await leader.commit(manifest_of(B, rank_files(B, 1)))
        await member.leave()
        assert await read_files(place.storage) == rank_files(B, 1)
    else:
        await member.abort()
        assert place.data_names() == []
        if place.directory is not None:
            assert not place.directory.parent.exists()


async def test_a_rank_without_files_has_its_directory_when_it_seals(place: Place) -> None:
    """Another save's end took it along; this one's commit may come at once."""
    failed = await place.storage.join(A)
    member = await place.storage.join(B)
    await failed.abort()
    await member.seal()
    assert place.directory is None or place.directory.is_dir()
    await member.abort()
    assert place.directory is None or not place.directory.parent.exists()
