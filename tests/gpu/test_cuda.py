from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import ckptio
import ckptio.sync
from ckptio.adapters.dcp import StorageReader, StorageWriter
from ckptio.config import MiB
from ckptio.errors import (
    ConfigError,
    SaveAbortedError,
    StateError,
    TargetError,
    UnsupportedLeafError,
)
from ckptio.events import Event, PinningRefused
from ckptio.staging import cuda, far_moves
from ckptio.staging.copy import Destination, SourceState, TargetState
from ckptio.staging.cuda import HostRegistration
from ckptio.staging.pool import Slab
from tests.rig import assert_same, assert_tidy, config_with, names_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ckptio.staging.far_moves import FarMove

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = config_with(
    pool_nbytes=8 * MiB, slab_nbytes=1 * MiB, block_nbytes=256 * 1024, bucket_nbytes=16 * MiB
)


@pytest.fixture(autouse=True)
def no_device_wide_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may wait for a whole device or a whole stream."""

    def refuse(*_: object) -> None:
        raise AssertionError("somebody waited for a whole device")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)


def random_on(device: str, *sizes: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Make byte tensors on a device."""
    generator = torch.Generator(device).manual_seed(seed)
    return {
        f"tensor{i}": torch.randint(
            0, 256, (nbytes,), dtype=torch.uint8, device=device, generator=generator
        )
        for i, nbytes in enumerate(sizes)
    }


def refuse_to_pin(*_: object) -> None:
    """Do as a system does in which no more memory may be locked."""
    raise StateError("no memory can be locked")


def keep_busy() -> None:
    """Keep the current stream busy for some 0.2 s, so that what comes next is not done at once."""
    torch.cuda._sleep(int(4e8))  # cycles


def on_cpu(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in state.items()}


@pytest.fixture(params=["by address", "by torch", "in doubt"])
def told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How copies are told to the driver; "in doubt" by address, and then once more by torch."""
    calls = Counter[str]()

    def tell(moves: Sequence[FarMove], stream: int, *, saving: bool) -> bool:
        is_told = request.param != "by torch" and far_moves.copy_far(moves, stream, saving=saving)
        calls["calls"] += 1
        calls["told"] += is_told * len(moves)
        return is_told and request.param == "by address"

    monkeypatch.setattr(cuda, "copy_far", tell)
    yield calls
    assert calls["calls"]
    assert (calls["told"] > 0) == (request.param != "by torch")


async def test_small_tensors_are_told_to_the_driver_by_the_slab(
    tmp_path: Path, told: Counter[str]
) -> None:
    """Not each on its own, nor by the block, in either direction."""
    sizes = [1 + 997 * i % 4000 for i in range(600)]  # 4.8 MB, in 5 slabs
    state = {f"t{i}": torch.randn(size, device="cuda") for i, size in enumerate(sizes)}
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    async with ckptio.Engine(CONFIG) as engine:
        await engine.save(state, tmp_path / "c")
        assert told["calls"] <= 7
        await engine.load(tmp_path / "c", into=target)
        assert told["calls"] <= 14
    assert_same(on_cpu(target), on_cpu(state))


async def test_small_tensors_of_a_foreign_file_share_slabs(
    tmp_path: Path, told: Counter[str]
) -> None:
    """Each is a file of its own, read beside others into a slab from which the device copies.

    It is told of all in a slab at once, which spares an H200 some 0.1 ms for each.
    """
    state = {f"t{i}": torch.randn(1 + 997 * i % 4000) for i in range(600)}
    torch.save(state, tmp_path / "state.pt")
    async with ckptio.Engine(CONFIG) as engine:
        found = await engine.load(tmp_path / "state.pt", device="cuda")
        target = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in state.items()}
        await engine.load(tmp_path / "state.pt", into=target)
    assert_same(on_cpu(found), state)
    assert_same(on_cpu(target), state)
    assert told["calls"] < 200


@pytest.mark.usefixtures("told")
async def test_a_cuda_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Contiguous tensors of every kind, larger than the pool together, with the CPU's beside."""
    state = {
        "bytes": torch.randint(0, 256, (20 * MiB + 13,), dtype=torch.uint8, device="cuda"),
        "bf16": torch.randn(1000, 300, device="cuda").bfloat16(),
        "float": torch.randn(77, device="cuda"),
        "bool": torch.rand(999, device="cuda") > 0.5,
        "complex": torch.randn(100, dtype=torch.complex64, device="cuda"),
        "scalar": torch.tensor(3.5, device="cuda"),
        "empty": torch.zeros(0, 4, device="cuda"),
        "cpu": torch.randn(500, 3),
    }
    async with ckptio.Engine(CONFIG) as engine:
        await engine.save(state, tmp_path / "c")
        assert_same(await engine.load(tmp_path / "c", device="cpu"), on_cpu(state))
        assert (await engine.verify(tmp_path / "c")).is_whole
        assert engine.statistics().peak_leased_nbytes <= CONFIG.pool_nbytes
    assert_tidy(tmp_path / "c")


