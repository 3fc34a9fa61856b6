from __future__ import annotations

import dataclasses
import errno
import itertools
from typing import TYPE_CHECKING, Any, cast

import pytest

from ckptio.errors import CheckpointNotFoundError, ConfigError, FormatError, StorageError
from ckptio.events import CleanupFailed, LeftoversRemoved
from ckptio.format.pointer import encode_pointer, pointed_name
from ckptio.format.summary import decode_summary
from ckptio.storage.file_names import NOTE_PREFIX, QUIET_S
from ckptio.storage.object_root import ObjectRoot
from ckptio.storage.objects import ObjectStorage
from ckptio.storage.root import resolve_root
from ckptio.storage.root_interface import Found
from ckptio.storage.store import (
    ConditionFailedError,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    StoreError,
    TransientError,
    UploadInfo,
)
from ckptio.storage.stores import Stores
from ckptio.testing import Crash, EventLog, run_virtual
from tests.rig import SAVE_IDS, SMALL, config_with, contents_of, manifest_of
from tests.storage.object_rig import DictStore, OneStore, Opened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptio._threads import Threads

pytestmark = pytest.mark.usefixtures("no_leaks")
OLD = QUIET_S + 100
CONTENTS = contents_of(SAVE_IDS[0], 5000, 70_000)


def root_at(
    store: DictStore, threads: Threads, log: EventLog | None = None, max_requests: int = 16
) -> ObjectRoot:
    opened = cast("Any", Opened(store, max_requests))
    config = config_with(max_requests=max_requests)
    return ObjectRoot("dict://run", opened, "run/", config, threads, log or EventLog())


def write(
    store: DictStore, name: str, save_id: str = SAVE_IDS[0], *, is_pointed: bool = False
) -> None:
    """Put a checkpoint there; one whose manifest is pointed to, if wanted."""
    contents = contents_of(save_id, 5000, 70_000)
    for file, data in contents.items():
        store.set(f"run/{name}/{file}", data)
    commit = manifest_of(save_id, contents)
    if is_pointed:
        store.set(f"run/{name}/{pointed_name(save_id)}", commit)
        commit = encode_pointer(save_id, commit)
    store.set(f"run/{name}/manifest.json", commit)


def begin(store: DictStore, name: str, save_id: str = SAVE_IDS[1], age_s: float = 0.0) -> None:
    """Put there what a save leaves that is killed before its commit."""
    for file, data in contents_of(save_id, 5000).items():
        store.set(f"run/{name}/{file}", data, age_s)
    store.set(f"run/{name}/.attempt-{save_id}", b"", age_s)
    file = f"run/{name}/data-{save_id}-00000-00007.safetensors"
    store.begun.append(
        UploadInfo(
            key=file,
            upload_id="1",
            active_s=store.infos[f"run/{name}/.attempt-{save_id}"].modified_s,
        )
    )


def whole(store: DictStore, name: str, save_id: str = SAVE_IDS[0]) -> bool:
    """Whether a checkpoint is there, with all its files."""
    contents = contents_of(save_id, 5000, 70_000)
    return store.objects.get(f"run/{name}/manifest.json") == manifest_of(save_id, contents) and all(
        store.objects.get(f"run/{name}/{file}") == contents[file] for file in contents
    )


async def test_a_root_lists_prefixes_and_which_are_committed(threads: Threads) -> None:
    """Objects beside them are none; a root where nothing is, is empty."""
    store = DictStore()
    root = root_at(store, threads)
    assert await root.find() == []
    write(store, "b")
    begin(store, "a")
    store.set("run/notes.txt", b"mine")
    store.set("runs/c/manifest.json", b"another root's")
    first, second = await root.find()
    assert first == Found(name="a", version=None)
    assert second.name == "b"
    assert second.version is not None
    write(store, "b", SAVE_IDS[2])
    assert (await root.find())[1].version not in (None, second.version)
    assert [found.name for found in await root.find(lambda name: name == "b")] == ["b"]
    assert root.join("b") == "dict://run/b"
    assert await root.read_manifest("b") == store.objects["run/b/manifest.json"]
    with pytest.raises(CheckpointNotFoundError):
        await root.read_manifest("a")


def decode(_: str, data: bytes) -> bytes:
    decode_summary(data)
    return data


