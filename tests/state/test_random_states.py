from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import ckptio
import ckptio.sync
from ckptio.errors import ConfigError, MismatchError
from tests.job_rig import job
from tests.virtual import in_virtual_time

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


@in_virtual_time
async def test_each_rank_has_its_own() -> None:
    """And one that was not there keeps what it has."""
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


def test_other_generators_than_were_saved_are_refused(tmp_path: Path) -> None:
    """Before anything is set; where that is not asked for, those that are there are set."""
    given = generators()
    weights = torch.ones(3)
    ckptio.sync.save({"w": weights, "random": ckptio.RandomStates(*given)}, tmp_path / "c")
    wanted = draw(given[:1])
    target: dict[str, Any] = {"w": torch.zeros(3), "random": ckptio.RandomStates()}
    before = random.getstate()
    for wrong in (given[:0], given[:3], [given[1], given[0], *given[2:]], [*given, given[0]]):
        target["random"] = ckptio.RandomStates(*wrong)
        with pytest.raises(MismatchError, match=r"random\.states\.given\."):
            ckptio.sync.load(tmp_path / "c", into=target)
    assert random.getstate() == before
    assert not target["w"].any()
    target["random"] = ckptio.RandomStates(given[0])
    ckptio.sync.load(tmp_path / "c", into=target, strict="ignore")
    assert draw(given[:1]) == wanted
    found = ckptio.sync.load(tmp_path / "c")["random"]
    with pytest.raises(ConfigError, match=r"'3-Random'\] were saved, and \['0-torch'\] are"):
        target["random"].load_state_dict(found)
    now = torch.get_rng_state(), given[0].get_state()  # numbers were drawn since they were saved
    found["states"]["numpy"] = {"PCG64": found["states"]["numpy"]["MT19937"]}
    with pytest.raises(ConfigError, match="was a PCG64, and is a MT19937"):
        ckptio.RandomStates(*given).load_state_dict(found)
    assert all(map(torch.equal, (torch.get_rng_state(), given[0].get_state()), now))


@pytest.mark.parametrize(("saved", "there"), [(2, 0), (0, 2), (1, 2), (2, 1), (2, 2)])
def test_another_number_of_devices_is_no_other_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int, there: int
) -> None:
    """A job goes on with fewer devices, or is looked at without any."""
    states = [torch.full((16,), 200 + device, dtype=torch.uint8) for device in range(2)]
    found: dict[int, list[int]] = {}

    def have(number: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states[:number])
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)

    def note(state: torch.Tensor, device: int) -> None:
        found[device] = state.tolist()

    monkeypatch.setattr(torch.cuda, "set_rng_state", note)
    have(saved)
    ckptio.sync.save({"random": ckptio.RandomStates()}, tmp_path / "c")
    have(there)
    ckptio.sync.load(tmp_path / "c", into={"random": ckptio.RandomStates()})
    assert found == {device: [200 + device] * 16 for device in range(min(saved, there))}


def test_states_of_devices_outlast_a_run_that_used_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is stopped between its load and its first kernel saves what it was given."""
    state = torch.full((16,), 200, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [state])
    ckptio.sync.save({"random": ckptio.RandomStates()}, tmp_path / "a")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    target = {"random": ckptio.RandomStates()}
    ckptio.sync.load(tmp_path / "a", into=target)
    ckptio.sync.save(target, tmp_path / "b")
    cuda = ckptio.sync.load(tmp_path / "b")["random"]["states"]["cuda"]
    assert bytes.fromhex(cuda) == bytes(state.tolist())


@pytest.mark.parametrize("strict", ["raise", "ignore"])
def test_another_kind_of_numpys_global_generator(tmp_path: Path, strict: Any) -> None:
    """It is told before anything changes; where that is not asked for, it keeps what it has."""
    ckptio.sync.save({"w": torch.ones(3), "random": ckptio.RandomStates()}, tmp_path / "c")
    wanted = random.random()
    numpy_random: Any = np.random  # its types know of no other global generator
    kind = numpy_random.get_bit_generator()
    target: dict[str, Any] = {"w": torch.zeros(3), "random": ckptio.RandomStates()}
    numpy_random.set_bit_generator(np.random.PCG64DXSM(1))
    try:
        if strict == "raise":
            with pytest.raises(MismatchError, match=r"random\.states\.numpy\.PCG64DXSM"):
                ckptio.sync.load(tmp_path / "c", into=target)
            assert not target["w"].any()
        else:
            ckptio.sync.load(tmp_path / "c", into=target, strict=strict)
            assert random.random() == wanted
        other = np.random.Generator(np.random.PCG64DXSM(1))
        assert np.random.random() == other.random()  # noqa: NPY002
    finally:
        numpy_random.set_bit_generator(kind)


@pytest.mark.parametrize("wrong", [3, random.SystemRandom(), "cpu", np.random.MT19937(1)])
def test_what_has_no_state_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="RandomStates takes generators of torch, numpy"):
        ckptio.RandomStates(wrong)
