from __future__ import annotations

import pytest

from ckptio.engine.links import _addresses


@pytest.mark.parametrize(
    ("near", "hosts"),
    [
        ("10.0.0.1", ["10.0.0.1", "10.0.0.1", "10.0.0.2", "fd00::2"]),
        ("", ["127.0.0.1", "127.0.0.1", "10.0.0.2", "fd00::2"]),
    ],
)
def test_who_has_no_address_is_where_this_rank_reaches_rank_0(near: str, hosts: list[str]) -> None:
    """Machines may reach it at different ones; on its own it is the loopback interface."""
    doors = [["", 1000], ["", 1001], ["10.0.0.2", 1002], ["fd00::2", 1003]]
    assert _addresses(doors, near) == [(host, 1000 + rank) for rank, host in enumerate(hosts)]
