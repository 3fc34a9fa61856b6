"""URLs of fsspec that name a server, or an account, beside a path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.utils import infer_storage_options

from ckptio import Engine
from ckptio.errors import ConfigError
from ckptio.storage.stores import Stores
from tests.rig import config_with

if TYPE_CHECKING:
    from concurrent.futures import Executor

pytestmark = pytest.mark.usefixtures("no_leaks")


class HostFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """One in memory for each host, which it reads from URLs as those of servers do."""

    protocol = "hosts"
    cachable = False
    hosts: ClassVar[dict[str, tuple[dict[str, Any], list[str]]]] = {}

    def __init__(self, host: str = "default", **options: Any) -> None:
        super().__init__(**options)
        self.store, self.pseudo_dirs = self.hosts.setdefault(host, ({}, [""]))

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(infer_storage_options(path)["path"]) if "://" in path else path

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        found = infer_storage_options(path)
        names = {"host": "host", "username": "user", "port": "port", "url_query": "query"}
        return {ours: found[name] for name, ours in names.items() if name in found}


@pytest.fixture(autouse=True)
def registered() -> None:
    """Make it known to fsspec, with nothing in it."""
    fsspec.register_implementation("hosts", HostFileSystem, clobber=True)
    HostFileSystem.hosts.clear()


async def test_a_host_is_a_place_of_its_own() -> None:
    """What is saved at one is not at another, and is not replaced from there."""
    async with Engine(config_with()) as engine:
        await engine.save({"a": torch.zeros(3)}, "hosts://one/run")
        await engine.save({"a": torch.ones(3)}, "hosts://two/run")
        await engine.save({"a": torch.full((3,), 2.0)}, "hosts://two/run", overwrite=True)
        assert torch.equal((await engine.load("hosts://one/run"))["a"], torch.zeros(3))
        assert torch.equal((await engine.load("hosts://two/run"))["a"], torch.full((3,), 2.0))
    assert set(HostFileSystem.hosts) == {"one", "two"}


async def test_a_host_may_be_in_the_options_too() -> None:
    """If it is the same, or the only one."""
    for url in ("hosts://one/run", "hosts:///run"):
        async with Engine(config_with(storage_options={"host": "one"})) as engine:
            await engine.save({"a": torch.zeros(3)}, url, overwrite=True)
    assert set(HostFileSystem.hosts) == {"one"}


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("hosts://two/run", "have another 'host' each"),
        ("hosts://one:port/run", "no path of hosts://"),
        ("hosts://one/run?query=1", "query behind the host"),
    ],
)
def test_a_url_that_says_something_else_is_refused(
    url: str, problem: str, executor: Executor
) -> None:
    """Than the options, or than the URLs below it; before anything is opened."""
    stores = Stores(config_with(storage_options={"host": "one"}), executor)
    with pytest.raises(ConfigError, match=problem):
        stores.at(url)


def test_a_user_is_no_password(executor: Executor) -> None:
    """A container of an account, say; a password is refused, and not shown."""
    stores = Stores(config_with(), executor)
    one, prefix = stores.at("hosts://container@account.dfs.core.windows.net/run")
    assert prefix == "/run"
    assert one is not stores.at("hosts://other@account.dfs.core.windows.net/run")[0]
    assert one is stores.below("hosts://container@account.dfs.core.windows.net/run")[0]
    with pytest.raises(ConfigError, match="storage_options") as caught:
        stores.at("hosts://user:secret@host/run")
    assert "secret" not in str(caught.value)