async def test_what_cannot_be_looked_at_is_an_error_or_told_of(threads: Threads) -> None:
    """Never for not being there; who wants the others gets them."""
    store, unseen = DictStore(), dict[str, StorageError]()
    for name in ("a", "b"):
        write(store, name)

    def refuse(_: str, key: str) -> None:
        if key == "run/a/manifest.json":
            raise RefusedError("no")

    store.on_request = refuse
    root = root_at(store, threads)
    with pytest.raises(StorageError):
        await root.find()
    assert [found.name for found in await root.find(unseen=unseen.__setitem__)] == ["b"]
    assert list(unseen) == ["a"]
    store.set("run/c/manifest.json", b"{}")
    refused, data, damaged = await root.read_manifests(["a", "b", "c"], decode)
    assert type(refused) is StorageError
    assert data == store.objects["run/b/manifest.json"]
    assert type(damaged) is FormatError


async def test_manifests_are_looked_at_a_few_at_a_time(threads: Threads) -> None:
    """As many as there may be requests, in one listing."""
    store = DictStore()
    for number in range(40):
        write(store, f"step-{number:02}")
    assert len(await root_at(store, threads, max_requests=4).find()) == 40
    assert store.most_at_once == 4
    assert [kind for kind, _ in store.log].count("list") == 1
    store.most_at_once = 0
    assert len(await root_at(store, threads, max_requests=4).find(aside=True)) == 40
    assert store.most_at_once == 2  # half of them: a load that begins meanwhile has the others
    store.most_at_once = 0
    names = [f"step-{number:02}" for number in range(40)]
    root = root_at(store, threads, max_requests=4)
    assert len(await root.read_manifests(names, lambda name, _: name, aside=True)) == 40
    assert store.most_at_once == 2


async def test_a_checkpoint_is_removed_manifest_first(threads: Threads) -> None:
    """Then data, and last what lists it; nothing else goes."""
    store = DictStore()
    write(store, "a")
    write(store, "b")
    store.set("run/a/notes.txt", b"mine")
    root = root_at(store, threads)
    await root.remove("a")
    gone = [key.removeprefix("run/a/") for kind, key in store.log if kind == "delete"]
    assert gone[0] == "manifest.json"
    assert gone[-1] == f".manifest-{SAVE_IDS[0]}-old"
    assert sorted(gone[1:-1]) == sorted(CONTENTS)
    assert [key for key in store.objects if key.startswith("run/a/")] == ["run/a/notes.txt"]
    assert whole(store, "b")
    with pytest.raises(CheckpointNotFoundError):
        await root.remove("a")


@pytest.mark.parametrize("is_pointed", [False, True])
async def test_another_save_than_the_one_that_goes_stays(
    threads: Threads, *, is_pointed: bool
) -> None:
    """It was committed there after it was decided that the one before it goes."""
    store = DictStore()
    write(store, "a", is_pointed=is_pointed)
    root, before = root_at(store, threads), dict(store.objects)
    with pytest.raises(StorageError, match="another save was committed there"):
        await root.remove("a", SAVE_IDS[1])
    assert store.objects == before
    await root.remove("a", SAVE_IDS[0])
    assert not store.objects


@pytest.mark.parametrize("is_pointed", [False, True])
@pytest.mark.parametrize("effect", ["before", "after"])
async def test_a_removal_that_is_killed_leaves_a_checkpoint_or_none(
    threads: Threads, effect: str, *, is_pointed: bool
) -> None:
    """Before or after any request; the next sweep removes at once what is left."""
    for number in itertools.count():
        store = DictStore()
        write(store, "a", is_pointed=is_pointed)
        files = dict(store.objects)
        kill_at(store, number, effect)
        try:
            await root_at(store, threads).remove("a")
        except Crash:
            pass
        else:
            break
        store.on_request = lambda _kind, _key: None
        is_there = files.items() <= store.objects.items()
        assert is_there or "run/a/manifest.json" not in store.objects
        await root_at(store, threads).sweep("a", 1)
        assert (files.items() <= store.objects.items()) == is_there
        assert is_there or not store.objects
        await root_at(store, threads).find()
    assert number > 6


