"""States that change while they are being copied."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

import ckptio
from ckptio import PerRank, sync
from ckptio.errors import ConfigError, StateError, StorageError, TargetError
from ckptio.events import SaveStaged
from ckptio.staging.watch import SourceWatch
from ckptio.testing import MemoryStorage, fail_kind
from tests.job_rig import job
from tests.rig import SMALL, assert_same, inline_engine, random_state
from tests.virtual import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptio import Engine
    from ckptio.events import Event
    from ckptio.handle import SaveHandle
    from ckptio.testing import Operation

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "AdamW together": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
}


@in_virtual_time
async def test_a_state_that_changes_before_it_is_copied_is_not_committed() -> None:
    """It would be of two steps; what was there before stays."""
    storage = MemoryStorage()
    async with inline_engine({"memory": storage}) as engine:
        state = random_state([3 * SMALL.slab_nbytes, 70])
        name, expected = "tensor1", {key: value.clone() for key, value in state.items()}
        await engine.save(state, "memory")
        handle = engine.save(state, "memory", overwrite=True)
        state[name].add_(1)
        with pytest.raises(StateError, match=rf"'{name}' was changed, or moved"):
            await handle
        with pytest.raises(StateError):
            await handle.staged
        assert_same(await engine.load("memory"), expected)
        assert storage.leftovers() == []
        handle = engine.save(state, "memory", overwrite=True)
        await handle.staged
        expected = {key: value.clone() for key, value in state.items()}
        state[name].add_(1)
        await handle
        assert_same(await engine.load("memory"), expected)


def _write_to_data(tensor: torch.Tensor) -> None:
    tensor.data.view(-1).add_(1)


def _write_by_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[...] = 5


def _step_fused(tensor: torch.Tensor) -> None:
    tensor.grad = torch.ones_like(tensor)
    torch.optim.SGD([tensor], lr=0.1, fused=True).step()


@pytest.mark.parametrize("change", [_write_to_data, _write_by_numpy, _step_fused])
@in_virtual_time
async def test_what_nobody_counts_is_seen_in_a_sample(
    change: Callable[[torch.Tensor], None],
) -> None:
    """Some of what was copied is looked at again when all is."""
    storage = MemoryStorage()
    async with inline_engine({"memory": storage}) as engine:
        tensor = torch.zeros(20 * SMALL.pool_nbytes // 4)
        version = tensor._version
        handle = engine.save({"w": tensor}, "memory")

        def begin(operation: Operation) -> None:
            if operation.kind == "pwrite":
                storage.fault = None
                change(tensor)

        storage.fault = begin
        with pytest.raises(StateError, match="'w' was changed, or moved"):
            await handle
        assert tensor._version == version
        await engine.save({"w": tensor}, "memory")


@in_virtual_time
async def test_a_state_that_changes_while_it_waits_for_slabs_is_not_committed() -> None:
    """Parts of it were copied by then: that is where a mixture comes from."""
    storage = MemoryStorage()
    async with inline_engine({"memory": storage}) as engine:
        state = {"w": torch.zeros(20 * SMALL.pool_nbytes // 4)}
        handle = engine.save(state, "memory")
        while not engine.statistics().leased_nbytes:
            await asyncio.sleep(0.0001)
        state["w"] += 1
        with pytest.raises(StateError, match=r"wait for handle\.staged"):
            await handle


class Learns(NamedTuple):
    """Who learns that a state is copied, when a change ends that began before."""

    before: Callable[[SaveHandle], object] = bool
    after: Callable[[SaveHandle], object] = bool


@pytest.mark.parametrize(
    "learns",
    [
        pytest.param(Learns(), id="nobody"),
        pytest.param(Learns(after=lambda handle: handle.staged.done()), id="later"),
        pytest.param(Learns(after=lambda handle: handle.fence()), id="later by a fence"),
    ],
)
@in_virtual_time
async def test_an_operation_that_ends_behind_the_copies_is_seen(learns: Learns) -> None:
    """Torch counts it when it ends; nobody who waits for `staged` has one under way."""
    storage = MemoryStorage()
    async with inline_engine({"memory": storage}) as engine:
        state = random_state([70])
        handle = engine.save(state, "memory")

        def end(operation: Operation) -> None:
            if operation.kind == "pwrite":
                state["tensor0"].add_(1)
                learns.after(handle)

        storage.fault = end
        with pytest.raises(StateError, match="'tensor0' was changed, or moved"):
            await handle
        assert storage.leftovers() == []


@pytest.mark.parametrize(
    "learns",
    [
        pytest.param(Learns(before=lambda handle: handle.staged.done()), id="by a look"),
        pytest.param(Learns(before=lambda handle: handle.staged.wait()), id="by a wait"),
        pytest.param(Learns(before=lambda handle: handle.fence()), id="by a fence"),
        pytest.param(Learns(before=lambda handle: handle.staged.wait_done()), id="by its end"),
    ],
)
@in_virtual_time
async def test_who_learns_that_a_state_is_copied_may_change_it(learns: Learns) -> None:
    """However that is, and while files are being written."""
    storage = MemoryStorage()
    async with inline_engine({"memory": storage}) as engine:
        state = random_state([70])
        expected = {key: value.clone() for key, value in state.items()}
        handle = engine.save(state, "memory")

        def change(operation: Operation) -> None:
            if operation.kind == "pwrite":
                learns.before(handle)
                state["tensor0"].add_(1)

        storage.fault = change
        await handle
        assert_same(await engine.load("memory"), expected)


@in_virtual_time
async def test_that_a_state_is_copied_is_noted_before_anybody_learns_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trainer on another thread changes it at once; that would count as too early."""
    told: list[bool] = []
    copied = SourceWatch.copied

    def note(watch: SourceWatch, *, is_known: bool) -> None:
        told.append(handle.staged.done())
        copied(watch, is_known=is_known)

    monkeypatch.setattr(SourceWatch, "copied", note)
    async with inline_engine({"memory": MemoryStorage()}) as engine:
        handle = engine.save(random_state([70]), "memory")
        await handle
    assert told == [False]


