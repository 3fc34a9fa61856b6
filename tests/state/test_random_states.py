from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import ckptio
import ckptio.sync
from ckptio.errors import ConfigError, TargetError
from ckptio.testing import run_virtual
from tests.job_rig import job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckptio import Engine

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Give other tests the numbers that they would have had."""
    before = ckptio.RandomStates().state_dict()
    yield
    ckptio.RandomStates().load_state_dict(before)


def generators() -> list[Any]:
    return [
        torch.Generator().manual_seed(1),
        np.random.default_rng(2),
        np.random.Generator(np.random.MT19937(3)),
        random.Random(4),
    ]


def draw(given: list[Any]) -> list[float]:
    """Draw a number from each, and half of a pair of normal ones, of which the rest is kept."""
    everything = [
        torch.rand(1).item(),
        np.random.random(),  # noqa: NPY002  # the global one
        np.random.standard_normal(),  # noqa: NPY002  # as above
        random.random(),
        random.gauss(0, 1),
    ]
    for generator in given:
        if isinstance(generator, torch.Generator):
            everything.append(torch.rand(1, generator=generator).item())
        else:
            everything.append(generator.random())
    return everything


def test_numbers_go_on_as_they_would_have(tmp_path: Path) -> None:
    """Those of all generators, the global ones and those that were given."""
    given = generators()
    draw(given)
    ckptio.sync.save({"random": ckptio.RandomStates(*given)}, tmp_path / "c")
    wanted = [draw(given) for _ in range(3)]
    again = generators()
    for _ in range(2):
        ckptio.sync.load(tmp_path / "c", into={"random": ckptio.RandomStates(*again)})
        assert [draw(again) for _ in range(3)] == wanted
    found = ckptio.sync.load(tmp_path / "c")
    ckptio.RandomStates(*given).load_state_dict(found["random"])
    assert [draw(given) for _ in range(3)] == wanted


def test_what_is_saved_stays_as_it_was_at_the_call(tmp_path: Path) -> None:
    """Draws behind it change nothing, as no state is the generator's own memory."""
    given = generators()
    with ckptio.sync.Engine() as engine:
        handle = engine.start_save({"random": ckptio.RandomStates(*given)}, tmp_path / "c")
        wanted = draw(given)
        handle.result()
        engine.load(tmp_path / "c", into={"random": ckptio.RandomStates(*given)})
    assert draw(given) == wanted


def test_each_rank_has_its_own() -> None:
    """And one that was not there keeps what it has."""

    async def scenario() -> None:
        saved = [torch.Generator().manual_seed(rank) for rank in range(2)]
        states = [ckptio.RandomStates(generator) for generator in saved]
        async with job(2) as ranks:
            handles = [
                engine.save({"random": state}, "memory")
                for engine, state in zip(ranks.engines, states, strict=True)
            ]
            for handle in handles:
                await handle
            place = ranks.place
        wanted = [torch.rand(4, generator=generator) for generator in saved]
        other = [torch.Generator().manual_seed(100 + rank) for rank in range(3)]
        async with job(3, place) as ranks:

            async def body(rank: int, engine: Engine) -> None:
                target = {"random": ckptio.RandomStates(other[rank])}
                await engine.load("memory", into=target)

            await ranks.all(body)
        wanted.append(torch.rand(4, generator=torch.Generator().manual_seed(102)))
        for generator, numbers in zip(other, wanted, strict=True):
            assert torch.equal(torch.rand(4, generator=generator), numbers)

    run_virtual(scenario(), seed=0)


def test_other_generators_than_were_saved_are_refused(tmp_path: Path) -> None:
    """Before any of them is set."""
    given = generators()
    ckptio.sync.save({"random": ckptio.RandomStates(*given)}, tmp_path / "c")
    before = random.getstate()
    random.random()
    now = random.getstate()
    with pytest.raises(TargetError, match="4 generators were saved, and 0 are to be set"):
        ckptio.sync.load(tmp_path / "c", into={"random": ckptio.RandomStates()})
    assert random.getstate() == now != before


@pytest.mark.parametrize("wrong", [3, random.SystemRandom(), "cpu", np.random.MT19937(1)])
def test_what_has_no_state_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="RandomStates takes generators of torch, numpy"):
        ckptio.RandomStates(wrong)
