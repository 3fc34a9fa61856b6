"""Stores are opened at the first use, and that ends, too."""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import TYPE_CHECKING, Any

import pytest

from ckptio._threads import Threads
from ckptio.errors import StorageError
from ckptio.storage import options
from ckptio.storage.stores import OpenStore, Stores, open_stores
from ckptio.testing import MemoryBackend, MemoryStore, run_virtual
from tests.rig import config_with
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ckptio.storage.store import ObjectStore

pytestmark = pytest.mark.usefixtures("no_leaks")


class SlowBackend(MemoryBackend):
    """Its server does not answer, some of the time.

    Attributes:
        stalls: Whether it does not.
    """

    stalls = True

    async def open(self, *arguments: Any) -> MemoryStore:
        if self.stalls:
            await asyncio.get_running_loop().create_future()
        return await super().open(*arguments)


@pytest.mark.parametrize(("request_timeout_s", "said"), [(3.0, 30), (70.0, 70)])
def test_opening_a_store_ends_in_time(request_timeout_s: float, said: int) -> None:
    """With an error that says so; and whoever comes later may have it.

    What imports a client beside others that do so needs longer than a request.
    """

    async def scenario(executor: Executor) -> None:
        backend = SlowBackend(MemoryStore())
        config = config_with(request_timeout_s=request_timeout_s)
        opened = OpenStore("web", "http://a/b?signature=c", backend, {}, config, executor)
        with pytest.raises(StorageError, match=f"no answer within {said} s") as caught:
            await opened.get()
        assert str(caught.value).endswith("'http://a/b?...'")
        backend.stalls = False
        store: ObjectStore = (await opened.get())[0]
        assert await store.list("") == []

    run_virtual(scenario(None), seed=0)  # type: ignore[arg-type]  # nothing runs on it


class NotClosing(MemoryStore):
    """Its end fails."""

    async def close(self) -> None:
        raise RuntimeError("the connection is gone")


def test_a_store_that_cannot_be_closed_keeps_no_other_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever comes first."""

    async def scenario(number: int) -> None:
        made = [MemoryStore(), MemoryStore(), MemoryStore()]
        made[number] = NotClosing()
        backends = {f"m{i}": MemoryBackend(store) for i, store in enumerate(made)}
        monkeypatch.setattr(
            "ckptio.storage.stores.find_backend", lambda protocol, _: backends[protocol]
        )
        stores = Stores(config_with(), None)  # type: ignore[arg-type]  # nothing runs on it
        for protocol in backends:
            await stores.at(f"{protocol}://a")[0].get()
        with pytest.raises(RuntimeError, match="the connection is gone"):
            await stores.close()
        assert [store.is_closed for store in made] == [i != number for i in range(3)]

    for number in range(3):
        run_virtual(scenario(number), seed=0)


def test_what_is_installed_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each checkpoint: there may be hundreds of packages, and of steps."""
    looked: list[str] = []

    def look(*, group: str) -> importlib.metadata.EntryPoints:
        looked.append(group)
        return importlib.metadata.entry_points(group=group)

    monkeypatch.setattr(options, "entry_points", look)
    monkeypatch.syspath_prepend("nowhere")
    config = config_with(storage_options={"memory": {"use_listings_cache": False}})
    with Threads(1, "test") as threads:
        stores = Stores(config, threads)
        for step in range(3):
            stores.at(f"memory://run/step-{step}")
    assert looked == ["ckptio.backends"]


class CountingBackend(MemoryBackend):
    """Takes a while to open a store, and counts.

    Attributes:
        num_opened: How many it has opened.
    """

    num_opened = 0

    async def open(self, *arguments: Any) -> MemoryStore:
        self.num_opened += 1
        await asyncio.sleep(1)
        return await super().open(*arguments)


@in_virtual_time
async def test_who_comes_while_a_store_is_opened_gets_that_one() -> None:
    """Of two, one would never be closed."""
    backend = CountingBackend(MemoryStore())
    opened = OpenStore("m", "memory://a", backend, {}, config_with(), None)  # type: ignore[arg-type]  # nothing runs on it
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(opened.get()) for _ in range(3)]
    assert len({id(task.result()[0]) for task in tasks}) == 1
    assert backend.num_opened == 1
    await opened.get()
    assert backend.num_opened == 1


async def test_stores_without_an_engine_are_closed_with_their_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where what was done with them fails."""
    store = MemoryStore()
    monkeypatch.setattr("ckptio.storage.stores.find_backend", lambda *_: MemoryBackend(store))
    with pytest.raises(ZeroDivisionError):
        async with open_stores(config_with(), "stores") as (threads, stores):
            await stores.at("m://a")[0].get()
            threads.submit(int).result()
            raise ZeroDivisionError
    assert store.is_closed
    with pytest.raises(RuntimeError):
        threads.submit(int)