def kill_at(store: DictStore, number: int, effect: str) -> None:
    """Let nothing happen from a request on; with `"after"` that one still does."""
    count = itertools.count()

    def kill(kind: str, key: str) -> None:
        this = next(count)
        if this == number and effect == "after":
            carry_out(store, kind, key)
        if this >= number:
            raise Crash

    store.on_request = kill


def carry_out(store: DictStore, kind: str, key: str) -> None:
    if kind == "delete":
        store.objects.pop(key, None)
    elif kind == "put":  # the only object that a removal writes
        store.set(key, store.objects["run/a/manifest.json"])


async def test_a_request_that_is_refused_leaves_a_checkpoint_or_none(threads: Threads) -> None:
    """Whichever it is; what stays is an event, and goes with the next sweep."""
    for number in itertools.count():
        store, log = DictStore(), EventLog()
        write(store, "a")
        count = itertools.count()

        def refuse(_kind: str, _key: str, number: int = number, count: Any = count) -> None:
            if next(count) == number:
                raise RefusedError("no")

        store.on_request = refuse
        try:
            await root_at(store, threads, log).remove("a")
        except StorageError:
            assert whole(store, "a")
            assert len(store.objects) == 3
        else:
            assert "run/a/manifest.json" not in store.objects
            if store.objects:
                assert log.of(CleanupFailed)
                await root_at(store, threads).sweep("a", 1)
            assert not store.objects
        if next(count) <= number:
            break
    assert number > 6


def test_a_removal_whose_answer_is_lost_is_tried_again(threads: Threads) -> None:
    """Removing what is gone is no error."""
    store = DictStore()
    write(store, "a")
    seen: set[tuple[str, str]] = set()

    def lose(kind: str, key: str) -> None:
        if (kind, key) not in seen:
            seen.add((kind, key))
            carry_out(store, kind, key)
            raise TransientError("no answer")

    store.on_request = lose
    run_virtual(root_at(store, threads).remove("a"), seed=0)
    assert not store.objects


async def test_a_checkpoint_that_was_replaced_meanwhile_stays(threads: Threads) -> None:
    """What was read is removed, and nothing that came later."""
    store = DictStore()
    write(store, "a")

    def overtake(kind: str, key: str) -> None:
        if kind == "put" and key.endswith("-old"):
            write(store, "a", SAVE_IDS[2])

    store.on_request = overtake
    with pytest.raises(StorageError, match="just now"):
        await root_at(store, threads).remove("a")
    assert whole(store, "a", SAVE_IDS[2])
    assert not [key for key in store.objects if key.endswith("-old")]


@pytest.mark.parametrize("is_carried_out", [True, False])
def test_a_removal_that_is_tried_again_looks_again(
    threads: Threads, *, is_carried_out: bool
) -> None:
    """A save that was committed between the tries stays, whatever became of the first."""
    store = DictStore()
    write(store, "a")
    tries: list[str] = []

    def overtake(kind: str, key: str) -> None:
        if kind == "delete" and key.endswith("manifest.json"):
            tries.append(key)
            if is_carried_out:
                carry_out(store, kind, key)
            write(store, "a", SAVE_IDS[2])
            raise TransientError("no answer")

    store.on_request = overtake
    with pytest.raises(StorageError, match="just now"):
        run_virtual(root_at(store, threads).remove("a"), seed=0)
    assert len(tries) == 1
    assert whole(store, "a", SAVE_IDS[2])
    assert not [key for key in store.objects if key.endswith("-old")]


@pytest.mark.parametrize("is_pointed", [False, True])
async def test_what_a_late_request_may_bring_back_is_whole(
    threads: Threads, *, is_pointed: bool
) -> None:
    """Its save left a mark: files go when that is quiet, and the manifest at once, each time."""
    store = DictStore()
    write(store, "a", is_pointed=is_pointed)
    store.set(f"run/a/.attempt-{SAVE_IDS[0]}", b"")
    files = dict(store.objects)
    root = root_at(store, threads)
    for _ in range(2):
        assert await root.remove("a") == sum(map(len, CONTENTS.values()))
        await root.sweep("a", 1)
        assert (await root.find())[0].version is None
        store.set("run/a/manifest.json", files["run/a/manifest.json"])  # it comes back
        await root.sweep("a", 1)
        assert files.items() <= store.objects.items()
        assert await root.read_manifest("a") == manifest_of(SAVE_IDS[0], CONTENTS)
    await root.remove("a")
    store.age(OLD)
    await root.sweep("a", 1)
    assert not store.objects