@pytest.mark.parametrize("layout", ["transposed", "every other", "columns", "expanded", "conj"])
async def test_any_layout_on_the_device_is_saved_and_filled(tmp_path: Path, layout: str) -> None:
    """Strides of the source leave no trace, and strides of a target are kept to."""
    base = torch.randn(512, 700, device="cuda")
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda t: t.t(),
        "every other": lambda t: t[::2],
        "columns": lambda t: t[:, 3:-5],
        "expanded": lambda t: t[:1].expand(512, 700),
        "conj": lambda t: torch.complex(t, t + 1).conj(),
    }
    view = views[layout](base)
    async with ckptio.Engine(CONFIG) as engine:
        await engine.save({"t": view}, tmp_path / "c")
        found = await engine.load(tmp_path / "c", device="cuda")
        assert found["t"].is_cuda
        assert torch.equal(found["t"], view)
        if layout in ("transposed", "every other", "columns"):
            outside = torch.full_like(base, 7.0)
            target = views[layout](outside)
            await engine.load(tmp_path / "c", into={"t": target})
            assert torch.equal(target, view)
            untouched = torch.full_like(base, 7.0)
            views[layout](untouched).copy_(view)
            assert torch.equal(outside, untouched)


async def test_views_of_strided_tensors_are_made_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 20,000 at once set a collection of all garbage off, in which all threads stand.

    And in one thread at a time: they would take the GIL from each other for each.
    """
    copy_views, num_views, num_inside = cuda.CallerStreams.copy_views, 0, 0

    def counted(streams: Any, pairs: Any, pending: Any, *, is_short: bool) -> None:
        assert is_short

        def counting(some: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            nonlocal num_views, num_inside
            num_inside += 1
            threading.Event().wait(0.02)  # for another to come
            assert num_inside == 1
            made: list[weakref.ref[torch.Tensor]] = []
            for target, source in some:
                made = [each for each in (*made, weakref.ref(target)) if each() is not None]
                assert len(made) <= 2  # this one, and the one that the loop has until the next
                num_views += 1
                yield target, source
            num_inside -= 1

        views = {device: counting(some) for device, some in pairs.items()}
        copy_views(streams, views, pending, is_short=is_short)

    monkeypatch.setattr(cuda.CallerStreams, "copy_views", counted)
    state = {f"t{i}": torch.randn(100, 200, device="cuda").t() for i in range(50)}  # in 4 slabs
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    async with ckptio.Engine(CONFIG) as engine:
        await engine.save(state, tmp_path / "c")
        await engine.load(tmp_path / "c", into=target)
    assert_same(on_cpu(target), on_cpu(state))
    assert num_views >= 100


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("wait", ["fence", "staged"])
@pytest.mark.parametrize("nbytes", [3 * MiB, 30 * MiB], ids=["in the pool", "in waves"])
async def test_the_source_may_change_after_the_fence_or_staged(
    tmp_path: Path, wait: str, nbytes: int
) -> None:
    """What the stream does afterwards does not reach the files; what it did before does."""
    state = random_on("cuda", nbytes, nbytes // 3)
    async with ckptio.Engine(CONFIG) as engine:
        for turn in range(5):
            keep_busy()
            for tensor in state.values():
                tensor.add_(1)  # queued, and not done, when `save` is called
            expected = {name: tensor.clone() for name, tensor in state.items()}
            handle = engine.save(state, tmp_path / str(turn))
            if wait == "fence":
                handle.fence()
            else:
                await handle.staged
            for tensor in state.values():
                tensor.fill_(0)
            await handle
            assert_same(await engine.load(tmp_path / str(turn), device="cpu"), on_cpu(expected))
            for name, tensor in state.items():
                tensor.copy_(expected[name])


async def test_a_save_sees_the_stream_it_was_called_on(tmp_path: Path) -> None:
    """Work that was queued on a side stream before the call is waited for."""
    stream = torch.cuda.Stream()
    tensor = torch.zeros(4 * MiB, dtype=torch.uint8, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    async with ckptio.Engine(CONFIG) as engine:
        with torch.cuda.stream(stream):
            keep_busy()
            tensor.fill_(5)
            handle = engine.save({"t": tensor}, tmp_path / "c")
            handle.fence()
            tensor.fill_(6)
        await handle
        found = await engine.load(tmp_path / "c", device="cpu")
    assert found["t"].unique().tolist() == [5]


@pytest.mark.parametrize("made", ["awaited", "as a task"])
@pytest.mark.parametrize("by", ["an engine", "a checkpointer", "one call"])
async def test_a_load_is_ordered_behind_the_stream_it_was_called_on(
    tmp_path: Path, by: str, made: str
) -> None:
    """Also where another task has chosen another stream of the thread meanwhile."""
    state = random_on("cuda", 4 * MiB, seed=2)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    mine, theirs, before = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()
    mine.wait_stream(before)
    is_loaded = asyncio.Event()

    async def work_elsewhere() -> None:
        with torch.cuda.stream(theirs):
            await is_loaded.wait()

    async with (
        ckptio.Engine(CONFIG) as engine,
        ckptio.Checkpointer(tmp_path / "run", engine=engine) as ckpt,
    ):
        await ckpt.save(state, 1)
        with torch.cuda.stream(mine):
            keep_busy()
            for tensor in target.values():
                tensor.fill_(3)
            others = asyncio.create_task(work_elsewhere())
            if by == "a checkpointer":
                load = ckpt.load(into=target)
            else:
                one = engine.load if by == "an engine" else ckptio.load
                load = one(ckpt.path(1), into=target)
            task = asyncio.create_task(load) if made == "as a task" else None
            await (task or load)
            assert torch.cuda.current_stream() == theirs  # as it was: else this proves nothing
            is_loaded.set()
            await others
        torch.cuda.set_stream(before)
        mine.synchronize()
    assert_same(on_cpu(target), on_cpu(state))


async def test_devices_are_those_that_the_runtime_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that torch may count where CUDA_VISIBLE_DEVICES has changed since CUDA began."""
    state = random_on("cuda", 1 * MiB)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 99)
    async with ckptio.Engine(CONFIG) as engine:
        await engine.save(state, tmp_path / "c")
        assert_same(on_cpu(await engine.load(tmp_path / "c", device="cuda")), on_cpu(state))


