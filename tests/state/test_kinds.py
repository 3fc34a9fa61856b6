from __future__ import annotations

import datetime as dt
import enum
import pathlib
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ckptio import PerRank
from ckptio.state.flatten import flatten
from ckptio.state.kinds import kind_of
from ckptio.state.tree import take_rank


@dataclass
class Point:
    x: int = 1


class Pair(NamedTuple):
    x: int
    y: int


class Color(enum.Enum):
    RED = 1


BASE = torch.zeros(4)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "None"),
        (True, "a bool"),
        (1, "an int"),
        (1 << 90, "an int"),
        (float("nan"), "a float"),
        ("a", "a str"),
        (b"a", "a bytes object"),
        (1j, "a complex"),
        ([1, 2, 3], "a list of 3"),
        ([], "an empty list"),
        ((1,), "a tuple of 1"),
        ((), "an empty tuple"),
        ({1, 2}, "a set of 2"),
        ({"m": 1, "o": 2, "step": 3}, "a dict with 'm', 'o', 'step'"),
        (dict.fromkeys(range(9), 1), "a dict with '0', '1', '2' and 6 more"),
        ({"k" * 1000: 1}, f"a dict with '{'k' * 40}...'"),
        ({"k" * 40: 1}, f"a dict with '{'k' * 40}'"),
        ({}, "an empty dict"),
        (OrderedDict(a=1), "an OrderedDict with 'a'"),
        (Counter("a"), "a Counter with 'a'"),
        (Point(), "a dataclass 'Point'"),
        (Pair(1, 2), "a named tuple 'Pair'"),
        (Color.RED, "an enum 'Color'"),
        (BASE, "a tensor"),
        (np.zeros(3), "an array"),
        (np.float64(3), "a number of numpy"),
        (torch.float32, "a torch.dtype"),
        (dt.timedelta(1), "a timedelta"),
        (pathlib.Path("a"), "a path"),
        (PerRank(3), "an int"),
    ],
)
def test_a_node_is_described_in_a_few_words(value: Any, kind: str) -> None:
    """Whatever is saved, and however much of it there is."""
    node = flatten({"v": value}).tree["v"]
    assert kind_of(take_rank(node, 0)) == kind


def test_a_part_of_a_tensor_is_one() -> None:
    """As where two that are saved share memory."""
    tree = flatten({"a": BASE, "b": BASE[1:]}).tree
    assert {kind_of(node) for node in tree.values()} == {"a tensor"}
