from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from safetensors.torch import load_file

from ckptio import sync
from ckptio.errors import (
    ConfigError,
    FormatError,
    MismatchError,
    TargetError,
    UnsupportedLeafError,
)
from ckptio.format.checksum import crc32c
from ckptio.state.wrappers import is_wrapper
from tests.rig import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

aten = torch.ops.aten


class Rounding(enum.Enum):
    """How codes were made."""

    NEAREST = "nearest"


@dataclasses.dataclass
class Kernel:
    """How to compute with codes."""

    rounding: Rounding
    granularity: tuple[int, ...]


class Coded(torch.Tensor):
    """Numbers as codes with a scale, as torchao's 8-bit states and weights are."""

    codes: torch.Tensor
    scale: torch.Tensor
    kernel: Any

    def __new__(
        cls, codes: torch.Tensor, scale: torch.Tensor, kernel: Any, size: Any = None
    ) -> Self:
        """Make it as torch wants it to be made."""
        del kernel
        shape = codes.shape if size is None else size
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=scale.dtype, device=codes.device
        )
        return made

    def __init__(self, codes: Any, scale: Any, kernel: Any, size: Any = None) -> None:
        del size
        self.codes, self.scale, self.kernel = codes, scale, kernel

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.kernel, torch.int8]

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> Coded:
        kernel, dtype = context
        assert (type(size), type(stride)) == (torch.Size, tuple)
        assert parts["codes"].dtype is dtype
        return cls(parts["codes"], parts["scale"], kernel, size)

    def dequantize(self) -> torch.Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped
        del tensor_contents
        return f"Coded({self.codes}, {self.scale})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # typed as a method there
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func is aten.copy_.default:
            into, of = args[:2]
            into.codes.copy_(of.codes)
            into.scale.copy_(of.scale)
            return into
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            of = args[0]
            return cls(func(of.codes), func(of.scale), of.kernel, of.shape)
        if func is aten.view.default:
            return cls(func(args[0].codes, args[1]), args[0].scale, args[0].kernel)
        plain = [a.dequantize() if isinstance(a, Coded) else a for a in args]
        return func(*plain, **kwargs)


KERNEL = Kernel(Rounding.NEAREST, (1, 16))
CLASSES = [Coded, Kernel, Rounding]


def coded(seed: int, *shape: int, kernel: Any = KERNEL) -> Coded:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 127, shape or (4, 16), generator=generator, dtype=torch.int8)
    return Coded(codes, torch.rand(1, generator=generator), kernel)


def assert_coded(found: Any, expected: Coded) -> None:
    assert type(found) is Coded
    assert found.shape == expected.shape
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scale, expected.scale)
    assert found.kernel == expected.kernel


