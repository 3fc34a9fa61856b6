"""An object is given what is stored, of whatever shape, type or kind; what is filled has to fit."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ckptio import Shard, sync
from ckptio.errors import MismatchError, TargetError
from ckptio.format.encode import TAG
from ckptio.format.manifest import TensorEntry
from ckptio.state.fits import is_like, resized_like
from ckptio.state.leaves import DTYPE_NAMES
from tests.rig import SMALL
from tests.state.objects import App, Best, Overriding, hook_before, loaded_both
from tests.strategies import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


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


@pytest.mark.parametrize("is_below", [False, True])
def test_a_buffer_takes_nothing_of_another_kind(tmp_path: Path, *, is_below: bool) -> None:
    """Neither one that a module resizes, nor one that is filled in place below an object."""
    app = App(2, has_hook=False)
    module = app.model if is_below else with_buffer(torch.zeros(3))
    module.register_buffer("seen", torch.zeros(3))
    state = {**module.state_dict(), "seen": [1.0, 1.0, 1.0]}
    saved, target = ({"model": state}, app) if is_below else (state, module)
    sync.save({"x": saved}, tmp_path / "c", config=SMALL)
    with pytest.raises(MismatchError, match=r"x\.(model\.)?seen: "):
        sync.load(tmp_path / "c", {"x": target}, config=SMALL)


def test_a_buffer_that_is_not_saved_is_not_loaded(tmp_path: Path) -> None:
    """Though an older version saved it; torch says so, too."""
    target = Queue(torch.zeros(2, 3))
    sync.save({"x": {**target.state_dict(), "seen": torch.ones(3)}}, tmp_path / "c", config=SMALL)
    target.register_buffer("seen", None, persistent=False)
    with pytest.raises(MismatchError, match=r"x\.seen"):
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


INT, LONG = torch.int32, torch.int64
HALF, SINGLE, BFLOAT = torch.float16, torch.float32, torch.bfloat16
COMPLEX, TINY = torch.complex64, vars(torch).get("float4_e2m1fn_x2")


@pytest.mark.parametrize(
    ("stored", "had", "num", "is_any", "converted", "expected"),
    [
        (SINGLE, HALF, 3, False, None, HALF),
        (SINGLE, HALF, 0, False, None, HALF),
        (SINGLE, HALF, 3, False, BFLOAT, HALF),
        (SINGLE, HALF, 3, True, None, SINGLE),
        (SINGLE, HALF, 0, True, None, SINGLE),
        (SINGLE, HALF, 3, True, BFLOAT, BFLOAT),
        pytest.param(
            *(TINY, HALF, 3, True, BFLOAT, TINY),
            marks=pytest.mark.skipif(TINY is None, reason="a type of a later version of torch"),
        ),
        (LONG, INT, 3, False, None, INT),
        (LONG, INT, 3, True, BFLOAT, INT),
        (LONG, INT, 0, False, None, LONG),
        (LONG, SINGLE, 0, True, BFLOAT, LONG),
        (LONG, SINGLE, 3, True, BFLOAT, SINGLE),
        (SINGLE, LONG, 3, True, BFLOAT, LONG),
        (SINGLE, LONG, 0, True, BFLOAT, SINGLE),
        (COMPLEX, COMPLEX, 3, True, BFLOAT, COMPLEX),
    ],
)
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("is_parameter", [False, True])
def test_what_is_made_for_another_shape_is_like_what_was_there(
    stored: torch.dtype,
    had: torch.dtype,
    num: int,
    converted: torch.dtype | None,
    expected: torch.dtype,
    *,
    is_any: bool,
    is_trained: bool,
    is_parameter: bool,
) -> None:
    """Of its type; of the stored one where it has no elements, or says itself what it takes."""
    is_trained = is_trained and (had.is_floating_point or had.is_complex)
    target = torch.zeros(num, dtype=had).requires_grad_(is_trained)
    if is_parameter:
        target = torch.nn.Parameter(target, is_trained)
    entries = (TensorEntry("x", DTYPE_NAMES[stored], (2, 4), ()),)
    like = resized_like(entries, {TAG: 0}, target, is_any=is_any, converted=converted)
    assert like is not None
    assert like.is_meta
    assert (like.shape, like.dtype) == ((2, 4), expected)
    has_gradient = expected.is_floating_point or expected.is_complex
    assert like.requires_grad == (is_trained and has_gradient)
    assert type(like) is type(target)
    assert resized_like(entries, [1], target, is_any=is_any, converted=converted) is None


def test_a_tensor_is_like_a_stored_one_in_shape_and_type() -> None:
    """Both of them."""
    entry = TensorEntry("x", "float32", (2, 3), ())
    assert is_like(entry, torch.zeros(2, 3))
    assert not is_like(entry, torch.zeros(3, 2))
    assert not is_like(entry, torch.zeros(2, 3, dtype=torch.float64))
