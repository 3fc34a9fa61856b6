from __future__ import annotations

import pytest

from ckptio.engine.links import _reached


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (["10.0.0.1", "", "10.0.0.2", "fd00::2"], ["10.0.0.1", "10.0.0.1", "10.0.0.2", "fd00::2"]),
        (["", "", ""], ["127.0.0.1"] * 3),
    ],
)
async def test_who_has_no_address_is_where_rank_0_is(said: list[str], told: list[str]) -> None:
    """It has reached rank 0 without leaving the machine."""
    answer = await _reached([[host, 1000 + rank] for rank, host in enumerate(said)])
    assert answer.answer == [[host, 1000 + rank] for rank, host in enumerate(told)]