class CodedAdam(torch.optim.Optimizer):
    """An optimizer whose moments are coded."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # gives none
        assert closure is None
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                state = self.state[p]
                if not state:
                    state["moment"] = coded(number + 1, *p.shape)
                    state["step"] = torch.zeros(())
                state["step"] += 1
                state["moment"].codes += 1
                p.data -= group["lr"] * state["moment"].dequantize()


def stepped(num_steps: int) -> tuple[torch.nn.Linear, CodedAdam]:
    torch.manual_seed(num_steps)
    model = torch.nn.Linear(16, 4)
    optimizer = CodedAdam(model.parameters())
    for _ in range(num_steps):
        optimizer.step()
    return model, optimizer


def test_a_tensor_of_others_comes_back_as_its_class_if_that_is_given(tmp_path: Path) -> None:
    """And as a dict of them with a note if not; its parts are tensors of the files."""
    one = coded(1)
    sync.save({"a": {"w": one}, "also": one}, tmp_path / "x", config=SMALL)
    found: Any = sync.load(tmp_path / "x", types=CLASSES, config=SMALL)
    assert_coded(found["a"]["w"], one)
    assert found["also"].codes.data_ptr() == found["a"]["w"].codes.data_ptr()
    result: Any = sync.load_with_report(tmp_path / "x", config=SMALL)
    plain = result.state["a"]["w"]
    assert torch.equal(plain["codes"], one.codes)
    assert (plain["__shape__"], plain["__strides__"]) == (torch.Size((4, 16)), (16, 1))
    assert any("a.w: was a dataclass" in note and "Coded" in note for note in result.report.notes)
    (file,) = (tmp_path / "x").glob("data-*")
    assert set(load_file(file)) == {"a.w.codes", "a.w.scale"}


def test_a_tensor_of_others_is_made_of_what_it_was_saved_with_or_not_at_all(tmp_path: Path) -> None:
    """With plain values for that, it would be made, and fail where it is used."""
    sync.save({"w": coded(1)}, tmp_path / "x", config=SMALL)
    for types, lacking in (([Coded], "Kernel', .*Rounding'"), ([Coded, Kernel], "Rounding'")):
        with pytest.raises(
            TargetError, match=rf"saved with values of '[\w.]+:{lacking}: pass these"
        ):
            sync.load(tmp_path / "x", types=types, config=SMALL)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_an_optimizer_of_them_goes_on_where_it_was(tmp_path: Path, num_steps: int) -> None:
    """Its parts are filled in place where there are some."""
    model, optimizer = stepped(2)
    sync.save({"m": model, "o": optimizer}, tmp_path / "x", config=SMALL)
    other, target = stepped(num_steps)
    before = target.state[other.weight]["moment"].codes
    report = sync.load_with_report(
        tmp_path / "x", into={"m": other, "o": target}, config=SMALL
    ).report
    assert not report.notes
    moment = target.state[other.weight]["moment"]
    assert moment.codes.data_ptr() == before.data_ptr()
    assert_coded(moment, optimizer.state[model.weight]["moment"])
    for each in (optimizer, target):
        each.step()
    assert torch.equal(other.weight, model.weight)


def test_an_optimizer_that_has_not_stepped_needs_the_class(tmp_path: Path) -> None:
    """It would be given a dict otherwise; that is said before anything changes."""
    model, optimizer = stepped(2)
    sync.save({"m": model, "o": optimizer}, tmp_path / "x", config=SMALL)
    other, fresh = stepped(0)
    weight = other.weight.detach().clone()
    for types, name in (((), "Coded"), ([Coded], "Kernel"), ([Coded, Kernel], "Rounding")):
        with pytest.raises(
            TargetError, match=rf"pass 'tests\.state\.test_wrappers:{name}'.* types="
        ):
            sync.load(tmp_path / "x", into={"m": other, "o": fresh}, types=types, config=SMALL)
    assert torch.equal(other.weight, weight)
    sync.load(tmp_path / "x", into={"m": other, "o": fresh}, types=CLASSES, config=SMALL)
    assert_coded(fresh.state[other.weight]["moment"], optimizer.state[model.weight]["moment"])
    for each in (optimizer, fresh):
        each.step()
    assert torch.equal(other.weight, model.weight)


def module_of(weight: torch.Tensor) -> torch.nn.Linear:
    module = torch.nn.Linear(16, 4, bias=False)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


@pytest.mark.parametrize("kind", ["module", "state_dict", "plain dict", "list"])
def test_weights_are_filled_in_place(tmp_path: Path, kind: str) -> None:
    """Wherever they are."""

    def state_of(weight: Coded) -> tuple[Any, Callable[[], Any]]:
        module = module_of(weight)
        if kind == "module":
            return {"m": module}, lambda: module.weight
        state = {"state_dict": module.state_dict(), "plain dict": {"w": weight}, "list": [weight]}
        return {"m": state[kind]}, lambda: weight if kind != "state_dict" else module.weight

    one, two = coded(1), coded(2)
    sync.save(state_of(one)[0], tmp_path / "x", config=SMALL)
    target, weight_now = state_of(two)
    codes = two.codes
    sync.load(tmp_path / "x", into=target, config=SMALL)
    assert_coded(weight_now(), one)
    assert torch.equal(codes, one.codes)


def test_what_is_on_the_meta_device_is_made(tmp_path: Path) -> None:
    """By the class, out of new parts."""
    one = coded(1)
    sync.save({"w": one}, tmp_path / "x", config=SMALL)
    blank = Coded(one.codes.to("meta"), one.scale.to("meta"), KERNEL)
    found: Any = sync.load(tmp_path / "x", into={"w": blank}, config=SMALL)
    assert_coded(found["w"], one)


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_parameter_on_the_meta_device_is_made_as_one(tmp_path: Path, *, is_trained: bool) -> None:
    """As those are that are no tensors of others."""
    one = coded(1)
    sync.save({"w": one}, tmp_path / "x", config=SMALL)
    blank = Coded(one.codes.to("meta"), one.scale.to("meta"), KERNEL)
    target: dict[str, Any] = {"w": torch.nn.Parameter(blank, requires_grad=is_trained)}
    found = sync.load(tmp_path / "x", into=target, config=SMALL)["w"]
    assert isinstance(found, torch.nn.Parameter)
    assert found.requires_grad is is_trained
    assert_coded(found.detach(), one)
    target = {"w": blank.requires_grad_(is_trained)}  # and one that is no parameter
    assert sync.load(tmp_path / "x", into=target, config=SMALL)["w"].requires_grad is is_trained


class CodedParameter(torch.nn.Parameter):
    """A class of parameters; what is not its own operation gives plain tensors."""

    codes: torch.Tensor
    scale: torch.Tensor

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Self:
        """Make it as torch wants it to be made."""
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scale.dtype, device=codes.device
        )
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, *_: object) -> Self:
        return cls(**parts)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as above
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        plain = [a.codes * a.scale if isinstance(a, CodedParameter) else a for a in args]
        return func(*plain, **(kwargs or {}))


def test_a_class_of_parameters_is_made_as_it_is(tmp_path: Path) -> None:
    """And not put into a parameter of torch's own, which it may not allow."""
    one = coded(1)
    sync.save({"w": CodedParameter(one.codes, one.scale)}, tmp_path / "x", config=SMALL)
    blank = CodedParameter(one.codes.to("meta"), one.scale.to("meta"))
    found = sync.load(tmp_path / "x", into={"w": blank}, config=SMALL)["w"]
    assert type(found) is CodedParameter
    assert torch.equal(found.codes, one.codes)
    assert torch.equal(found.scale, one.scale)