@in_virtual_time
async def test_who_hears_of_it_by_an_event_may_change_a_state() -> None:
    """An observer is told, as one who waits is."""
    state = random_state([70])
    expected = {key: value.clone() for key, value in state.items()}

    def hear(event: Event) -> None:
        if isinstance(event, SaveStaged):
            state["tensor0"].add_(1)

    async with inline_engine({"memory": MemoryStorage()}, observer=hear) as engine:
        await engine.save(state, "memory")
        assert_same(await engine.load("memory"), expected)


class Changes:
    """An object of which `state_dict()` changes a tensor beside it."""

    def __init__(self, change: Callable[[], object]) -> None:
        self._change = change

    def state_dict(self) -> dict[str, Any]:
        self._change()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is in it."""


@pytest.mark.parametrize("is_strided", [False, True])
@in_virtual_time
async def test_a_tensor_of_another_type_since_it_was_looked_at_is_refused(
    *, is_strided: bool
) -> None:
    """The manifest would speak of twice the bytes that there are, or of others."""
    parameter = torch.nn.Parameter(torch.ones(5, 3).t() if is_strided else torch.ones(5))
    changes = Changes(lambda: setattr(parameter, "data", parameter.data.half()))
    async with inline_engine({"memory": MemoryStorage()}) as engine:
        with pytest.raises(StateError, match=r"'w' was float32 and is torch\.float16 now"):
            engine.save({"w": parameter, "z": changes}, "memory")
        await engine.save({"z": changes, "w": parameter}, "memory")


@pytest.mark.parametrize("other", [torch.zeros(2, 2), torch.zeros(4, 6, dtype=torch.float64)])
@pytest.mark.parametrize("is_strided", [False, True])
@in_virtual_time
async def test_a_target_of_another_kind_since_it_was_matched_is_refused(
    other: torch.Tensor, *, is_strided: bool
) -> None:
    """Its memory has room for less, or takes other elements."""
    values = torch.ones(4, 6)
    parameter = torch.nn.Parameter(torch.zeros(6, 4).t() if is_strided else torch.zeros(4, 6))
    changes = Changes(lambda: setattr(parameter, "data", other.clone()))
    async with inline_engine({"memory": MemoryStorage()}) as engine:
        await engine.save({"w": values, "z": Changes(bool)}, "memory")
        with pytest.raises(TargetError, match=r"'w' was changed to \([24], [26]\) of torch"):
            await engine.load("memory", into={"w": parameter, "z": changes})
        assert not parameter.any()


@pytest.mark.parametrize("ends", [StorageError, asyncio.CancelledError])
@in_virtual_time
async def test_a_load_that_fails_has_counted_what_it_wrote(ends: type[BaseException]) -> None:
    """Some of it is there: autograd's copies, and saves under way, must not go by the old."""
    storage = MemoryStorage()
    async with inline_engine({"memory": storage}) as engine:
        await engine.save({"w": torch.ones(20 * SMALL.pool_nbytes // 4)}, "memory")
        target = torch.zeros(20 * SMALL.pool_nbytes // 4)
        versions: list[int] = []
        load = asyncio.ensure_future(engine.load("memory", into={"w": target}))

        def fail(operation: Operation) -> None:
            if operation.kind == "pread_into":
                versions.append(target._version)
                if len(versions) == 25 and ends is asyncio.CancelledError:
                    load.cancel()
                elif len(versions) == 25:
                    raise StorageError("a test", path="memory")

        storage.fault = fail
        with pytest.raises(ends):
            await load
        assert 0 < target.count_nonzero() < target.numel()
        assert 0 < versions[0] <= versions[-1] < target._version


MOVES: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "half": lambda p: torch.nn.ParameterList([p]).half(),
    "data": lambda p: setattr(p, "data", p.data.clone()),
    "shared": lambda p: p.share_memory_(),
    "resized": lambda p: p.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("name", MOVES)
@in_virtual_time
async def test_a_state_that_moves_in_memory_is_not_committed(
    name: str, *, is_strided: bool
) -> None:
    """Its old memory may be somebody else's by then; torch counts no write."""
    storage = MemoryStorage()
    async with inline_engine({"memory": storage}) as engine:
        values = torch.arange(2.0 * SMALL.pool_nbytes).view(2, -1)
        moved = torch.nn.Parameter(values.t() if is_strided else values)
        version = moved._version
        first = torch.zeros(20 * SMALL.pool_nbytes // 4)
        handle = engine.save({"a": first, "w": moved}, "memory")
        while not engine.statistics().leased_nbytes:
            await asyncio.sleep(0.0001)
        MOVES[name](moved)
        assert moved._version == version
        with pytest.raises(StateError, match="'w' was changed, or moved in memory"):
            await handle
        assert storage.leftovers() == []


@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("name", ["data", "shared"])
@in_virtual_time
async def test_nothing_is_written_where_a_target_was(name: str, *, is_strided: bool) -> None:
    """A target that moves while others are filled is not: its old memory may be another's."""
    storage = MemoryStorage()
    async with inline_engine({"memory": storage}) as engine:
        values = torch.arange(2.0 * SMALL.pool_nbytes).view(2, -1)
        await engine.save({"w": values.t().clone() if is_strided else values}, "memory")
        memory = torch.zeros_like(values)
        moved = torch.nn.Parameter(memory.t() if is_strided else memory)
        seen: list[int] = []

        def move(operation: Operation) -> None:
            if operation.kind == "pread_into" and not seen:
                seen.append(moved.data_ptr())
                MOVES[name](moved)

        storage.fault = move
        with pytest.raises(TargetError, match="moved in memory"):
            await engine.load("memory", into={"w": moved})
        assert moved.data_ptr() != seen[0]
        assert not moved.any()
        if name == "data":  # what was shared has taken its memory along
            assert not memory.any()
        storage.fault = None
        await engine.load("memory", into={"w": moved})
        assert torch.equal(moved, values.t() if is_strided else values)


@pytest.mark.parametrize("name", OPTIMIZERS)
@in_virtual_time
async def test_a_step_of_an_optimizer_is_seen(name: str) -> None:
    """Whichever of torch's ways it takes; of a fused one torch counts the step, no parameters."""
    model = torch.nn.Linear(3, 3)
    optimizer = OPTIMIZERS[name](model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    async with inline_engine({"memory": MemoryStorage()}) as engine:
        handle = engine.save({"model": model, "optimizer": optimizer}, "memory")
        optimizer.step()
        with pytest.raises(StateError, match="was changed, or moved"):
            await handle


@in_virtual_time
async def test_what_training_does_until_the_step_is_no_change() -> None:
    """Forward and backward may go on while a state is copied."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(), torch.nn.GELU())
    with torch.inference_mode():
        made = torch.ones(5)
    async with inline_engine({"memory": MemoryStorage()}) as engine:
        handle = engine.save({"model": model, "made": made}, "memory")
        model(torch.ones(1, 3)).sum().backward()
        model.requires_grad_(requires_grad=False)
        model.state_dict()
        await handle


@in_virtual_time
async def test_a_state_that_changes_on_one_rank_is_committed_by_none() -> None:
    """The others hear why."""
    place = MemoryStorage("memory")
    async with job(2, place) as ranks:
        own = [torch.ones(9), torch.ones(9)]
        states = [{"own": PerRank(tensor), "all": torch.ones(5)} for tensor in own]

        async def body(rank: int, engine: Engine) -> None:
            handle = engine.save(states[rank], "memory")
            if rank == 1:
                own[1].add_(1)
            await handle

        ends = await ranks.each(body)
        assert all("'own~rank1' was changed" in str(end) for end in ends)
    assert place.leftovers() == []


@pytest.mark.usefixtures("no_collections")
@in_virtual_time
async def test_the_handle_of_a_save_that_failed_before_its_copies_holds_no_state() -> None:
    """A trainer may keep it to say later what went wrong."""
    storage = MemoryStorage(fault=fail_kind("begin"))
    async with inline_engine({"memory": storage}) as engine:
        state = random_state([20 * SMALL.pool_nbytes])
        kept = weakref.ref(state["tensor0"])
        handle = engine.save(state, "memory")
        del state
        with pytest.raises(StorageError):
            await handle
        assert kept() is None
        assert handle.done()


def test_a_save_that_an_observer_is_refused_holds_no_state(tmp_path: Path) -> None:
    """The engine remembers its handle, which refers to what looks at the tensors."""

    async def scenario() -> None:
        refused: list[weakref.ref[torch.Tensor]] = []

        def save_again(event: Event) -> None:
            if isinstance(event, SaveStaged):
                tensor = torch.ones(300)
                refused.append(weakref.ref(tensor))
                with pytest.raises(ConfigError, match="can neither call the engine"):
                    engine.save({"w": tensor}, path)

        async with ckptio.Engine(SMALL, observer=save_again) as engine:
            await engine.save({"w": torch.ones(3)}, path)
            gc.collect()
            assert [ref() for ref in refused] == [None]
            assert all(save.committed.done() for save in engine._core.saves)  # it has no end

    path = tmp_path / "c"
    asyncio.run(scenario())


def test_a_save_goes_on_whole_behind_an_interrupt_that_comes_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors are being copied by then: they are not let go."""
    state = random_state([SMALL.pool_nbytes * 8])
    with sync.Engine(SMALL) as engine:
        begin = engine._core.submit

        def interrupted(*arguments: Any) -> Any:
            begin(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(engine._core, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.start_save(state, tmp_path / "c")
    assert_same(sync.load(tmp_path / "c"), state)
