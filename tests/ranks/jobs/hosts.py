"""Two hosts on one machine: network namespaces on a bridge, each with a host name."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUM_HOSTS = 2
_TOOLS = ("ip", "unshare")


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts, as long as they are there.

    Attributes:
        address: Where this process is reached from all of them.
        prefixes: What to start a process with to have it on each.
        names: Their host names.
    """

    address: str
    prefixes: tuple[tuple[str, ...], ...]
    names: tuple[str, ...]

    def mend(self, host: int) -> None:
        """Put the cable of a host back in."""
        _ip("-n", self.names[host], "link", "set", "eth0", "up")


def cut_cable() -> None:
    """Pull the cable of the host that this process is on."""
    _ip("link", "set", "eth0", "down")


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts | None]:
    """Make two hosts; gives none where that is not allowed."""
    if os.geteuid() != 0 or not all(map(shutil.which, _TOOLS)):
        yield None
        return
    bridge = f"ckb{os.getpid()}"
    subnet = f"10.213.{os.getpid() % 256}"
    names = tuple(f"ckptio-{os.getpid()}-{i}" for i in range(_NUM_HOSTS))
    try:
        try:
            _ip("link", "add", bridge, "type", "bridge")
            _ip("addr", "add", f"{subnet}.254/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
            for i, name in enumerate(names):
                _add_host(name, bridge, f"ckv{os.getpid()}-{i}", f"{subnet}.{i + 1}/24")
        except subprocess.CalledProcessError:
            yield None
            return
        rename = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')
        prefixes = tuple(("ip", "netns", "exec", name, *rename, name) for name in names)
        yield Hosts(f"{subnet}.254", prefixes, names)
    finally:
        for command in (("link", "del", bridge), *(("netns", "del", name) for name in names)):
            with contextlib.suppress(subprocess.CalledProcessError):  # it was never made
                _ip(*command)


def _add_host(name: str, bridge: str, cable: str, address: str) -> None:
    _ip("netns", "add", name)
    _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", cable, "master", bridge, "up")
    _ip("-n", name, "addr", "add", address, "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip("-n", name, "link", "set", device, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)  # noqa: S607  # from PATH