class Timeless(DictStore):
    """Tells no times."""

    def set(self, key: str, data: bytes, age_s: float = 0.0) -> None:
        super().set(key, data, age_s)
        self.infos[key] = dataclasses.replace(self.infos[key], modified_s=0.0)

    def age(self, seconds: float) -> None:
        del seconds


@pytest.mark.parametrize("kind", [DictStore, Timeless])
async def test_what_can_come_back_no_more_goes_at_once(
    threads: Threads, kind: type[DictStore]
) -> None:
    """The mark of a save of long ago goes with it, and its note; so where nobody knows of when."""
    store = kind()
    write(store, "a")
    store.set(f"run/a/.attempt-{SAVE_IDS[0]}", b"")
    store.set(f"run/a/{NOTE_PREFIX}{SAVE_IDS[0]}", b"copied")
    store.age(OLD)
    await root_at(store, threads).remove("a")
    assert not store.objects


async def test_of_two_removals_one_is_the_first(threads: Threads) -> None:
    """The other is told that there is nothing, and nothing is left."""
    store = DictStore()
    write(store, "a")

    def overtake(kind: str, key: str) -> None:
        if kind == "head":
            store.objects.pop(key, None)

    store.on_request = overtake
    with pytest.raises(CheckpointNotFoundError):
        await root_at(store, threads).remove("a")
    assert not store.objects


async def test_a_manifest_that_is_pointed_to_is_read_and_goes(threads: Threads) -> None:
    """After what it lists, and before what points to it."""
    store = DictStore()
    write(store, "a", is_pointed=True)
    root = root_at(store, threads)
    assert await root.read_manifest("a") == manifest_of(SAVE_IDS[0], CONTENTS)
    nbytes = await root.remove("a")
    assert nbytes == sum(map(len, CONTENTS.values()))
    gone = [key.removeprefix("run/a/") for kind, key in store.log if kind == "delete"]
    assert gone[-2:] == [pointed_name(SAVE_IDS[0]), f".manifest-{SAVE_IDS[0]}-old"]
    assert not store.objects
    write(store, "a", is_pointed=True)
    del store.objects[f"run/a/{pointed_name(SAVE_IDS[0])}"]
    with pytest.raises(FormatError):
        await root.remove("a")
    assert len(store.objects) == 3


async def test_what_cannot_be_read_is_not_removed(threads: Threads) -> None:
    """A damaged manifest, or one of a newer version."""
    store = DictStore()
    write(store, "a")
    store.set("run/a/manifest.json", b"{}")
    with pytest.raises(FormatError):
        await root_at(store, threads).remove("a")
    assert len(store.objects) == 3


async def test_a_dead_save_is_swept_after_an_hour(threads: Threads) -> None:
    """Of the store's time, with its uploads; other people's objects stay."""
    store, log = DictStore(), EventLog()
    begin(store, "a")
    store.set("run/a/notes.txt", b"mine", 10 * OLD)
    root = root_at(store, threads, log=log)
    await root.sweep("a", 1)
    assert len(store.objects) == 3
    store.age(OLD)
    await root.sweep("a", 10 * OLD)
    assert len(store.objects) == 3
    await root.sweep("a", 1)
    assert list(store.objects) == ["run/a/notes.txt"]
    assert store.begun == []
    (event,) = log.of(LeftoversRemoved)
    assert len(event.files) == 2


async def test_a_dead_save_is_swept_where_uploads_may_not_be_listed(threads: Threads) -> None:
    """Its objects; that its uploads stay is an event. One that is out of reach is an error."""
    store, log = DictStore(), EventLog()
    begin(store, "a", age_s=OLD)
    failure: StoreError = RefusedError("AccessDenied (403)")

    def refuse(kind: str, _key: str) -> None:
        if kind == "uploads":
            raise failure

    store.on_request = refuse
    await root_at(store, threads, log=log).sweep("a", 1)
    assert list(store.objects) == []
    for event in log.of(CleanupFailed):
        assert "cannot list uploads below 'run/a/': AccessDenied (403)" in str(event.error)
    assert log.of(CleanupFailed)
    begin(store, "b", age_s=OLD)
    failure = ConditionFailedError("who knows")
    with pytest.raises(StorageError, match="who knows"):
        await root_at(store, threads).sweep("b", 1)
    assert len(store.objects) == 2


