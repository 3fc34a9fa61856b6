"""Which machine this is, under which addresses others reach it, and how many of them can.

Hosts are told apart by name and by the kernel's boot id: two machines that were cloned
with one name differ in the second, two containers of one machine in the first.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket

from ckptio.errors import RankError

_ODD = re.compile(r"[^\x21-\x7e]")  # nothing that a manifest does not take
_MAX_NAME_CHARS = 200
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NUM_BOOT_DIGITS = 8
_DISCARD_PORT = 9


def this_host() -> str:
    """Name this machine: its host name, and the beginning of its boot id where there is one."""
    name = _ODD.sub("-", socket.gethostname())[:_MAX_NAME_CHARS] or "localhost"
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return f"{name}-{file.read(_NUM_BOOT_DIGITS)}"
    except OSError:
        return name


def addresses_towards(peer: str) -> list[str]:
    """List addresses of this machine that others may reach, the likeliest first.

    Blocks while names are resolved. The interface that leads to `peer` comes first, then
    what the host name resolves to, then the name itself; loopback is not among them.

    Args:
        peer: A host that every rank talks to anyway; "" if there is none.
    """
    found: list[str] = []
    if peer:
        with contextlib.suppress(OSError, UnicodeError):  # no route, or no such name: see below
            for family, kind, number, _, address in socket.getaddrinfo(
                peer, _DISCARD_PORT, type=socket.SOCK_DGRAM
            ):
                with socket.socket(family, kind, number) as probe:
                    probe.connect(address)  # sends nothing: it only asks for the route
                    found.append(str(probe.getsockname()[0]))
    name = socket.gethostname()
    with contextlib.suppress(UnicodeError):  # nobody can look it up: of more than 63 letters, say
        with contextlib.suppress(OSError):
            known = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            found.extend(str(each[4][0]) for each in known)
        found.append(name)
    return [a for a in dict.fromkeys(found) if a and not is_loopback(a)]


def is_loopback(address: str) -> bool:
    """Whether an address means nothing to other machines."""
    return address.startswith("127.") or address in {"::1", "localhost"} or "%" in address


def listen_everywhere(backlog: int) -> socket.socket:
    """Open a listening socket on a free port of every interface, for both IP versions."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # no IPv6 here after all
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
    return socket.create_server(("", 0), backlog=backlog)


def require_descriptors(num: int) -> None:
    """Raise an error if this process cannot have so many connections, before anybody calls.

    Without a descriptor for each that calls, that would be known when the time to meet is over.

    Raises:
        RankError: It may not open as many files besides those that it has.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = 0
    with contextlib.suppress(OSError):  # there is no /proc
        num_open = len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and num_open + num > limit:
        raise RankError(
            f"rank 0 needs a connection to each of {num} other ranks, and its process may open"
            f" {limit} files, of which {num_open} are open: raise that limit, to"
            f" {num_open + num} at least (`ulimit -n`)"
        )
