"""Tests for seeing what code of others does to what was filled."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ckptio import MismatchError, TargetError, sync
from ckptio.state.samples import some_of
from tests.rig import SMALL
from tests.state.ranks import as_rank, load, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Linear = torch.nn.Linear


def copy_to(into: torch.nn.Module, of: torch.nn.Module) -> None:
    with torch.no_grad():
        for a, b in zip(into.parameters(), of.parameters(), strict=True):
            a.data.copy_(b)


class Average:
    """Averaged weights, which are copied to their model as soon as they are loaded."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.shadow = Linear(2, 2)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow.load_state_dict(state["shadow"])
        copy_to(self.model, self.shadow)


class Synced(torch.nn.Module):
    """Two networks, of which the second is like the first whenever that is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = Linear(2, 2), Linear(2, 2)
        self.online.register_load_state_dict_post_hook(lambda *_: copy_to(self.target, self.online))


class Resetting(torch.nn.Module):
    """Makes its layers anew before they are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Linear(2, 2)

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: Any) -> None:
        del state
        self.layer.reset_parameters()


def averaged() -> dict[str, Any]:
    model = Linear(2, 2)
    return {"average": Average(model), "model": model}


def hooked() -> dict[str, Any]:
    """Make an optimizer that makes its model anew."""
    model = Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_load_state_dict_post_hook(lambda _: model.reset_parameters())
    return {"optimizer": optimizer, "model": model}


class Zeroing:
    """Has an optimizer begin again."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state
        for moments in self.optimizer.state.values():
            moments["exp_avg"].zero_()


def stepped() -> dict[str, Any]:
    model = Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return {"zeroing": Zeroing(optimizer), "optimizer": optimizer}


def beside() -> dict[str, Any]:
    """Make a module of which one part makes another anew, before it is loaded itself."""
    first, second = Linear(2, 2), Linear(2, 2)
    first.register_load_state_dict_pre_hook(lambda *_: second.reset_parameters())
    return {"m": torch.nn.Sequential(first, second)}


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "an average": averaged,
    "a post hook": lambda: {"m": Synced()},
    "a pre-hook": beside,
    "extra state": lambda: {"m": Resetting()},
    "a hook of an optimizer": hooked,
    "moments": stepped,
}


@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
def test_what_others_write_to_before_it_is_taken_is_no_load(
    make: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    """With `torch.load`, what is stored comes after it."""
    state = make()
    sync.save(state, tmp_path / "x", config=SMALL)
    target = make()
    with pytest.raises(TargetError, match=r"was filled, and then written to, by .*without into="):
        sync.load(tmp_path / "x", into=target, config=SMALL)
    found, made = sync.load(tmp_path / "x", config=SMALL), make()
    for name, each in made.items():
        each.load_state_dict(found[name])
    for name in made.keys() & {"model", "m"}:
        pairs = zip(made[name].parameters(), state[name].parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_what_others_write_to_afterwards_is_theirs(tmp_path: Path) -> None:
    """As with `torch.load`; nor does it matter who reads, or copies a tensor to itself."""
    state = {"new": torch.ones(2), **dict(reversed(averaged().items()))}
    sync.save(state, tmp_path / "x", config=SMALL)
    target = {"new": torch.zeros(2, device="meta"), **dict(reversed(averaged().items()))}
    sync.load(tmp_path / "x", into=target, config=SMALL)
    assert torch.equal(target["model"].weight, state["average"].shadow.weight)
    twice: dict[str, Any] = {"average": Average(Linear(2, 2))}
    twice["shadow"] = twice["average"].shadow
    sync.save(twice, tmp_path / "y", config=SMALL)
    sync.load(tmp_path / "y", into=twice, config=SMALL)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_module_that_takes_no_hooks_is_taken_all_the_same(tmp_path: Path) -> None:
    """As compiled by TorchScript, beside an object with code of its own."""
    scripted = torch.jit.script(Linear(2, 2))
    state = {"average": Average(Linear(2, 2)), "m": scripted}
    sync.save(state, tmp_path / "x", config=SMALL)
    target: dict[str, Any] = {"average": Average(Linear(2, 2)), "m": torch.jit.script(Linear(2, 2))}
    sync.load(tmp_path / "x", into=target, config=SMALL)
    assert torch.equal(target["m"].weight, scripted.weight)


class Copying(torch.nn.Module):
    """Keeps a copy of a network of its own, made whenever that is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.online = Linear(2, 2)
        self.copies: list[torch.nn.Module] = []
        self.online.register_load_state_dict_post_hook(
            lambda module, _: self.copies.append(copy.deepcopy(module))
        )

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        found = super().load_state_dict(*args, **options)
        self.copies.append(copy.deepcopy(self.online))
        return found