@pytest.mark.parametrize("failure", [ConditionFailedError("odd"), ObjectMissingError("odd")])
async def test_a_listing_that_is_answered_oddly_is_an_error_of_ours(
    threads: Threads, failure: StoreError
) -> None:
    """A wrong endpoint may answer a listing as if it were an object."""
    store = DictStore()

    def refuse(kind: str, _key: str) -> None:
        if kind == "list":
            raise failure

    store.on_request = refuse
    with pytest.raises(StorageError, match="cannot list 'run/': odd"):
        await root_at(store, threads).find()


@pytest.mark.parametrize("skew_s", [-10 * OLD, 10 * OLD])
async def test_clocks_that_differ_remove_no_living_save(threads: Threads, skew_s: float) -> None:
    """Times of the store are compared with each other."""
    store = DictStore()
    store.skew_s = skew_s
    begin(store, "a")
    await root_at(store, threads).sweep("a", 1)
    assert len(store.objects) == 2
    assert len(store.begun) == 1


@pytest.mark.parametrize("kind", ["mark", "data", "upload", "unknown"])
async def test_a_save_of_which_something_is_new_is_alive(threads: Threads, kind: str) -> None:
    """One sign of life is enough, and so is not to know."""
    store = DictStore()
    begin(store, "a")
    now_s = store.infos[f"run/a/.attempt-{SAVE_IDS[1]}"].modified_s
    store.age(OLD)
    if kind == "mark":
        store.set(f"run/a/.attempt-{SAVE_IDS[1]}", b"")
    elif kind == "data":
        store.set(f"run/a/data-{SAVE_IDS[1]}-00001-00000.safetensors", b"x")
    elif kind == "upload":
        store.begun = [UploadInfo(key=store.begun[0].key, upload_id="1", active_s=now_s)]
    else:
        store.age(store.infos[f"run/a/.attempt-{SAVE_IDS[1]}"].modified_s)
    before = list(store.objects)
    await root_at(store, threads).sweep("a", 1)
    assert list(store.objects) == before
    assert len(store.begun) == 1


async def test_a_save_that_commits_during_a_sweep_stays(threads: Threads) -> None:
    """The listing comes first, and the manifest is looked for then."""
    store = DictStore()
    begin(store, "a", age_s=OLD)

    def overtake(kind: str, _key: str) -> None:
        if kind == "uploads":
            write(store, "a", SAVE_IDS[1])

    store.on_request = overtake
    await root_at(store, threads).sweep("a", 1)
    assert whole(store, "a", SAVE_IDS[1])


async def test_where_nothing_is_ours_nothing_is_written(threads: Threads) -> None:
    """Not even to ask for the time."""
    store = DictStore()
    store.set("run/a/notes.txt", b"mine", OLD)
    write(store, "b")
    for name in ("a", "b", "c"):
        await root_at(store, threads).sweep(name, 1)
    assert {kind for kind, _ in store.log} <= {"list", "uploads", "head"}


@pytest.mark.parametrize("url", ["nope://run", "s3://key:secret@bucket/run"])
async def test_a_url_that_nobody_knows_is_refused(threads: Threads, url: str) -> None:
    """Without its credentials in the message."""
    with pytest.raises(ConfigError) as caught:
        resolve_root(url, SMALL, threads, EventLog(), Stores(SMALL, threads))
    assert "secret" not in str(caught.value)


async def test_one_wrong_answer_removes_nothing(threads: Threads) -> None:
    """A manifest that is listed is there, whatever a look at it says; also for who removes it."""
    store, log = DictStore(), EventLog()
    write(store, "a")
    store.age(OLD)
    before = dict(store.objects)

    def lie(kind: str, key: str) -> None:
        if kind == "head" and key.endswith("manifest.json"):
            raise ObjectMissingError(key)

    store.on_request = lie
    await root_at(store, threads, log=log).sweep("a", 1)
    with pytest.raises(CheckpointNotFoundError):
        await root_at(store, threads, log=log).remove("a")
    assert {key: store.objects[key] for key in before} == before
    store.on_request = lambda _kind, _key: None
    await root_at(store, threads, log=log).remove("a")
    assert store.objects == {}


