"""Objects in the state of an object: they stay what they are."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import sync
from ckptio.errors import TargetError
from tests.rig import SMALL
from tests.state.objects import Mean

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


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
    is_filled = make is net_of and not gives_parts  # both are given the part's own tensors
    assert target.part is net if is_filled else isinstance(target.part, dict)
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


def test_a_dict_of_parts_with_other_names_takes_those_that_it_has(tmp_path: Path) -> None:
    """Who loads what fits is told of the others."""
    sync.save({"x": Has(net={"a": net_of(1), "c": net_of(2)})}, tmp_path / "c", config=SMALL)
    nets = {"a": net_of(0), "b": net_of(0)}
    target = Has(net=dict(nets))
    report = sync.load_with_report(tmp_path / "c", {"x": target}, config=SMALL).report
    assert report.notes == ("x.net.c: has a state, and there was no object that takes it",)
    assert target.net["a"] is nets["a"]
    assert target.net["b"] is nets["b"]
    assert nets["a"].weight.eq(1).all()


def test_a_state_that_no_object_takes_is_not_said_to_stay_on_the_meta_device(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names what does, wherever its note is among others."""
    saved = Has(net={"a": net_of(1), "c": net_of(2)})
    sync.save({"x": saved, "m": net_of(3)}, tmp_path / "c", config=SMALL)
    target = Has(net={"a": net_of(0), "b": net_of(0)})
    model = net_of(0, "meta")
    model.register_buffer("mask", torch.ones(2, device="meta"), persistent=False)
    into = {"x": target, "m": model}
    found = sync.load_with_report(tmp_path / "c", into, strict="ignore", config=SMALL)
    assert found.report.notes == (
        "x.net.c: has a state, and there was no object that takes it",
        "m.mask: stays on the meta device; the checkpoint has none that fits",
    )
    (told,) = [record.message for record in caplog.records if "meta device" in record.message]
    assert "('m.mask')" in told


def test_lists_that_are_parts_states_are_noted(tmp_path: Path) -> None:
    """Nobody can tell these from lists of states."""
    sync.save({"x": Has(part=Listed(net=Counted(1), n=1))}, tmp_path / "c", config=SMALL)
    target = {"x": Has(part=Listed(net=Counted(2), n=2))}
    report = sync.load_with_report(tmp_path / "c", target, config=SMALL).report
    assert [note.partition(":")[0] for note in report.notes] == ["x.part"]


class Shadowed(Has):
    """One whose property has the name of what it has, and raises."""

    @property
    def part(self) -> Any:
        raise RuntimeError("after setup() alone")


class ShadowedSlot(Slotted):
    __slots__ = ()

    @property
    def net(self) -> Any:  # type: ignore[override]  # that is the point
        raise RuntimeError("after setup() alone")


def test_properties_are_not_asked_for_parts(tmp_path: Path) -> None:
    """The attribute itself is read, and written."""
    sync.save({"x": Shadowed(part=Counted(1), n=1)}, tmp_path / "c", config=SMALL)
    part, net = Counted(0), net_of(0)
    target = Shadowed(part=part, n=0)
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert vars(target)["part"] is part
    assert (part.number, target.n) == (1, 1)
    slot: Any = vars(Slotted)["net"]

    class Takes(ShadowedSlot):
        __slots__ = ()

        def __init__(self, net: torch.nn.Module) -> None:
            slot.__set__(self, net)

        def state_dict(self) -> dict[str, Any]:
            return {"model": slot.__get__(self)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            slot.__set__(self, state["model"])

    sync.save({"x": Takes(net_of(1))}, tmp_path / "d", config=SMALL)
    slotted = Takes(net)
    sync.load(tmp_path / "d", {"x": slotted}, config=SMALL)
    assert slot.__get__(slotted) is net
    assert net.weight.eq(1).all()


def test_parts_come_back_where_a_list_of_them_has_become_a_tuple(tmp_path: Path) -> None:
    class Freezing(Has):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.net = tuple(state["net"])

    sync.save({"x": Has(net=[net_of(1), net_of(2)])}, tmp_path / "c", config=SMALL)
    nets = [net_of(0), net_of(0)]
    target = Freezing(net=[*nets])
    sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert target.net == (*nets,)
    assert [net.weight[0, 0].item() for net in nets] == [1, 2]


def test_whatever_fails_the_parts_are_where_they_were(tmp_path: Path) -> None:
    """Also those that come after it, and those of parts."""
    sync.save(
        {"x": Has(n=[torch.nn.Linear(3, 2)], net=net_of(1), part=Has(net=[net_of(1)]))},
        tmp_path / "c",
        config=SMALL,
    )
    nets = [net_of(0) for _ in range(3)]
    part = Has(net=[nets[2]])
    target = Has(n=[nets[0]], net=nets[1], part=part)
    with pytest.raises(TargetError, match=r"'x\.n\.0' does not take its state"):
        sync.load(tmp_path / "c", {"x": target}, config=SMALL)
    assert [*target.n, target.net, *part.net] == nets
    assert target.part is part


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