def test_nothing_stays_with_a_module_that_was_looked_at(tmp_path: Path) -> None:
    """Nor with copies that it makes of its parts meanwhile: they load again, as torch does."""
    target = Copying()
    sync.save({"m": Copying(), "n": Linear(2, 2)}, tmp_path / "x", config=SMALL)
    sync.load(tmp_path / "x", into={"m": target, "n": Linear(2, 2)}, config=SMALL)
    assert len(target.copies) == 2
    for part in (target, target.online, *target.copies):
        part.load_state_dict(copy.deepcopy(part.state_dict()))


def test_a_module_whose_list_of_modules_has_that_name_is_loaded(tmp_path: Path) -> None:
    """What torch itself does not ask for may be something else."""
    state, target = Linear(2, 2), Linear(2, 2)
    target.modules = [1]  # type: ignore[method-assign, assignment]
    sync.save({"m": state}, tmp_path / "x", config=SMALL)
    sync.load(tmp_path / "x", into={"m": target}, config=SMALL)
    assert torch.equal(target.weight, state.weight)
    sync.save({"m": {"weight": state.weight, "more": 1}}, tmp_path / "y", config=SMALL)
    with pytest.raises(MismatchError, match=r"'m\.bias'.*'m\.more'"):
        sync.load(tmp_path / "y", into={"m": target}, config=SMALL)


TARGETS: dict[str, Callable[[torch.nn.Module], dict[str, Any]]] = {
    "a state": lambda model: {"model": model.state_dict()},
    "parameters": lambda model: {"model": dict(model.named_parameters())},
    "others behind": lambda model: {
        "model": model.state_dict(),
        "other": Average(Linear(2, 2)),
    },
}


@pytest.mark.parametrize("make", TARGETS.values(), ids=TARGETS)
def test_tensors_that_no_object_has_are_taken_in_their_place(
    make: Callable[[torch.nn.Module], dict[str, Any]], tmp_path: Path
) -> None:
    """Whoever writes to them before is refused; whoever does so afterwards is not."""
    state = {"average": Average(Linear(2, 2)), **make(Linear(2, 2))}
    sync.save(state, tmp_path / "x", config=SMALL)
    model = Linear(2, 2)
    target = {"average": Average(model), **make(model)}
    with pytest.raises(TargetError, match=r"'model\.weight' was filled, and then written to"):
        sync.load(tmp_path / "x", into=target, config=SMALL)
    behind = {**make(model), "average": Average(model)}
    sync.load(tmp_path / "x", into=behind, config=SMALL)
    assert torch.equal(model.weight, behind["average"].shadow.weight)


