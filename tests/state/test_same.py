"""Whether two states are the same."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from ckptio import PerRank
from ckptio.state.same import is_same
from tests.state.test_wrappers import Kernel, Rounding, coded
from tests.strategies import Point

META = torch.ones(1, device="meta")
NOON = datetime(2024, 10, 27, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(2, dtype=torch.int64), False),
        (torch.zeros(2), -torch.zeros(2), False),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), True),
        (torch.ones(1, device="meta"), torch.ones(1, device="meta"), False),
        (META, META.detach(), True),
        (TwoTensor(torch.ones(1), torch.ones(1)), TwoTensor(torch.ones(1), torch.ones(1)), True),
        (TwoTensor(torch.ones(1), torch.ones(1)), TwoTensor(torch.ones(1), torch.zeros(1)), False),
        (coded(0), coded(0), True),
        (coded(0), coded(0, kernel=Kernel(Rounding.NEAREST, (2, 8))), False),
        (np.ones(2), np.ones(2), True),
        (np.ones(2), np.ones((2, 1)), False),
        (np.zeros(2), np.ones(2), False),
        (np.zeros(2), np.zeros(2, np.int64), False),
        (np.float64("nan"), np.float64("nan"), True),
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        (1, True, False),
        ({"a": [1, (2.0,)]}, {"a": [1, (2.0,)]}, True),
        ({"a": [1]}, {"a": [1, 2]}, False),
        ([float("nan"), torch.ones(1)], [float("nan"), torch.ones(1)], True),
        ((1, 2), (1, True), False),
        ({"a": 1}, {"b": 1}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({1: 1}, {True: 1}, False),
        ({1, "a"}, {"a", 1}, True),
        ({1}, {True}, False),
        ({0.0}, {-0.0}, False),
        ({1}, {1, 2}, False),
        ({1}, {2}, False),
        ({1, 2}, {1, 3}, False),
        (frozenset({(1, 2)}), frozenset({(True, 2)}), False),
        (frozenset({(1, 2)}), frozenset({(1, 2)}), True),
        (PerRank(torch.ones(1)), PerRank(torch.ones(1)), True),
        (PerRank(1), PerRank(2), False),
        (Point(1, 2), Point(1, 3), False),
        ("a", "a", True),
        (b"a", b"b", False),
        (Decimal("1.0"), Decimal("1.00"), False),
        (Path("a"), Path("a"), True),
        (NOON, NOON.astimezone(timezone(timedelta(hours=1))), False),
        (NOON, NOON.replace(fold=1), False),
        (NOON, NOON.replace(), True),
    ],
)
def test_states_are_the_same_bit_for_bit(one: Any, other: Any, *, expected: bool) -> None:
    assert is_same(one, other) is expected


def test_what_nobody_can_tell_of_is_not_the_same() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no")

        __hash__ = None  # type: ignore[assignment]  # as of what has an equal

    odd = Odd()
    assert is_same({"a": odd}, {"a": odd})
    assert not is_same({"a": odd}, {"a": Odd()})