async def test_what_was_taken_up_meanwhile_is_not_swept(threads: Threads) -> None:
    """Who goes on with a save marks it first: it is looked at twice."""
    store = DictStore()
    begin(store, "a", age_s=OLD)
    before = dict(store.objects)
    lists = 0

    def take_up(kind: str, _key: str) -> None:
        nonlocal lists
        lists += kind == "list"
        if kind == "list" and lists == 2:
            store.set(f"run/a/.attempt-{SAVE_IDS[1]}", b"")

    store.on_request = take_up
    await root_at(store, threads).sweep("a", 1)
    assert lists == 2
    assert before.items() <= store.objects.items()


async def test_what_is_below_is_named_as_far_as_that_costs_little() -> None:
    """One listing, and a look at its last names; whatever fails there is no error."""
    store = DictStore()

    def storage(url: str) -> ObjectStorage:
        opened, prefix = OneStore(store).at(url)
        return ObjectStorage(url, cast("Any", opened), prefix, SMALL, EventLog())

    assert await storage("dict://run").find_below() == ""
    for name in "abcdefg":
        write(store, name)
    begin(store, "h")
    store.set("run/x", b"an object")
    store.log.clear()
    assert await storage("dict://run").find_below() == "g"
    kinds = [kind for kind, _ in store.log]
    assert (kinds.count("list"), kinds.count("head"), len(kinds)) == (1, 4, 5)
    assert await storage("dict://run/g").find_below() == ""
    for name in "klmn":
        begin(store, name)
    assert await storage("dict://run").find_below() == ""  # a listing says no more

    write(store, "o")
    for at, error in (("list", RefusedError("no")), ("list", OSError()), ("head", ValueError())):

        def fail(kind: str, _: str, at: str = at, error: Exception = error) -> None:
            if kind == at:
                raise error

        store.on_request = fail
        assert await storage("dict://run").find_below() == ""


async def test_a_removal_that_was_carried_out_and_refused_is_finished_by_a_sweep(
    threads: Threads,
) -> None:
    """What lists the files stays, where the manifest went all the same."""
    store = DictStore()
    write(store, "a")

    def refuse(kind: str, key: str) -> None:
        if kind == "delete" and key.endswith("manifest.json"):
            carry_out(store, kind, key)
            raise RefusedError("odd")

    store.on_request = refuse
    with pytest.raises(StorageError, match="odd"):
        await root_at(store, threads).remove("a")
    assert [key for key in store.objects if key.endswith("-old")]
    await root_at(store, threads).sweep("a", 1)
    assert store.objects == {}


class Behind(DictStore):
    """Its listings do not have a manifest yet."""

    async def list(self, prefix: str) -> list[ObjectInfo]:
        found = await super().list(prefix)
        return [info for info in found if not info.key.endswith("manifest.json")]


async def test_a_checkpoint_that_is_not_listed_yet_is_not_swept(threads: Threads) -> None:
    """It is looked for by its name, too."""
    store = Behind()
    write(store, "a")
    store.age(OLD)
    await root_at(store, threads).sweep("a", 1)
    assert whole(store, "a")


async def test_a_removal_that_cannot_be_understood_stays_and_is_told_of(threads: Threads) -> None:
    """What lists its files is of a newer version, say."""
    store, log = DictStore(), EventLog()
    tomb = f".manifest-{SAVE_IDS[0]}-old"
    store.set(f"run/a/{tomb}", b"of a newer version")
    await root_at(store, threads, log).sweep("a", 1)
    assert [*store.objects] == [f"run/a/{tomb}"]
    (event,) = log.of(CleanupFailed)
    assert (event.file, event.error.errno) == (tomb, errno.EBADMSG)


class Strict(DictStore):
    """Says of what it is to remove that it is not there, as file systems do."""

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._info(key)
        await super().delete(keys)


async def test_a_file_that_somebody_else_removed_keeps_nothing(threads: Threads) -> None:
    """It is gone: that is what was wanted."""
    store, log = Strict(), EventLog()
    write(store, "a")
    del store.objects[f"run/a/{next(iter(CONTENTS))}"]
    await root_at(store, threads, log).remove("a")
    assert store.objects == {}
    assert not log.of(CleanupFailed)