@pytest.mark.parametrize("change", ["shorter", "transposed"])
@pytest.mark.parametrize("how", ["by address", "by torch", "not pinned"])
async def test_a_tensor_that_gets_another_shape_is_saved_as_it_was_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, change: str
) -> None:
    """Its address is the same: torch would copy one element all over, or another order."""
    gather = SourceState.gather
    tensor = torch.arange(1000, device="cuda").view(50, 20)
    expected = tensor.cpu()

    def gather_late(*arguments: Any) -> None:
        tensor.data = tensor.data.view(-1)[:1] if change == "shorter" else tensor.data.t()
        gather(*arguments)

    monkeypatch.setattr(SourceState, "gather", gather_late)
    if how == "not pinned":
        monkeypatch.setattr(HostRegistration, "pin", refuse_to_pin)
    if how == "by torch":
        monkeypatch.setattr(cuda, "copy_far", lambda *_, **__: False)
    async with ckptio.Engine(CONFIG) as engine:
        try:
            await engine.save({"t": tensor}, tmp_path / "c")
        except StateError as error:
            assert "was changed, or moved" in str(error)
            return
        assert_same(await engine.load(tmp_path / "c", device="cpu"), {"t": expected})


def halve(tensor: torch.Tensor) -> torch.Tensor:
    """Give the second half of its memory back, and to another tensor."""
    storage, nbytes = tensor.untyped_storage(), tensor.nbytes
    storage.resize_(0)
    storage.resize_(nbytes // 2)
    return torch.full((nbytes // 2,), 66, dtype=torch.uint8, device=tensor.device)


@pytest.mark.parametrize("how", ["by address", "by torch"])
@pytest.mark.parametrize("what", ["save", "load"])
@pytest.mark.parametrize("is_shorter", [False, True], ids=["of its shape", "shorter"])
async def test_what_a_storage_has_no_more_meanwhile_is_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, how: str, *, is_shorter: bool
) -> None:
    """It has the same address again: what lies behind is neither saved nor filled."""
    cls, name = (SourceState, "gather") if what == "save" else (TargetState, "scatter")
    copy = getattr(cls, name)
    tensor = torch.zeros(400_000, dtype=torch.uint8, device="cuda")
    others: list[torch.Tensor] = []
    if how == "by torch":
        monkeypatch.setattr(cuda, "copy_far", lambda *_, **__: False)

    def copy_late(*arguments: Any) -> None:
        if not others:
            others.append(halve(tensor))
            if is_shorter:  # so that all of what it has now is there
                tensor.data = tensor.data[:1]
        copy(*arguments)

    async with ckptio.Engine(CONFIG) as engine:
        await engine.save({"t": torch.ones(400_000, dtype=torch.uint8)}, tmp_path / "before")
        monkeypatch.setattr(cls, name, copy_late)
        with pytest.raises((StateError, TargetError), match="moved"):
            if what == "save":
                await engine.save({"t": tensor}, tmp_path / "c")
            else:
                await engine.load(tmp_path / "before", into={"t": tensor})
    assert others[0].unique().tolist() == [66]
    assert names_in(tmp_path) == ["before"]


@pytest.mark.parametrize("how", ["by address", "by torch"])
@pytest.mark.parametrize("change", ["transposed", "of another type", "shorter"])
async def test_a_target_that_gets_another_shape_is_filled_as_it_was_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, how: str
) -> None:
    """At its address: torch would fill it in another order, or convert."""
    scatter, expected = TargetState.scatter, torch.arange(1000, dtype=torch.int32).view(50, 20)
    memory = torch.zeros_like(expected, device="cuda")
    target = memory.detach()
    if how == "by torch":
        monkeypatch.setattr(cuda, "copy_far", lambda *_, **__: False)

    def scatter_late(*arguments: Any) -> None:
        target.data = {
            "transposed": lambda: memory.transpose(0, 1),
            "of another type": lambda: memory.view(torch.int16),
            "shorter": lambda: memory.view(-1)[:1],
        }[change]()
        scatter(*arguments)

    async with ckptio.Engine(CONFIG) as engine:
        await engine.save({"t": expected}, tmp_path / "c")
        monkeypatch.setattr(TargetState, "scatter", scatter_late)
        try:
            await engine.load(tmp_path / "c", into={"t": target})
        except TargetError as error:
            assert "changed its shape" in str(error)
            assert not memory.any()
            return
        assert torch.equal(memory.cpu(), expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("nbytes", [0, 4096])
def test_what_a_storage_has_no_more_is_neither_read_nor_written(
    tmp_path: Path, nbytes: int
) -> None:
    """What is behind it is another's."""
    whole = torch.arange(3000.0, device="cuda")
    tensor = whole[8:2008]
    dcp_save({"t": tensor}, storage_writer=StorageWriter(tmp_path / "before"))
    whole.untyped_storage().resize_(nbytes)
    with pytest.raises(UnsupportedLeafError, match="no memory of that size"):
        ckptio.sync.save({"t": tensor}, tmp_path / "c")
    with pytest.raises(UnsupportedLeafError, match="no memory of that size"):
        ckptio.sync.save({"t": ckptio.Shard(tensor, (2000,), (0,))}, tmp_path / "c")
    with pytest.raises(CheckpointException, match="out of bounds"):
        dcp_save({"t": tensor}, storage_writer=StorageWriter(tmp_path / "c"))
    with pytest.raises(CheckpointException, match="out of bounds"):
        dcp_load({"t": tensor}, storage_reader=StorageReader(tmp_path / "before"))


@pytest.mark.parametrize("width", [32, 256], ids=["short", "long"])
def test_what_has_come_to_the_device_while_it_waits_its_turn_is_passed_over(width: int) -> None:
    """It had been looked at before others were copied; a bare `AssertionError` ended that."""
    slab, tensor = Slab(1 * MiB), torch.zeros(width, width).t()
    pieces = [(0, 0, 0, 4 * width * width)]
    target = TargetState([Destination(tensor, torch.float32)], None)
    source = SourceState([tensor], None)
    tensor.data = tensor.data.to("cuda")
    target._scatter_slow(pieces, slab, [])
    with pytest.raises(TargetError, match="moved in memory"):
        target.mark_written()
    source._gather_slow(pieces, slab, [])
    assert source.watch.moved == 0


@pytest.mark.usefixtures("told")
async def test_targets_on_the_device_are_filled_in_place(tmp_path: Path) -> None:
    """Same tensors, same memory; what the stream does next sees the new values."""
    state = random_on("cuda", 20 * MiB, 5, seed=1)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    pointers = [tensor.data_ptr() for tensor in target.values()]
    async with ckptio.Engine(CONFIG) as engine:
        await engine.save(state, tmp_path / "c")
        keep_busy()
        for tensor in target.values():
            tensor.fill_(3)  # queued before the load: must not win
        assert await engine.load(tmp_path / "c", into=target) is target
        doubled = {name: tensor + tensor for name, tensor in target.items()}
    assert [tensor.data_ptr() for tensor in target.values()] == pointers
    assert_same(on_cpu(target), on_cpu(state))
    assert_same(on_cpu(doubled), {name: tensor + tensor for name, tensor in on_cpu(state).items()})


async def test_a_state_moves_between_devices(tmp_path: Path) -> None:
    """From the CPU to CUDA and back, with a conversion on the way."""
    state = {"a": torch.randn(1000, 100), "n": torch.arange(10)}
    async with ckptio.Engine(CONFIG) as engine:
        await engine.save(state, tmp_path / "c")
        found = await engine.load(tmp_path / "c", device="cuda", dtype=torch.bfloat16)
        assert found["a"].is_cuda
        assert torch.equal(found["a"].cpu(), state["a"].bfloat16())
        assert found["n"].dtype == torch.int64
        part = await engine.load_slice(tmp_path / "c", "a", slice(3, 7), device="cuda:0")
        assert torch.equal(part.cpu(), state["a"][3:7])
        with pytest.raises(ConfigError):
            await engine.load(tmp_path / "c", into=state, device="cuda")


async def test_slabs_are_pinned_once_in_their_exact_size(tmp_path: Path) -> None:
    """From the first CUDA tensor on; those that were there before, too; nothing grows."""
    async with ckptio.Engine(CONFIG) as engine:
        await engine.save({"a": torch.ones(3)}, tmp_path / "cpu")
        pool = engine._core.context.pool
        assert not any(slab.pinned for slab in pool._free)
        await engine.save(random_on("cuda", 10 * MiB), tmp_path / "c")
        assert all(slab.pinned for slab in pool._free)
        host = torch.frombuffer(pool._free[0].view, dtype=torch.uint8)
        assert host.is_pinned()
        del host
        await engine.save(random_on("cuda", 10 * MiB), tmp_path / "c", overwrite=True)
        # a slab that is being pinned for the first time lets others come back meanwhile
        assert engine.statistics().num_allocations <= CONFIG.num_slabs
        assert engine.statistics().taken_nbytes <= CONFIG.pool_nbytes


async def test_aborting_a_cuda_save_leaves_nothing(tmp_path: Path) -> None:
    """Slabs come back after their copies, files go, and the next save is right."""
    state = random_on("cuda", 40 * MiB)
    async with ckptio.Engine(CONFIG) as engine:
        for turns in range(10):
            handle = engine.save(state, tmp_path / "c")
            for _ in range(turns):
                await asyncio.sleep(0)
            handle.abort()
            with pytest.raises(SaveAbortedError):
                await handle
            assert engine.statistics().leased_nbytes == 0
            assert names_in(tmp_path) == []
        await engine.save(state, tmp_path / "c")
        assert_same(await engine.load(tmp_path / "c", device="cpu"), on_cpu(state))


async def test_the_callers_stream_and_the_copies_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """What is queued after the call is still under way when all is copied."""
    state = random_on("cuda", 1 * MiB)
    async with ckptio.Engine(CONFIG) as engine:
        await engine.save(state, tmp_path / "warm")
        handle = engine.save(state, tmp_path / "c")
        for _ in range(10):
            keep_busy()
        after = torch.cuda.Event()
        after.record()
        await handle.staged
        assert not after.query()
        await handle


async def test_two_cuda_saves_keep_their_own_contents(tmp_path: Path) -> None:
    """The source changes on the device between them."""
    tensor = torch.zeros(6 * MiB, dtype=torch.uint8, device="cuda")
    async with ckptio.Engine(CONFIG) as engine:
        handles = []
        for value in range(2):
            tensor.fill_(value)
            handles.append(engine.save({"t": tensor}, tmp_path / str(value)))
            handles[-1].fence()
        tensor.fill_(9)
        for handle in handles:
            await handle
        for value in range(2):
            found = await engine.load(tmp_path / str(value), device="cpu")
            assert found["t"].unique().tolist() == [value]


def test_random_states_of_devices_are_saved_and_set(tmp_path: Path) -> None:
    """Each as it was at the save."""
    torch.cuda.manual_seed_all(7)
    before = torch.cuda.get_rng_state_all()
    ckptio.sync.save({"random": ckptio.RandomStates()}, tmp_path / "c", config=CONFIG)
    torch.cuda.manual_seed_all(8)
    assert not torch.equal(torch.cuda.get_rng_state(), before[0])
    ckptio.sync.load(tmp_path / "c", into={"random": ckptio.RandomStates()}, config=CONFIG)
    assert all(map(torch.equal, torch.cuda.get_rng_state_all(), before))


def test_the_blocking_twin_does_it_too(tmp_path: Path) -> None:
    """Save, fence, change, load, without a loop."""
    state = random_on("cuda", 5 * MiB)
    expected = on_cpu(state)
    with ckptio.sync.Engine(CONFIG) as engine:
        handle = engine.start_save(state, tmp_path / "c")
        handle.fence()
        state["tensor0"].zero_()
        handle.result()
        engine.load(tmp_path / "c", into=state)
    assert_same(on_cpu(state), expected)


async def test_a_pool_that_cannot_be_pinned_serves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are slower, the observer hears of it once, and saves of the CPU go on, too."""
    monkeypatch.setattr(HostRegistration, "pin", refuse_to_pin)
    state = random_on("cuda", 10 * MiB)
    refused: list[PinningRefused] = []

    def observe(event: Event) -> None:
        if isinstance(event, PinningRefused):
            refused.append(event)

    async with ckptio.Engine(CONFIG, observer=observe) as engine:
        await engine.save(state, tmp_path / "c")
        await engine.save({"a": torch.ones(3)}, tmp_path / "cpu")
        assert_same(await engine.load(tmp_path / "c", device="cpu"), on_cpu(state))
        assert not any(slab.pinned for slab in engine._core.context.pool._free)
    assert [event.reason for event in refused] == ["no memory can be locked"]


async def test_prewarming_pins_if_cuda_is_in_use(tmp_path: Path) -> None:
    """The first save finds everything done."""
    async with ckptio.Engine(CONFIG) as engine:
        await engine.prewarm()
        assert all(slab.pinned for slab in engine._core.context.pool._free)
        await engine.save(random_on("cuda", 3 * MiB), tmp_path / "c")


async def test_nothing_is_captured_into_a_graph(tmp_path: Path) -> None:
    """A save within a capture would happen at the replay: it is refused, and later one works."""
    state = random_on("cuda", 1 * MiB)
    async with ckptio.Engine(CONFIG) as engine:
        await engine.save(state, tmp_path / "before")
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what `torch.cuda.graph` does, but for its wait
            graph.capture_begin(capture_error_mode="relaxed")
            state["tensor0"].add_(1)
            with pytest.raises(StateError, match="captured"):
                engine.save(state, tmp_path / "c")
            with pytest.raises(StateError, match="captured"):
                await engine.load(tmp_path / "before", into=state)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        await engine.save(state, tmp_path / "c")
        assert_same(await engine.load(tmp_path / "c", device="cpu"), on_cpu(state))


async def test_a_graph_is_captured_while_a_save_and_a_load_are_under_way(tmp_path: Path) -> None:
    """In the mode in which any thread that waits for an event breaks the capture of another."""
    state = random_on("cuda", *[9 * MiB] * 6)  # many waves, and slabs that are yet to be pinned
    counter = torch.zeros(10, device="cuda")
    async with ckptio.Engine(CONFIG) as engine, ckptio.Engine(CONFIG) as other:
        await other.save(state, tmp_path / "before")
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        saving = engine.save(state, tmp_path / "c")
        loading = asyncio.create_task(other.load(tmp_path / "before", into=target))
        await asyncio.sleep(0.01)
        with torch.cuda.stream(stream):
            graph.capture_begin()  # in the mode "global"
            counter.add_(1)
            while not (saving.done() and loading.done()):
                await asyncio.sleep(0.01)
            graph.capture_end()
        await saving
        await loading
        graph.replay()
        assert counter.tolist() == [1.0] * 10
        assert_same(on_cpu(target), on_cpu(state))
        assert_same(await engine.load(tmp_path / "c", device="cpu"), on_cpu(state))


async def test_loads_in_inference_mode_fill_its_tensors(tmp_path: Path) -> None:
    """Converted and complex ones, too."""
    state = {"f": torch.randn(1000, device="cuda"), "c": torch.randn(9, dtype=torch.complex128)}
    async with ckptio.Engine(CONFIG) as engine:
        await engine.save(state, tmp_path / "c")
        with torch.inference_mode():
            found = await engine.load(tmp_path / "c", device="cuda", dtype=torch.bfloat16)
            assert torch.equal(found["f"], state["f"].bfloat16())
            target = {"f": torch.zeros_like(state["f"]), "c": torch.zeros_like(state["c"]).cuda()}
            await engine.load(tmp_path / "c", into=target)
            assert_same(on_cpu(target), on_cpu(state))


async def test_thousands_of_small_tensors_come_back(tmp_path: Path) -> None:
    """Through the side stream, one by one."""
    base = torch.arange(20_000 * 64, dtype=torch.int32, device="cuda")
    state = {f"t{i}": part.clone() for i, part in enumerate(base.split(64))}
    async with ckptio.Engine(CONFIG) as engine:
        await engine.save(state, tmp_path / "c")
        found = await engine.load(tmp_path / "c", device="cuda")
    assert torch.equal(torch.cat([found[name] for name in state]), base)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_plug_ins_for_dcp_take_tensors_of_the_device(tmp_path: Path) -> None:
    """Behind what their stream was told, through the pool, whatever thread copies."""
    tensor = torch.zeros(12 * MiB, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        keep_busy()
        tensor.fill_(5)
        dcp_save({"t": tensor}, storage_writer=StorageWriter(tmp_path / "c", config=CONFIG))
    target = {"t": torch.zeros_like(tensor)}
    dcp_load(target, storage_reader=StorageReader(tmp_path / "c"))
    assert target["t"].unique().tolist() == [5]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("on_cuda", ["none", "some", "all"])
def test_plug_ins_for_dcp_pin_what_tensors_of_the_device_are_copied_to(
    tmp_path: Path, on_cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing for a state on the CPU, as `async_save` has made one before it is written."""
    pin, pinned = HostRegistration.pin, list[int]()

    def count(registration: HostRegistration, address: int, nbytes: int) -> None:
        pinned.append(nbytes)
        pin(registration, address, nbytes)

    monkeypatch.setattr(HostRegistration, "pin", count)
    devices = {"none": ("cpu", "cpu"), "some": ("cpu", "cuda"), "all": ("cuda", "cuda")}[on_cuda]
    state = {
        name: torch.full((20 * MiB,), 5, dtype=torch.uint8, device=device)
        for name, device in zip("ab", devices, strict=True)
    }
    dcp_save(state, storage_writer=StorageWriter(tmp_path / "c", config=CONFIG))
    assert set(pinned) == (set() if on_cuda == "none" else {CONFIG.slab_nbytes})
    assert len(pinned) <= CONFIG.num_slabs


def test_a_forked_child_is_told_that_it_cannot_use_cuda(tmp_path: Path) -> None:
    """In torch's words, and not that a device had failed."""
    program = """
import os, sys, torch, ckptio.sync
from ckptio.errors import StateError
state = {"t": torch.ones(3, device="cuda")}
child = os.fork()
if not child:
    try:
        ckptio.sync.save(state, sys.argv[1])
    except StateError as error:
        os._exit(not str(error).startswith("Cannot re-initialize CUDA in forked subprocess"))
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "c")], check=True, timeout=300)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_job_on_the_second_device_makes_no_context_on_the_first(tmp_path: Path) -> None:
    """Memory of the first device for every rank would be the price."""
    program = """
import sys, torch, ckptio.sync
torch.cuda.set_device(1)
with ckptio.sync.Engine() as engine:
    engine.prewarm()
    state = {"t": torch.ones(1 << 20, device="cuda:1")}
    engine.save(state, sys.argv[1])
    assert engine.load(sys.argv[1], device="cuda:1")["t"].sum() == 1 << 20
    engine.load(sys.argv[1], into=state)
assert not torch._C._cuda_hasPrimaryContext(0)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "c")], check=True, timeout=300)