def plain(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


SHAPES: dict[str, tuple[Callable[[], torch.Tensor], tuple[Any, ...], torch.dtype | None]] = {
    "first row": (lambda: plain(100, 100), (0,), None),
    "last element": (lambda: plain(100, 100), (99, 99), None),
    "another order": (lambda: plain(8, 8, 8, 8).to(memory_format=torch.channels_last), (3,), None),
    "an even order": (lambda: plain(8, 64).t(), (slice(None), 3), None),
    "with gaps": (lambda: plain(100, 100)[:, ::2], (slice(None), 0), None),
    "conjugate": (lambda: plain(50).to(torch.complex64).conj(), (7,), None),
    "one element": (lambda: plain(1, 1, 1).expand(1, 1, 1), (0,), None),
    "no dimension": (plain, (), None),
    "another type": (lambda: plain(100).to(torch.bfloat16), (slice(40, 60),), torch.bfloat16),
}


@pytest.mark.parametrize(("make", "where", "dtype"), SHAPES.values(), ids=SHAPES)
def test_what_is_written_to_is_seen_wherever_it_is(
    make: Callable[[], torch.Tensor],
    where: tuple[Any, ...],
    dtype: torch.dtype | None,
    tmp_path: Path,
) -> None:
    """Some bytes of all parts of each tensor are looked at, in whatever order it lies."""
    target = make()

    class Writing:
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            del state
            target[where] = 3

    saved = torch.zeros(target.shape, dtype=None if dtype else target.dtype)
    sync.save({"a": Writing(), "t": saved}, tmp_path / "x", config=SMALL)
    with pytest.raises(TargetError, match="'t' was filled, and then written to"):
        sync.load(tmp_path / "x", into={"a": Writing(), "t": target}, dtype=dtype, config=SMALL)
    sync.load(tmp_path / "x", into={"t": target, "a": Writing()}, dtype=dtype, config=SMALL)
    assert target[where].real.eq(3).all()


def sharded_average(rank: int) -> dict[str, Any]:
    """Make averaged weights and their model, of which this rank holds some rows."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=(f"x{rank}",))
    state = averaged()
    for module in (state["average"].shadow, state["model"]):
        for name, parameter in list(module.named_parameters()):
            part = DTensor.from_local(parameter.detach()[:1].clone(), mesh, [Shard(0)])
            setattr(module, name, torch.nn.Parameter(part))
    return state


@pytest.mark.parametrize("is_state", [False, True])
def test_what_a_rank_holds_in_part_is_looked_at(*, is_state: bool) -> None:
    """A module of DTensors, and its state."""

    def target() -> dict[str, Any]:
        state = sharded_average(0)
        return {**state, "model": state["model"].state_dict()} if is_state else state

    saved = save(2, sharded_average)
    with as_rank(0, 2), pytest.raises(TargetError, match=r"'model\.weight' was filled, and then"):
        load(saved, target())


def test_code_that_is_compiled_while_others_are_looked_at_runs(tmp_path: Path) -> None:
    """What looks at tensors is nothing that a compiler could trace."""

    @torch.compile(backend="eager", fullgraph=True)
    def doubled(weight: torch.Tensor) -> torch.Tensor:
        return (weight * 2).copy_(weight)

    target, state = Linear(2, 2), Linear(2, 2)
    found: list[torch.Tensor] = []
    target.register_load_state_dict_post_hook(lambda m, _: found.append(doubled(m.weight.data)))
    sync.save({"m": state}, tmp_path / "x", config=SMALL)
    sync.load(tmp_path / "x", into={"m": target}, config=SMALL)
    assert torch.equal(target.weight, state.weight)
    assert torch.equal(found[0], state.weight)


def test_a_default_device_hides_nothing(tmp_path: Path) -> None:
    """What is in the host's memory is looked at there, whatever device tensors are made on."""
    sync.save(averaged(), tmp_path / "x", config=SMALL)
    target = averaged()
    with torch.device("meta"), pytest.raises(TargetError, match="filled, and then written to"):
        sync.load(tmp_path / "x", into=target, config=SMALL)


def test_memory_that_is_gone_is_left_alone() -> None:
    """It is not made again to look at it, and nothing in it has changed."""
    tensor = torch.arange(1000.0)
    parts = tensor, tensor.view(10, 100).t(), tensor[1::2], tensor[::2]
    for nbytes, num_there in ((4000, 4), (3999, 1), (3996, 1), (3995, 0), (0, 0)):
        tensor.untyped_storage().resize_(nbytes)
        found = [some_of(part) is not None for part in parts]
        assert found == [False] * (4 - num_there) + [True] * num_there
    assert tensor.untyped_storage().nbytes() == 0


SIZES = [(1000, 1000), (100, 10, 10, 4), (3, 100_000), (100_000, 6), (1, 1, 5000), (2,) * 13]


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_of_any_tensor_with_gaps_as_much_is_looked_at(shape: tuple[int, ...]) -> None:
    """About 500 elements, or 500 to 1,000 bytes; and nothing in the gaps."""
    for dtype, fewest, most in ((torch.uint8, 480, 512), (torch.float32, 500, 1100)):
        tensor = torch.zeros(shape, dtype=dtype)
        part = tensor[..., ::2]
        before = some_of(part)
        assert before is not None
        assert fewest <= len(before) <= most
        tensor[..., 1::2] = 3
        assert some_of(part) == before
        part[:] = 3
        assert some_of(part) != before


def test_of_what_has_no_memory_of_its_own_little_or_nothing_is_looked_at() -> None:
    assert some_of(torch.zeros(4).expand(1 << 20, 1 << 20, 4))
    assert some_of(torch.eye(3).to_sparse()) is None