class Fragile(Coded):
    """Cannot be made again."""

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> Coded:
        raise RuntimeError("no kernel")


def test_what_its_class_does_not_make_again_is_named(tmp_path: Path) -> None:
    """Whatever the class raises."""
    one = coded(1)
    sync.save({"w": Fragile(one.codes, one.scale, KERNEL)}, tmp_path / "x", config=SMALL)
    blank = Fragile(one.codes.to("meta"), one.scale.to("meta"), KERNEL)
    with pytest.raises(TargetError, match=r"'w' cannot be made .*no kernel"):
        sync.load(tmp_path / "x", into={"w": blank}, config=SMALL)


class Holder:
    """An object that takes its state by code of its own."""

    def __init__(self, weight: Coded) -> None:
        self.weight = weight

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["w"]


def test_an_object_with_code_of_its_own_is_given_a_new_one(tmp_path: Path) -> None:
    """As other tensors of it."""
    one, two = coded(1), coded(2)
    sync.save({"h": Holder(one)}, tmp_path / "x", config=SMALL)
    holder, codes = Holder(two), two.codes.clone()
    sync.load(tmp_path / "x", into={"h": holder}, config=SMALL)
    assert_coded(holder.weight, one)
    assert holder.weight is not two
    assert torch.equal(two.codes, codes)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (coded(2, kernel=Kernel(Rounding.NEAREST, (2, 16))), "another context"),
        (coded(2, 16, 4), "another shape"),
        (torch.zeros(4, 16), "a tensor in the target, a tensor of class 'Coded' in"),
        (Holder, "a tensor of class 'Coded' in the target, a tensor in"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_changes(
    tmp_path: Path, target: Any, said: str
) -> None:
    """What is beside the parts, and another kind of tensor on either side."""
    stored: Any = {"a": torch.ones(2), "w": coded(1)}
    if target is Holder:
        stored, target = {"a": torch.ones(2), "w": torch.zeros(4, 16)}, coded(2)
    sync.save(stored, tmp_path / "x", config=SMALL)
    other = torch.zeros(2)
    with pytest.raises(MismatchError) as caught:
        sync.load(tmp_path / "x", into={"a": other, "w": target}, config=SMALL)
    assert said in str(caught.value)
    assert not other.any()


def test_parts_keep_their_type(tmp_path: Path) -> None:
    """Whatever type was asked for: a scale means what it does in its own alone."""
    one = coded(1)
    sync.save({"w": one, "x": torch.ones(3)}, tmp_path / "x", config=SMALL)
    found: Any = sync.load(tmp_path / "x", types=CLASSES, dtype=torch.bfloat16, config=SMALL)
    assert_coded(found["w"], one)
    assert found["x"].dtype is torch.bfloat16


def test_a_part_may_be_selected(tmp_path: Path) -> None:
    """By the name of the tensor, or of a part."""
    one = coded(1)
    sync.save({"w": one, "x": torch.ones(3)}, tmp_path / "x", config=SMALL)
    target = {"w": coded(2), "x": torch.zeros(3)}
    sync.load(tmp_path / "x", into=target, select="w", config=SMALL)
    assert_coded(target["w"], one)
    assert not target["x"].any()
    assert torch.equal(sync.load_slice(tmp_path / "x", "w.codes", 1, config=SMALL), one.codes[1])
    target = {"w": coded(2, 5), "x": torch.zeros(3)}  # of another shape
    sync.load(tmp_path / "x", into=target, select="x", config=SMALL)
    assert target["x"].all()


class Late(Coded):
    """What a collective gives that is still under way."""

    def trigger_wait(self) -> None: ...


def test_what_is_under_way_or_does_not_say_is_refused(tmp_path: Path) -> None:
    """With its name."""
    one = coded(1)
    assert is_wrapper(one)
    assert not is_wrapper(torch.ones(3))
    assert not is_wrapper(torch.nn.Parameter(torch.ones(3)))
    late = Late(one.codes, one.scale, KERNEL)
    broken = coded(1, kernel=print)
    for value, said in ((late, "a tensor subclass"), (broken, "no portable form")):
        with pytest.raises(UnsupportedLeafError, match=said) as caught:
            sync.save({"w": value}, tmp_path / "x", config=SMALL)
        assert caught.value.fqn == "w"
    with pytest.raises(ConfigError, match="tensors that are made of others"):
        sync.load(tmp_path / "x", types=[torch.Tensor], config=SMALL)


@pytest.mark.parametrize("name", [b'"c":["a"]', b'"c":null', b'"d":"a"'])
def test_a_class_that_has_no_name_is_a_damaged_manifest(tmp_path: Path, name: bytes) -> None:
    """Whatever it is loaded into."""
    sync.save({"w": coded(1)}, tmp_path / "x", config=SMALL)
    path = tmp_path / "x" / "manifest.json"
    body = path.read_bytes().rpartition(b',"crc32c":')[0]
    changed = body.replace(b'"c":"tests.state.test_wrappers:Coded"', name)
    assert changed != body
    path.write_bytes(changed + b',"crc32c":"%08x"}\n' % crc32c(changed))
    with pytest.raises(FormatError):
        sync.load(tmp_path / "x", types=CLASSES, config=SMALL)
    with pytest.raises(FormatError):
        sync.load(tmp_path / "x", into={"w": None}, types=CLASSES, config=SMALL)
    with pytest.raises(MismatchError):
        sync.load(tmp_path / "x", into={"w": coded(2)}, config=SMALL)
