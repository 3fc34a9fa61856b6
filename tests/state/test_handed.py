"""What an object is given to load: never the memory that it may write to meanwhile."""

from __future__ import annotations

import contextlib
import copy
import enum
import io
import weakref
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ckptio import PerRank, Shard, sync
from ckptio.errors import MismatchError, TargetError
from ckptio.state.handed import handed_to
from tests.rig import SMALL
from tests.strategies import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def loaded_both(tmp_path: Path, saved: Any, target: Any, **options: Any) -> tuple[Any, Any]:
    """Load into a target, and into a copy of it as torch does."""
    other, file = copy.deepcopy(target), io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=False))
    sync.save({"x": saved}, tmp_path / "c", config=SMALL, overwrite=True)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL, **options)
    return target, other


class Mean:
    """A mean that starts anew before it takes another."""

    def __init__(self, *values: float) -> None:
        self.total, self.parts = torch.tensor(values, dtype=torch.float32), np.array(values)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "parts": PerRank(self.parts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total.zero_()
        self.parts[:] = 0
        self.total += state["total"]
        parts = state["parts"]
        self.parts += parts.value if isinstance(parts, PerRank) else parts


class Sum(Mean):
    """One that adds what it is given to what it has."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total += state["total"]


class Pair:
    """Two that are swapped when they are loaded."""

    def __init__(self, one: float, two: float) -> None:
        self.total = torch.tensor([one, two])
        self.one, self.two = self.total[:1], self.total[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"both": {"one": self.one, "two": [self.two], "own": self.one}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.one.copy_(state["both"]["two"][0])
        self.two.copy_(state["both"]["one"])


@pytest.mark.parametrize(
    ("saved", "target"),
    [(Mean(1, 2), Mean(3, 4)), (Sum(1, 2), Sum(3, 4)), (Pair(1, 2), Pair(3, 4))],
    ids=lambda value: type(value).__name__,
)
def test_an_object_may_write_to_its_own(tmp_path: Path, saved: Any, target: Any) -> None:
    """Before it reads what it is given: that is as it is with `torch.load`."""
    target, other = loaded_both(tmp_path, saved, target)
    assert target.total.tolist() == other.total.tolist()


def test_what_is_not_loaded_is_given_as_a_copy(tmp_path: Path) -> None:
    """It would be gone, too."""
    sync.save({"x": {"total": torch.ones(2)}}, tmp_path / "c", config=SMALL)
    target = Mean(3, 4)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL, strict="ignore")
    assert target.total.tolist() == [1.0, 1.0]
    sync.save({"x": Pair(1, 2)}, tmp_path / "d", config=SMALL)
    pair = Pair(3, 4)
    sync.load(tmp_path / "d", {"x": pair}, config=SMALL, select="x.both.two")
    assert pair.total.tolist() == [2.0, 3.0]


def swap(state: dict[str, Any], prefix: str, *_: Any) -> None:
    one, two = state[f"{prefix}weight"], state[f"{prefix}twin"]
    state[f"{prefix}weight"], state[f"{prefix}twin"] = two, one


class Turned(torch.nn.Module):
    """A module whose older releases had other names and other dimensions."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(4.0).reshape(2, 2) + start)
        self.twin = torch.nn.Parameter(torch.arange(4.0).reshape(2, 2) - start)


class Overriding(Turned):
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()
        super()._load_from_state_dict(state_dict, prefix, *args)


class Whole(Turned):
    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        turned = {name: value.t() for name, value in state_dict.items()}
        return super().load_state_dict(turned, *args, **options)


def hooked(start: float = 0.0) -> torch.nn.Module:
    module = Turned(start)
    register: Any = module.register_load_state_dict_pre_hook
    register(lambda _, *args: swap(*args))
    return module


@pytest.mark.parametrize("make", [hooked, Overriding, Whole], ids=["hook", "override", "whole"])
def test_a_module_may_turn_what_it_is_given(
    tmp_path: Path, make: Callable[[float], torch.nn.Module]
) -> None:
    """By a hook, or by code of its own; and what has none beside it is filled where it is."""
    saved = torch.nn.ModuleDict({"turned": Turned(10), "plain": torch.nn.Linear(2, 2)})
    target = torch.nn.ModuleDict({"turned": make(0), "plain": torch.nn.Linear(2, 2)})
    if make is Whole:
        saved, target = Turned(10), make(0)  # type: ignore[assignment]  # such is called at the root
    else:
        handed = handed_to("x", target, target.state_dict())
        assert handed is not None
        state = target.state_dict()
        names = ("turned.weight", "plain.weight")
        assert [handed.is_new(f"x.{name}", state[name]) for name in names] == [True, False]
    target, other = loaded_both(tmp_path, saved, target)
    for name, value in other.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name


@pytest.mark.parametrize("name", ["weight", "twin"])
def test_tied_parameters_under_a_hook_need_one_name(tmp_path: Path, name: str) -> None:
    """The other is given what that one is, not what it had."""
    target = Turned()
    target.twin = target.weight
    register: Any = target.register_load_state_dict_pre_hook
    register(lambda *_: None)
    value = torch.full((2, 2), 7.0)
    sync.save({"x": {name: value}}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert torch.equal(target.weight, value)
    assert target.twin is target.weight


def test_an_optimizer_may_turn_what_it_is_given(tmp_path: Path) -> None:
    """By a hook that runs before."""

    def stepped(*, hooked: bool) -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.arange(2.0) + hooked
        optimizer = torch.optim.Adam([weight])
        optimizer.step()

        def turn(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
            for own in optimizer.state.values():
                own["exp_avg"].zero_()
            moments = state["state"][0]
            moments["exp_avg"], moments["exp_avg_sq"] = moments["exp_avg_sq"], moments["exp_avg"]

        if hooked:
            optimizer.register_load_state_dict_pre_hook(turn)
        return optimizer

    saved, target = stepped(hooked=False), stepped(hooked=True)
    expected = saved.state_dict()["state"][0]
    sync.save({"x": saved}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    state = target.state_dict()["state"][0]
    assert torch.equal(state["exp_avg"], expected["exp_avg_sq"])
    assert torch.equal(state["exp_avg_sq"], expected["exp_avg"])


def test_torchs_own_are_filled_where_they_are() -> None:
    """No second copy of them is made."""
    norm = torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2))
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2), norm, torch.nn.LSTM(2, 2))
    optimizer = torch.optim.AdamW(module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for target in (module, optimizer, scheduler):
        assert handed_to("x", target, target.state_dict()) is None


class AppState:
    """Hands on to the module and the optimizer that it has, and has something of its own."""

    def __init__(self, value: float, hook: Any = None) -> None:
        self.model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(self.model.weight, value)
        if hook is not None:
            self.model.register_load_state_dict_pre_hook(hook)
        self.optimizers = [torch.optim.AdamW(self.model.parameters())]
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizers[0].step()
        self.mean = torch.tensor([value])
        self.given: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        optimizer = self.optimizers[0].state_dict()
        return {"model": self.model.state_dict(), "optimizer": optimizer, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state
        self.mean.zero_()
        self.model.load_state_dict(state["model"])
        self.optimizers[0].load_state_dict(state["optimizer"])
        self.mean += state["mean"]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two states of such objects are equal."""
    moments = zip(a["optimizer"]["state"].values(), b["optimizer"]["state"].values(), strict=True)
    pairs = [*zip(a["model"].values(), b["model"].values(), strict=True), (a["mean"], b["mean"])]
    pairs += [(x[name], y[name]) for x, y in moments for name in x]
    return all(torch.equal(x, y) for x, y in pairs)


def test_what_an_object_hands_on_to_torch_is_filled_where_it_is(tmp_path: Path) -> None:
    """A model and its optimizer are not there twice; what the object has besides is."""
    saved = AppState(1.0)
    target, other = loaded_both(tmp_path, saved, AppState(2.0))
    assert same(target.state_dict(), other.state_dict())
    given = target.given
    assert given["model"]["weight"].data_ptr() == target.model.weight.data_ptr()
    assert given["mean"].data_ptr() != target.mean.data_ptr()
    before = AppState(2.0)
    moments = [s["exp_avg"].data_ptr() for s in before.optimizers[0].state.values()]
    sync.load(tmp_path / "c", {"x": before}, config=SMALL)
    found = [state["exp_avg"].data_ptr() for state in before.given["optimizer"]["state"].values()]
    assert found == moments


class Attributes:
    """An object whose state is all that it has."""

    def __init__(self, n: int) -> None:
        self.model, self.n = torch.nn.Linear(2, 2), n
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def state_dict(self) -> dict[str, Any]:
        return self.__dict__

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class HandsOn(Attributes):
    """One that knows that states come back."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.n = state["n"]


@pytest.mark.parametrize("kind", [Attributes, HandsOn])
def test_objects_in_the_state_of_an_object_stay_what_they_are(
    tmp_path: Path, kind: type[Attributes]
) -> None:
    """They take their states, whether or not it puts the dicts of these in their places."""
    saved, target = kind(5), kind(1)
    saved.model(torch.ones(1, 2)).sum().backward()
    saved.optimizer.step()
    model, optimizer = target.model, target.optimizer
    sync.save({"x": saved}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert (target.model is model, target.optimizer is optimizer, target.n) == (True, True, 5)
    assert torch.equal(model.weight, saved.model.weight)
    found = optimizer.state[model.weight]["momentum_buffer"]
    assert torch.equal(found, saved.optimizer.state[saved.model.weight]["momentum_buffer"])
    if kind is HandsOn:
        return
    target.model = None  # type: ignore[assignment]  # as one that is made later
    sync.save({"x": target}, tmp_path / "d", config=SMALL)
    sync.load(tmp_path / "d", {"x": saved}, config=SMALL)
    assert saved.model is None


def net_of(value: float, device: str = "cpu") -> torch.nn.Linear:
    net = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(net.weight, value)
    return net.to(device)


class Has:
    """An object whose state is all that it has, of which that may be anything."""

    net: Any
    part: Any
    n: Any
    dataset: Any

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def state_dict(self) -> dict[str, Any]:
        return OrderedDict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Locked(Has):
    """One that lets nobody change it."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


class Queued(Has):
    """One that has its parts in a queue, and gives a list of them."""

    def state_dict(self) -> dict[str, Any]:
        return {"net": list(self.net)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net = deque(state["net"], 3)


class Listed(Has):
    """One that gives what it has in a list, or in what is made of one."""

    form: Any = list

    def state_dict(self) -> Any:
        return self.form([self.net, self.n])

    def load_state_dict(self, state: Any) -> None:
        self.net, self.n = state


class Tupled(Listed):
    form = tuple


class Copying(Has):
    """One that gives copies of its parts."""

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))


class Giving(Has):
    """One that gives the state of its part, and takes as its part what it gets."""

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict()}


class GivingPart(Has):
    """One that hands on to its part, which takes as parts what it gets."""

    def state_dict(self) -> dict[str, Any]:
        return {"part": self.part.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.part.load_state_dict(state["part"])


class Slotted:
    """One that has its part in a slot, and calls it otherwise in its state."""

    __slots__ = ("net",)

    def __init__(self, net: torch.nn.Module) -> None:
        self.net = net

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.net}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net = state["model"]


class Hiding:
    """One whose slot Python names after its class."""

    __slots__ = ("__net",)

    def __init__(self, net: torch.nn.Module) -> None:
        self.__net = net

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.__net}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__net = state["model"]

    @property
    def shown(self) -> Any:
        return self.__net


def by_name(net: Any) -> Has:
    """Make one that has parts by name; in another order each time, and something beside them."""
    names = {"a": net, "b": net_of(3)}
    is_saved = not net.weight.is_meta and net.weight[0, 0] == 1
    return Has(net=dict(reversed(names.items())) if is_saved else names)


PARTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a queue": (lambda net: Queued(net=deque([net], 3)), lambda held: held.net[0]),
    "a hidden slot": (Hiding, lambda held: held.shown),
    "another order": (by_name, lambda held: held.net["a"]),
    "given in a list": (lambda net: Listed(net=net, n=1), lambda held: held.net),
    "given in a tuple": (lambda net: Tupled(net=net, n=1), lambda held: held.net),
    "given as a copy": (lambda net: Copying(net=net, n=1), lambda held: held.net),
    "given as a list of copies": (lambda net: Copying(net=[net]), lambda held: held.net[0]),
    "given as a state": (lambda net: Giving(net=net), lambda held: held.net),
    "in a part": (lambda net: GivingPart(part=Has(net=[net])), lambda held: held.part.net[0]),
    "in a part of states": (lambda net: GivingPart(part=Giving(net=net)), lambda h: h.part.net),
    "a list": (lambda net: Has(net=[net, 1]), lambda held: held.net[0]),
    "a tuple": (lambda net: Has(net=(net,)), lambda held: held.net[0]),
    "a dict of lists": (lambda net: Has(net={"a": [net]}), lambda held: held.net["a"][0]),
    "a part": (lambda net: Has(part=Has(net=net)), lambda held: held.part.net),
    "a list of parts": (lambda net: Has(p=[Has(net=net)]), lambda held: held.p[0].net),
    "a locked one": (lambda net: Locked(net=net), lambda held: held.net),
    "a slot": (Slotted, lambda held: held.net),
    "itself": (lambda net: Has(net=net, n=1), lambda held: held.net),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("make", "find"), PARTS.values(), ids=PARTS)
def test_parts_stay_wherever_an_object_has_them(
    make: Callable[[Any], Any], find: Callable[[Any], Any], device: str, tmp_path: Path
) -> None:
    """In lists, slots, other parts; and those on the meta device get tensors."""
    net = net_of(0, device)
    target = make(net)
    sync.save({"x": make(net_of(1))}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert find(target) is net
    assert net.weight.eq(1).all()


class Counted:
    """A part that has a number alone."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def test_parts_stay_where_a_state_is_all_numbers_and_words(tmp_path: Path) -> None:
    """Such a state is handed over as it is, to those that have no parts alone."""
    sync.save({"x": Has(part=Counted(1), n={"more": 1})}, tmp_path / "c", config=SMALL)
    target = Has(part=Counted(0), n={})
    part = target.part
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert target.part is part
    assert part.number == 1


class Pool:
    """Has workers, and keeps what it is given for those that it makes later, if need be."""

    def __init__(self, *numbers: int) -> None:
        self.workers: list[Any] = [Counted(number) for number in numbers]
        self.names = [str(number) for number in numbers]

    def state_dict(self) -> dict[str, Any]:
        return {"w": [worker.state_dict() for worker in self.workers], "t": torch.ones(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.workers = list(state["w"])


def test_who_gives_states_makes_of_them_what_it_likes(tmp_path: Path) -> None:
    """As many as are stored, and nothing comes back in the place of them."""
    sync.save({"x": Pool(1, 2, 3)}, tmp_path / "c", config=SMALL)
    for target in (Pool(4, 5), Pool(4, 5, 6)):
        sync.load(tmp_path / "c", {"x": target}, config=SMALL)
        assert target.workers == [{"number": number} for number in (1, 2, 3)]


NUMBERED: dict[str, Callable[[int], Any]] = {
    "a list": lambda n: [Counted(n), Counted(n + 1)],
    "a tuple": lambda n: (Counted(n), n),
    "a dict": lambda n: {"a": Counted(n), "n": n},
    "lists in a dict": lambda n: {"a": [Counted(n)], "b": [[Counted(n + 1)]]},
}


def numbers_in(value: Any) -> Any:
    """Give the numbers in parts, in the form in which the parts are held."""
    if isinstance(value, (list, tuple)):
        return [numbers_in(item) for item in value]
    if isinstance(value, dict):
        return {key: numbers_in(item) for key, item in value.items()}
    return f"counted {value.number}" if isinstance(value, Counted) else value


@pytest.mark.parametrize("make", NUMBERED.values(), ids=NUMBERED)
def test_parts_of_who_is_not_asked_take_just_as_many_states(
    tmp_path: Path, make: Callable[[int], Any]
) -> None:
    """In lists and dicts, whatever is beside them there; others may be for parts made later."""
    sync.save({"x": Has(part=make(3))}, tmp_path / "c", config=SMALL)
    target, other = Has(part=make(7)), Has(part=[Counted(7)] * 3)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert type(target.part) is type(make(0))
    assert numbers_in(target.part) == numbers_in(make(3))
    sync.load(tmp_path / "c", {"x": other}, config=SMALL)
    assert "counted" not in str(numbers_in(other.part))


@pytest.mark.parametrize("make", [Counted, net_of], ids=["not asked", "asked"])
@pytest.mark.parametrize("gives_parts", [False, True])
def test_a_part_of_two_names_takes_the_state_of_the_one_that_is_handed_on(
    tmp_path: Path, make: Callable[[int], Any], *, gives_parts: bool
) -> None:
    """The other name, which was for it as yet, has the dict: another state than it has itself."""

    class Best(Has):
        def state_dict(self) -> dict[str, Any]:
            held = vars(self).items()
            return {k: part if gives_parts else part.state_dict() for k, part in held}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.net.load_state_dict(state["net"])
            self.part = state["part"]

    net = make(7)
    sync.save({"x": Best(net=make(1), part=make(2))}, tmp_path / "c", config=SMALL)
    target = Best(net=net, part=net)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert target.net is net
    assert isinstance(target.part, dict)
    assert net.number == 1 if isinstance(net, Counted) else net.weight.eq(1).all()
    both = Has(net=net, part=net)
    sync.save({"x": Has(net=net, part=net)}, tmp_path / "d", config=SMALL)
    sync.load(tmp_path / "d", {"x": both}, config=SMALL)
    assert both.net is both.part is net


def test_parts_of_which_some_are_handed_their_states_all_take_them(tmp_path: Path) -> None:
    class Half(Has):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.part[0].load_state_dict(state["part"][0])
            self.part[1] = state["part"][1]

    sync.save({"x": Has(part=[Counted(1), Counted(2)])}, tmp_path / "c", config=SMALL)
    target = Half(part=[Counted(3), Counted(4)])
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert numbers_in(target.part) == ["counted 1", "counted 2"]


def test_states_in_the_place_of_parts_are_noted(tmp_path: Path) -> None:
    """Of who is not asked, and of who gives states; not where they are handed on."""

    class Handing(Has):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.part["a"].load_state_dict(state["part"]["a"])
            self.part["c"] = state["part"]["c"]

    class Remaking(Giving):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.net = dict(state["net"])

    def notes_of(saved: Any, target: Any) -> tuple[str, ...]:
        sync.save({"x": saved}, tmp_path / "c", config=SMALL, overwrite=True)
        path, into = tmp_path / "c", {"x": target}  # and who may have less is asked
        return sync.load_with_report(path, into, strict="raise", config=SMALL).report.notes

    for saved, target in (
        (Has(p=[Counted(1), Counted(2)]), Has(p=[Counted(3)])),
        (Has(p={"a": Counted(1)}), Has(p={"b": Counted(3)})),
        (Pool(1, 2), Pool(3)),
        (Pool(1, 2), Pool(3, 4)),
        (Giving(net=net_of(1)), Remaking(net=net_of(2))),
    ):
        (note,) = notes_of(saved, target)
        assert "has states where there were objects that take them" in note
    held = [Handing(part={"a": Counted(n), "c": {"n": n}}) for n in (1, 2)]
    assert notes_of(*held) == ()
    assert numbers_in(held[1].part) == {"a": "counted 1", "c": {"n": 1}}


def test_parts_beside_a_long_history_stay(tmp_path: Path) -> None:
    """However long it is, and wherever: what is looked through for parts is bounded."""
    history = [(i, 0.5) for i in range(400)]
    saved = Has(net=[net_of(1), 1, 2, 3], n=torch.ones(1), history=history)
    sync.save({"x": saved}, tmp_path / "c", config=SMALL)
    target = Has(net=[net_of(0), 1, 2, 3], n=torch.zeros(1), history=history)
    net = target.net[0]
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert target.net == [net, 1, 2, 3]
    assert net.weight.eq(1).all()


def test_a_list_of_parts_stays_the_very_list_where_states_are_handed_on(tmp_path: Path) -> None:
    """Others may have it."""

    class Handing(Has):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            for part, held in zip(self.net, state["net"], strict=True):
                part.load_state_dict(held)

    sync.save({"x": Has(net=[net_of(1)])}, tmp_path / "c", config=SMALL)
    target = Handing(net=[net_of(0)])
    nets = target.net
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert target.net is nets
    assert nets[0].weight.eq(1).all()


def test_a_state_too_many_is_refused(tmp_path: Path) -> None:
    """It would be a dict among the parts; a number there is one."""
    parts = {"a": net_of(1), "b": net_of(1)}
    sync.save({"x": Has(net=parts)}, tmp_path / "c", config=SMALL)
    with pytest.raises(TargetError, match=r"'x\.net' has 1 objects .* was given 2 states"):
        sync.load(tmp_path / "c", {"x": Has(net={"a": net_of(0)})}, config=SMALL)
    sync.save({"x": Has(net={"a": net_of(1), "n": 3})}, tmp_path / "d", config=SMALL)
    target = Has(net={"a": net_of(0)})
    net = target.net["a"]
    sync.load(tmp_path / "d", {"x": target}, config=SMALL)
    assert target.net == {"a": net, "n": 3}
    sync.save({"x": Has(net=[net_of(1), net_of(1)], n=1)}, tmp_path / "e", config=SMALL)
    both = [net_of(0), net_of(0)]
    two = Has(net=[*both], n=0)
    sync.load(tmp_path / "e", {"x": two}, select="x.net.1", config=SMALL)
    assert two.net == both
    assert [net.weight.eq(1).all().item() for net in both] == [False, True]


def test_who_has_parts_of_its_own_classes_is_not_asked(tmp_path: Path) -> None:
    """A loader that has a dataset with a state may count on, or begin, when it is asked."""

    class Asked(Has):
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError("it was asked")

    sync.save({"x": Has(n=3)}, tmp_path / "c", config=SMALL)
    target = Asked(n=0, dataset=Counted(1))
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert (target.n, target.dataset.number) == (3, 1)


class Refusing(torch.nn.Linear):
    """Does not say any more what it has."""

    is_quiet = False

    def state_dict(self, *args: Any, **options: Any) -> Any:
        if self.is_quiet:
            raise ValueError("quiet")
        return super().state_dict(*args, **options)


class Quieting(Has):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.is_quiet = True
        super().load_state_dict(state)


def test_a_part_that_does_not_say_what_it_has_is_no_error_of_another_kind(tmp_path: Path) -> None:
    sync.save({"x": Has(net=net_of(1))}, tmp_path / "c", config=SMALL)
    target = Quieting(net=Refusing(2, 2))
    with pytest.raises(TargetError, match=r"state_dict\(\) of 'x\.net' .*quiet"):
        sync.load(tmp_path / "c", {"x": target}, select="x.net.weight", config=SMALL)


class Ringed(Has):
    """Has things inside themselves, too, beside what it gives as its state."""

    def __init__(self, **held: Any) -> None:
        super().__init__(**held)
        ring: list[Any] = []
        ring += [ring, self, self.net]
        deep: list[Any] = []
        for _ in range(5000):
            deep = [deep]
        vars(self).update(ring=ring, deep=deep, around=self)

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net}


def test_parts_are_found_beside_what_has_no_end(tmp_path: Path) -> None:
    """Lists inside themselves, deep ones, and an object that has itself."""
    target = Ringed(net=net_of(0))
    net = target.net
    sync.save({"x": Ringed(net=net_of(1))}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert target.net is net
    assert net.weight.eq(1).all()


def test_of_a_part_that_is_loaded_in_part_the_rest_stays(tmp_path: Path) -> None:
    """As of any module; what does not fit is an error, and the part is there all the same."""
    net = net_of(0)
    target, bias = Has(net=net), net.bias.detach().clone()
    sync.save({"x": Has(net=net_of(1))}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"x": target}, select="x.net.weight", config=SMALL)
    assert target.net is net
    assert net.weight.eq(1).all()
    assert torch.equal(net.bias, bias)
    sync.save({"x": Has(net=torch.nn.Linear(3, 2))}, tmp_path / "d", config=SMALL)
    with pytest.raises(TargetError, match=r"'x\.net' does not take its state"):
        sync.load(tmp_path / "d", {"x": target}, config=SMALL)
    assert target.net is net
    sync.save({"x": Has(net=[net_of(1)])}, tmp_path / "e", config=SMALL)
    two = Has(net=[net_of(1), net])
    with pytest.raises(TargetError, match=r"'x\.net' has 2 objects .* was given 1 states"):
        sync.load(tmp_path / "e", {"x": two}, config=SMALL)
    assert two.net[1] is net


class OddOptimizer(torch.optim.SGD):
    """Has a tensor and a number beside the state of its parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        state: dict[Any, Any] = self.state
        state |= {"k": torch.zeros(1), "n": 3}


def test_whatever_an_object_has_beside_its_state_is_no_obstacle(tmp_path: Path) -> None:
    """A lazy module, what a dead proxy stood for, an odd optimizer."""

    class Dead:
        """Of which nothing is left to ask."""

    saved, target = Mean(1, 2), Mean(3, 4)
    vars(target)["lazy"] = torch.nn.LazyLinear(2)
    vars(target)["proxy"] = weakref.proxy(Dead())
    vars(target)["optimizer"] = OddOptimizer([torch.ones(1)])
    sync.save({"x": saved}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert target.total.tolist() == [1, 2]


class Nested(Mean):
    """Has another such object in its state, kept for each rank, before its own."""

    def __init__(self, *values: float) -> None:
        super().__init__(*values)
        self.inner = Pair(*values)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": PerRank(self.inner), **super().state_dict()}


def test_an_object_in_an_object_leaves_the_rest_of_it_new(tmp_path: Path) -> None:
    target = Nested(3, 4)
    sync.save({"x": Nested(1, 2)}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert target.total.tolist() == [1, 2]
    assert target.parts.tolist() == [1, 2]


def test_a_module_below_an_object_may_turn_what_it_is_given(tmp_path: Path) -> None:
    """There its own hook takes it, not torch's code alone."""

    def turn(module: Any, *_: Any) -> None:
        module.weight.data.zero_()

    target, other = loaded_both(tmp_path, AppState(1.0), AppState(2.0, turn))
    assert same(target.state_dict(), other.state_dict())
    assert target.given["model"]["weight"].data_ptr() != target.model.weight.data_ptr()


class Replay:
    """As many samples as it has seen, and as long as it was saved once it is loaded."""

    def __init__(self, length: int, *, is_labelled: bool = False) -> None:
        self.samples = torch.arange(length * 2.0).reshape(length, 2)
        self.labels = torch.arange(length) if is_labelled else torch.empty(0)
        self.steps: np.ndarray[Any, Any] = np.arange(length) if is_labelled else np.zeros(0)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "more": {"labels": self.labels, "steps": self.steps}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]
        self.labels, self.steps = state["more"]["labels"], state["more"]["steps"]


@pytest.mark.parametrize("length", [0, 2, 6])
def test_an_object_is_given_tensors_of_other_shapes(tmp_path: Path, length: int) -> None:
    """And of other types where it has nothing yet; it says itself what it takes."""
    target, other = loaded_both(tmp_path, Replay(4, is_labelled=True), Replay(length))
    assert torch.equal(target.samples, other.samples)
    assert torch.equal(target.labels, other.labels)
    assert target.labels.dtype == torch.int64
    assert target.steps.tolist() == other.steps.tolist()
    assert target.steps.dtype == np.int64


@pytest.mark.parametrize("length", [2, 4])
def test_an_object_is_given_the_stored_precision(tmp_path: Path, length: int) -> None:
    """Or the one that `dtype=` asks for; arrays as they are."""
    sync.save({"x": Replay(4, is_labelled=True)}, tmp_path / "c", config=SMALL)
    target = Replay(length, is_labelled=True)
    target.samples = target.samples.bfloat16()
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert target.samples.dtype == torch.float32
    assert torch.equal(target.samples, Replay(4).samples)
    target.samples = target.samples.half()
    sync.load(tmp_path / "c", {"x": target}, dtype=torch.bfloat16, config=SMALL)
    assert target.samples.dtype == torch.bfloat16
    assert target.samples.tolist() == Replay(4).samples.tolist()
    target, saved = Replay(length), Replay(4)
    saved.steps, target.steps = np.ones(4), np.zeros(length, np.float32)
    sync.save({"x": saved}, tmp_path / "d", config=SMALL)
    sync.load(tmp_path / "d", {"x": target}, config=SMALL)
    assert target.steps.dtype == np.float64
    assert target.steps.tolist() == saved.steps.tolist()


class Best:
    """The best model so far, or whatever else it has."""

    def __init__(self, best: Any, **more: Any) -> None:
        self.best, self.more = best, more

    def state_dict(self) -> dict[str, Any]:
        return {"best": {"of": self.best}, "mean": torch.ones(1), **self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]["of"]


KINDS = [None, 0.5, [1, torch.ones(2)], {"w": torch.ones(2)}, {}, torch.ones(2), np.ones(2)]


@pytest.mark.parametrize("stored", KINDS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("held", KINDS, ids=lambda value: type(value).__name__)
def test_an_object_is_given_values_of_another_kind(tmp_path: Path, stored: Any, held: Any) -> None:
    """As `torch.load` gives them; not a name less than it has."""
    sync.save({"x": Best(stored)}, tmp_path / "c", config=SMALL)
    target = Best(held)
    if isinstance(held, dict) and held and isinstance(stored, dict) and not stored:
        with pytest.raises(MismatchError, match=r"x\.best\.of\.w"):
            sync.load(tmp_path / "c", {"x": target}, config=SMALL)
        return
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert_same(target.best, stored)


def test_another_kind_is_a_mismatch_where_it_is_filled_in_place(tmp_path: Path) -> None:
    """Of a model below an object, in what is held in parts, and for who loads what fits."""
    sync.save({"x": Best(torch.ones(3))}, tmp_path / "c", config=SMALL)
    model = torch.nn.Linear(2, 2)
    own = Best({"model": model.state_dict()})
    vars(own)["model"] = model
    for target in (own, Best(Shard(torch.zeros(2), (4,), (0,)))):
        with pytest.raises(MismatchError, match=r"x\.best\.of"):
            sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    sync.save({"x": Best([1])}, tmp_path / "c", config=SMALL, overwrite=True)
    with pytest.raises(MismatchError, match=r"x\.k"):
        sync.load(tmp_path / "c", {"x": Best([1], k=torch.ones(1))}, config=SMALL)
    ones = torch.ones(2)
    sync.load(tmp_path / "c", {"x": (target := Best(ones))}, strict="ignore", config=SMALL)
    assert torch.equal(target.best, ones)
    report = sync.load_with_report(tmp_path / "c", {"x": target}, config=SMALL).report
    assert len(report.mismatched) == 1


def test_another_shape_is_selected_and_reported_as_any_other(tmp_path: Path) -> None:
    """What is not selected stays as long as it is."""
    sync.save({"x": Replay(4, is_labelled=True)}, tmp_path / "c", config=SMALL)
    target = Replay(2)
    sync.load(tmp_path / "c", {"x": target}, select="x.samples", config=SMALL)
    assert (len(target.samples), len(target.labels), len(target.steps)) == (4, 0, 0)
    target, beside = Replay(2), torch.zeros(3)
    sync.save({"x": Replay(4), "y": torch.ones(3)}, tmp_path / "d", config=SMALL)
    result = sync.load_with_report(tmp_path / "d", {"x": target, "y": beside}, config=SMALL)
    assert any(line.startswith("x.samples: shape") for line in result.report.mismatched)
    assert len(target.samples) == 2
    assert beside.tolist() == [1, 1, 1]


def hook_before(module: torch.nn.Module) -> torch.nn.Module:
    """Have a module run code of others before it takes its state."""
    module.register_load_state_dict_pre_hook(lambda *_: None)
    return module


def with_buffer(buffer: torch.Tensor) -> torch.nn.Module:
    module = hook_before(torch.nn.Linear(2, 2))
    module.register_buffer("seen", buffer)
    return module


@pytest.mark.parametrize("strict", ["raise", "ignore"])
@pytest.mark.parametrize(
    ("stored", "held"),
    [
        (torch.ones(3, dtype=torch.complex64), torch.zeros(3)),
        (torch.full((3,), 300), torch.zeros(3, dtype=torch.uint8)),
        (torch.full((4,), 0.7), torch.zeros(3, dtype=torch.int64)),
    ],
)
def test_what_is_resized_is_not_converted(
    tmp_path: Path, stored: torch.Tensor, held: torch.Tensor, strict: Any
) -> None:
    sync.save({"m": with_buffer(stored)}, tmp_path / "c", config=SMALL)
    target = with_buffer(held)
    refused = pytest.raises(MismatchError) if strict == "raise" else contextlib.nullcontext()
    with refused:
        sync.load(tmp_path / "c", {"m": target}, strict=strict, config=SMALL)
    assert not held.any()


class App:
    """Hands on to a model, as tutorials do."""

    def __init__(self, width: int, *, has_hook: bool) -> None:
        model = torch.nn.Linear(width, 2)
        self.model = hook_before(model) if has_hook else model

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])


@pytest.mark.parametrize("has_hook", [False, True])
def test_parameters_below_an_object_have_to_fit(tmp_path: Path, *, has_hook: bool) -> None:
    """Also those of a model with a hook; said before anything changes."""
    app = App(3, has_hook=has_hook)
    sync.save({"a": torch.ones(2), "x": app}, tmp_path / "c", config=SMALL)
    target = {"a": torch.zeros(2), "x": App(4, has_hook=has_hook)}
    with pytest.raises(MismatchError, match=r"x\.model\.weight: shape"):
        sync.load(tmp_path / "c", target, config=SMALL)
    assert not target["a"].any()  # type: ignore[attr-defined]  # a tensor


def test_buffers_that_are_filled_in_place_below_an_object_have_to_fit(tmp_path: Path) -> None:
    """What torch's code takes resizes nothing."""
    saved, target = App(3, has_hook=False), App(3, has_hook=False)
    saved.model.register_buffer("seen", torch.ones(4))
    target.model.register_buffer("seen", torch.zeros(3))
    sync.save({"x": saved}, tmp_path / "c", config=SMALL)
    with pytest.raises(MismatchError, match=r"x\.model\.seen: shape"):
        sync.load(tmp_path / "c", {"x": target}, config=SMALL)


def test_arrays_that_are_resized_are_not_converted(tmp_path: Path) -> None:
    sync.save({"x": Replay(4, is_labelled=True)}, tmp_path / "c", config=SMALL)
    target = Replay(4)
    target.steps = np.zeros(2)
    with pytest.raises(MismatchError, match=r"x\.more\.steps: <f8"):
        sync.load(tmp_path / "c", {"x": target}, config=SMALL)


class Sized(torch.nn.Module):
    """A queue, and what is learned from it."""

    queue: torch.Tensor | None

    def __init__(self, queue: torch.Tensor | None, width: int = 3) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((width,), float(width)))
        self.register_buffer("queue", queue)


class Queue(Sized):
    """A queue that is as long as it was saved."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.queue = torch.empty_like(state_dict[f"{prefix}queue"])
        super()._load_from_state_dict(state_dict, prefix, *args)


class HookedQueue(Sized):
    """One that a hook resizes."""

    def __init__(self, queue: torch.Tensor | None, width: int = 3) -> None:
        super().__init__(queue, width)
        register: Any = self.register_load_state_dict_pre_hook
        register(self.resize)

    @staticmethod
    def resize(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        module.queue = torch.empty_like(state_dict[f"{prefix}queue"])


class WholeQueue(Sized):
    """One that resizes itself at the root."""

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        self.queue = torch.empty_like(state_dict["queue"])
        return super().load_state_dict(state_dict, *args, **options)


@pytest.mark.parametrize("queue", [None, torch.zeros(0, 3), torch.ones(7, 3)], ids=str)
@pytest.mark.parametrize("kind", [Queue, HookedQueue, WholeQueue])
def test_a_module_may_resize_its_buffers(
    tmp_path: Path, kind: Callable[..., torch.nn.Module], queue: torch.Tensor | None
) -> None:
    """By code of its own; those that are not there yet, too."""
    saved, target = kind(torch.rand(4, 3)), kind(queue)
    if kind is not WholeQueue:
        saved, target = torch.nn.ModuleList([saved]), torch.nn.ModuleList([target])
    target, other = loaded_both(tmp_path, saved, target)
    states = target.state_dict(), other.state_dict()
    assert list(states[0]) == list(states[1])
    assert all(map(torch.equal, states[0].values(), states[1].values()))


def test_a_module_on_the_meta_device_may_resize_its_buffers(tmp_path: Path) -> None:
    """Those that are there already, and those that are not."""
    saved = torch.nn.ModuleList([Queue(torch.rand(4, 3)), Queue(torch.rand(5, 3))])
    with torch.device("meta"):
        target = torch.nn.ModuleList([Queue(torch.zeros(0, 3)), Queue(None)])
    target[1].queue = torch.zeros(0, 3, device="cpu")
    sync.save({"x": saved}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    states = saved.state_dict(), target.state_dict()
    assert all(map(torch.equal, states[0].values(), states[1].values()))


def observing(*, has_seen: bool) -> torch.nn.Module:
    """Make a module as quantisation prepares it, before or after it saw something."""
    from torch.ao.quantization import (  # noqa: PLC0415  # seconds
        FakeQuantize,
        MovingAveragePerChannelMinMaxObserver,
        PerChannelMinMaxObserver,
    )

    quantize: Any = FakeQuantize(
        MovingAveragePerChannelMinMaxObserver,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        quant_min=-128,
        quant_max=127,
    )
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), quantize, PerChannelMinMaxObserver())
    if has_seen:
        module(torch.rand(5, 3))
    return module


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning")
def test_observers_of_quantisation_learn_their_shapes(tmp_path: Path) -> None:
    """The module around them is filled where it is, below an object, too."""
    target, other = loaded_both(tmp_path, observing(has_seen=True), observing(has_seen=False))
    states = target.state_dict(), other.state_dict()
    assert all(map(torch.equal, states[0].values(), states[1].values()))
    holder = Holder(observing(has_seen=False))
    sync.save({"x": Holder(target)}, tmp_path / "c", config=SMALL, overwrite=True)
    sync.load(tmp_path / "c", {"x": holder}, config=SMALL)
    state = holder.model.state_dict()
    assert all(map(torch.equal, state.values(), states[0].values()))
    assert holder.given["0.weight"].data_ptr() == state["0.weight"].data_ptr()


class Holder:
    """Hands on all to a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.given: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["model"]
        self.model.load_state_dict(self.given)


@pytest.mark.parametrize("kind", [Queue, HookedQueue, WholeQueue])
def test_parameters_have_to_fit(tmp_path: Path, kind: type[Sized]) -> None:
    """That is another model, and said before anything changes; buffers of others as well."""
    sync.save({"x": kind(torch.ones(2, 3), 5)}, tmp_path / "c", config=SMALL)
    target = kind(torch.zeros(2, 3))
    with pytest.raises(MismatchError, match=r"x.weight: shape \(3,\) in the target, \(5,\)"):
        sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert torch.equal(target.state_dict()["queue"], torch.zeros(2, 3))
    saved, wide = (torch.nn.Sequential(Overriding(), torch.nn.BatchNorm1d(n)) for n in (2, 3))
    sync.save({"x": saved}, tmp_path / "d", config=SMALL)
    with pytest.raises(MismatchError, match=r"x\.1\.running_mean"):
        sync.load(tmp_path / "d", {"x": wide}, config=SMALL)


class Fixed(Replay):
    """Takes none but as many as it has."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples.copy_(state["samples"])


def test_an_object_that_does_not_take_another_shape_is_named(tmp_path: Path) -> None:
    """With what it says."""
    sync.save({"x": Replay(4)}, tmp_path / "c", config=SMALL)
    with pytest.raises(TargetError, match=r"'x' does not take its state: .*must match the size"):
        sync.load(tmp_path / "c", {"x": Fixed(3)}, config=SMALL)


class Mode(enum.Enum):
    """What a loader may have in its state."""

    TRAIN = "train"


class Loader:
    """Makes an iterator when it is asked for its state, and gives that next: torchdata's does."""

    def __init__(self, length: int = 10, **more: Any) -> None:
        self.length, self.more = length, more
        self.at: int | None = None
        self.start = 0
        self.num_asked = 0

    def __iter__(self) -> Iterator[int]:
        if self.at is None:
            self.at, self.start = self.start, 0
        while self.at < self.length:
            self.at += 1
            yield self.at - 1
        self.at = None

    def state_dict(self) -> dict[str, Any]:
        self.num_asked += 1
        if self.at is None:
            self.at, self.start = self.start, 0
        return {"at": self.at, "worker": {"seeds": (1, 2)}, **self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.more = state["at"], {key: state[key] for key in self.more}


def loader_at(position: int, **more: Any) -> Loader:
    loader = Loader(**more)
    iterator = iter(loader)
    for _ in range(position):
        next(iterator)
    return loader


@pytest.mark.parametrize("wrap", [lambda x: x, PerRank, lambda x: {"a": [x], "n": 1}])
@pytest.mark.parametrize("select", [None, "x"])
def test_an_object_with_nothing_to_fill_is_not_asked(
    tmp_path: Path, wrap: Any, select: str | None
) -> None:
    """What would say what it has may change it."""
    saved, target = loader_at(4), Loader()
    sync.save({"x": wrap(saved), "y": 1}, tmp_path / "c", config=SMALL)
    sync.load(tmp_path / "c", {"x": wrap(target), "y": 0}, select=select, config=SMALL)
    assert target.num_asked == 0
    assert list(target) == [4, 5, 6, 7, 8, 9]
    file = tmp_path / "a.pt"
    torch.save({"x": saved.state_dict()}, file)
    target = Loader()
    sync.load(file, {"x": target})
    assert list(target) == [4, 5, 6, 7, 8, 9]


def test_an_object_that_is_not_asked_says_what_it_lacks(tmp_path: Path) -> None:
    """An error with its name; and who loads what fits is told, and given what it has."""
    sync.save({"x": loader_at(4)}, tmp_path / "c", config=SMALL)
    with pytest.raises(TargetError, match=r"'x' does not take its state: KeyError\('epoch'\)"):
        sync.load(tmp_path / "c", {"x": Loader(epoch=3)}, config=SMALL)
    target = Loader(epoch=3)
    report = sync.load_with_report(tmp_path / "c", {"x": target}, config=SMALL).report
    assert report.missing == ("x.epoch",)
    assert (target.start, target.more) == (4, {"epoch": 3})


@pytest.mark.parametrize(
    ("more", "own"),
    [
        ({"mode": Mode.TRAIN}, {"mode": Mode.TRAIN}),
        ({"n": PerRank(3)}, {"n": PerRank(0)}),
        ({"n": torch.ones(2)}, {"n": torch.zeros(2)}),
        ({"n": np.ones(2)}, {"n": np.zeros(2)}),
        ({"n": {"0": 1}}, {"n": {0: 0}}),
    ],
    ids=str,
)
def test_an_object_is_asked_where_only_it_can_say_what_is_meant(
    tmp_path: Path, more: dict[str, Any], own: dict[str, Any]
) -> None:
    """Classes, values of each rank, tensors, and numbers that were written as strings."""
    sync.save({"x": loader_at(4, **more)}, tmp_path / "c", config=SMALL)
    target = Loader(**own)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert target.num_asked == 1
    found, expected = next(iter(target.more.values())), next(iter(more.values()))
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found == {0: 1}


def test_an_object_is_asked_for_what_is_not_selected(tmp_path: Path) -> None:
    sync.save({"x": loader_at(4, epoch=7)}, tmp_path / "c", config=SMALL)
    target = Loader(epoch=3)
    sync.load(tmp_path / "c", {"x": target}, select="x.at", config=SMALL)
    assert (target.start, target.more) == (4, {"epoch": 3})


def test_an_object_that_has_a_model_takes_tensors(tmp_path: Path) -> None:
    """What has none for it is another checkpoint; that is said before anything changes."""
    sync.save({"a": torch.ones(2), "x": {"step": 3}}, tmp_path / "c", config=SMALL)
    target = {"a": torch.zeros(2), "x": App(3, has_hook=False)}
    with pytest.raises(MismatchError, match=r"x\.model\.weight"):
        sync.load(tmp_path / "c", target, config=SMALL)
    assert not target["a"].any()  # type: ignore[attr-defined]  # a tensor
