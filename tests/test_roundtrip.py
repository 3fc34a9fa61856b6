from __future__ import annotations

import copy
import io
import marshal
import os
import pickle
import random
import shelve
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given

from ckptio import sync
from ckptio.errors import UnsupportedLeafError
from ckptio.format.bucket import decode_header, header_nbytes
from ckptio.format.encode import MAX_DEPTH
from tests.rig import config_with
from tests.strategies import (
    CLASSES,
    SMALL,
    TORCH_DTYPES,
    Color,
    Key,
    Level,
    Point,
    Settings,
    assert_same,
    bytes_of,
    random_tensor,
    states,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("roundtrip") / "ckpt")


def data_nbytes(path: str | Path) -> int:
    """Add the sizes of the data files of a checkpoint up."""
    return sum(os.path.getsize(file) for file in buckets_of(path))


def buckets_of(path: str | Path) -> list[str]:
    return sorted(f"{path}/{n}" for n in os.listdir(path) if n.endswith(".safetensors"))


@given(state=states)
def test_any_state_comes_back_bit_for_bit(engine: sync.Engine, place: str, state: Any) -> None:
    """Values, types and structure, with nothing to report."""
    engine.save(state, place, overwrite=True)
    result = engine.load_with_report(place, types=CLASSES)
    assert_same(result.state, state)
    assert result.report.notes == ()


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (7, 5), (50_001,), (2, 3, 4000)])
def test_every_element_type_is_exact(
    engine: sync.Engine, place: str, name: str, shape: tuple[int, ...]
) -> None:
    """Random bits, NaNs with payloads among them, in tensors of no, one and many slabs."""
    one, other = (random_tensor(shape, TORCH_DTYPES[name], seed) for seed in range(2))
    state = {"w": one, "t": other.transpose(0, -1) if shape else other}
    engine.save(state, place, overwrite=True)
    assert_same(engine.load(place), state)


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_strided_sources_are_exact(engine: sync.Engine, place: str, name: str) -> None:
    """Views with strides across many segments, and dimensions in any order."""
    base = random_tensor((60, 50, 40), TORCH_DTYPES[name])
    for view in (base.permute(2, 0, 1), base[::2, 1:, ::3], base[5:, 7, :].t()):
        engine.save([view], place, overwrite=True)
        found = engine.load(place)
        assert_same(found, [view])
        is_dense = view.numel() * view.element_size() == view.untyped_storage().nbytes()
        assert found[0].stride() == view.stride() if is_dense else found[0].is_contiguous()


@pytest.mark.parametrize("writes", ["ckptio", "torch"])
def test_dimensions_lie_in_memory_as_they_did(
    engine: sync.Engine, tmp_path: Path, writes: str
) -> None:
    """`channels_last` and any other order; where types are converted, too; ties are ties."""
    image = torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last)
    turned = torch.randn(5, 7).t()
    state = {"image": image, "turned": turned, "same": turned, "flat": torch.randn(3, 4)}
    path = tmp_path / "c"
    if writes == "torch":
        torch.save(state, path)
    else:
        engine.save(state, path)
    found = engine.load(path)
    assert_same(found, state)
    assert {k: t.stride() for k, t in found.items()} == {k: t.stride() for k, t in state.items()}
    assert found["same"].data_ptr() == found["turned"].data_ptr()
    half = engine.load(path, select="image", dtype=torch.bfloat16)["image"]
    assert torch.equal(half, image.bfloat16())
    assert half.stride() == image.stride()


@pytest.mark.parametrize("is_into", [True, False])
def test_a_fused_optimizer_goes_on_where_it_was(
    engine: sync.Engine, tmp_path: Path, *, is_into: bool
) -> None:
    """It walks memory, not elements: moments have to lie as their parameter does."""

    def begin() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.arange(3 * 36.0).view(1, 3, 6, 6)).square().mean().backward()
        optimizer.step()

    model, optimizer = begin()
    step(model, optimizer)
    engine.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    resumed, moved = begin()
    if is_into:
        engine.load(tmp_path / "c", into={"model": resumed, "optimizer": moved})
    else:
        found = engine.load(tmp_path / "c")
        resumed.load_state_dict(found["model"])
        moved.load_state_dict(found["optimizer"])
    step(model, optimizer)
    step(resumed, moved)
    assert_same(resumed.state_dict(), model.state_dict())


def test_a_state_of_many_waves_comes_back(engine: sync.Engine, place: str) -> None:
    """Four times the pool, in tensors of every size, in many files."""
    sizes = [*range(0, 60, 7), *range(1000, 70_000, 6113), 300_000, 700_000]
    state = {f"layer.{i}": random_tensor((n,), torch.uint8, i) for i, n in enumerate(sizes)}
    state["odd"] = random_tensor((333, 777), torch.bfloat16).t()
    info = engine.save(state, place, overwrite=True)
    assert info.nbytes > 3 * SMALL.pool_nbytes
    assert info.num_files > 3
    assert_same(engine.load(place), state)
    assert engine.verify(place).is_whole


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=">i4").reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.array(3.5), np.array(3.5, ">f8"), np.zeros((0, 4), "<i2"), np.zeros(0), np.zeros((2, 0)),
        np.frombuffer(b"abcdefgh" * 1000, "<u4"), np.arange(20)[::-3], np.array(["a", "bcd", ""]),
        np.array([b"a\0", b""]), np.array(["é", "\0x"], ">U2"), np.array([True, False]),
        np.array(["2024-01-01", "NaT"], "M8[D]"), np.array([1, 2], ">m8[25s]"),
        np.array([1, 2], "m8"), np.array([1, np.nan, -0.0], np.longdouble),
        np.array([1j, np.inf], ">c16"), np.arange(100_000, dtype=np.float16),
    ],
    ids=lambda a: f"{a.dtype.str}{list(a.shape)}",
)  # fmt: skip
def test_every_plain_array_comes_back(
    engine: sync.Engine, place: str, array: np.ndarray[Any, Any]
) -> None:
    """With its byte order and shape, writable and in C order."""
    engine.save({"a": array, "again": [array]}, place, overwrite=True)
    found = engine.load(place)
    assert_same(found["a"], array)
    assert_same(found["again"][0], array)
    assert found["a"].flags.writeable
    assert found["a"].flags.c_contiguous


def test_long_bytes_come_back(engine: sync.Engine, place: str) -> None:
    """Whether they are in the manifest or in a bucket; empty or a megabyte."""
    state: list[Any] = [n * b"\x7f\x00" for n in (0, 1, 512, 513, 500_000)]
    state += [bytearray(item) for item in state]
    engine.save(state, place, overwrite=True)
    assert_same(engine.load(place), state)


def test_a_small_view_of_a_large_storage_writes_its_bytes(
    engine: sync.Engine, tmp_path: Path
) -> None:
    """64 bytes of 64 MiB: one page of header, and 64 bytes."""
    big = torch.zeros(16 << 20)
    big[5000:5016] = torch.arange(16.0)
    engine.save({"view": big[5000:5016]}, tmp_path / "c")
    assert data_nbytes(tmp_path / "c") == 4096 + 64
    assert_same(engine.load(tmp_path / "c"), {"view": torch.arange(16.0)})


def test_an_expanded_tensor_writes_its_memory(engine: sync.Engine, tmp_path: Path) -> None:
    """A gigabyte that is one row is one row in the file, and in memory afterwards."""
    state = {"mask": torch.arange(100.0).expand(2_500_000, 100)}
    engine.save(state, tmp_path / "c")
    assert data_nbytes(tmp_path / "c") == 4096 + 400
    found = engine.load(tmp_path / "c")["mask"]
    assert found.stride() == (0, 1)
    assert found.untyped_storage().nbytes() == 400


def test_ties_come_back_tied(engine: sync.Engine, tmp_path: Path) -> None:
    """Stored once, whatever views they are; apart what was apart."""
    weight = torch.nn.Parameter(torch.randn(100, 50))
    state = {
        "embed": weight, "head": weight, "t": weight.t(), "row": weight[3], "other": weight.clone(),
    }  # fmt: skip
    engine.save(state, tmp_path / "c")
    assert data_nbytes(tmp_path / "c") == 4096 + 2 * weight.nbytes
    found = engine.load(tmp_path / "c")
    assert_same(found, state)
    found["head"][3] = 5
    assert (found["row"] == 5).all()
    assert (found["t"][:, 3] == 5).all()
    assert not (found["other"][3] == 5).any()


FUSED = torch.randn(16, 16)
TURNED = torch.randn(3, 4).t()
ROW = FUSED[:2]
VECTOR = torch.randn(10)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("tied", "others"),
    [
        pytest.param(FUSED[:, :4], {}, id="with gaps"),
        pytest.param(ROW, {"column": FUSED[:, 0]}, id="beside a view with gaps"),
        pytest.param(VECTOR, {"array": VECTOR.numpy()}, id="beside an array"),
        pytest.param(TURNED, {}, id="turned"),
    ],
)
def test_one_tensor_of_two_names_is_one_whatever_it_is(
    place: str, tied: torch.Tensor, others: dict[str, Any], dtype: torch.dtype | None
) -> None:
    """Also where other views of its memory have to be stored apart, or it is converted."""
    sync.save({"a": tied, **others, "b": tied}, place, overwrite=True)
    found = sync.load(place, dtype=dtype)
    assert torch.equal(found["a"], tied.to(dtype) if dtype else tied)
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert found["a"].stride() == found["b"].stride()


def test_conjugates_and_negatives_come_back(engine: sync.Engine, place: str) -> None:
    """Alone, without a base that is stored, as the values they stand for."""
    base = torch.randn(300, 40, dtype=torch.complex64)
    for view in (base.conj(), base.conj().imag, base.conj().t(), base.to(torch.complex128).conj()):
        engine.save([view], place, overwrite=True)
        assert torch.equal(engine.load(place)[0], view)


NAMES: list[dict[Any, Any]] = [
    {"a.b": 1, "a": {"b": 2}}, {1: 1, "1": 2, 1.5: 3}, {"__metadata__": 1, "": {"": 2}},
    {"~": {"~": 1}}, {"a\0b": 1, "é": 2, "\ud800": 3, "a\udc01": 4}, {"x" * 10_000: 1},
    {("a", 1): 1, "('a', 1)": 2}, {Color.RED: 1, "red": 2}, {Key(1, 2): 1, Point(1, 2): 2},
    {None: 1, "None": 2, True: 3, "True": 4}, {10**400: 1},
]  # fmt: skip


@pytest.mark.parametrize("names", NAMES, ids=range(len(NAMES)))
def test_names_that_collide_do_not_mix_tensors_up(
    engine: sync.Engine, place: str, names: dict[Any, Any]
) -> None:
    """Each key has its own tensor, in the state and in the files."""

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        return torch.full((3,), float(value))

    state = fill(names)
    engine.save(state, place, overwrite=True)
    assert_same(engine.load(place, types=CLASSES), state)
    blank = fill(copy.deepcopy(names))
    for tensor in _tensors_of(blank):
        tensor.zero_()
    engine.load(place, blank)
    assert_same(blank, state)


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _tensors_of(item)
    else:
        yield value


def test_classes_come_back_if_they_are_passed(engine: sync.Engine, place: str) -> None:
    """Plain values with a note in the report, if they are not."""
    state = {
        "p": Point(torch.ones(2), 1), "s": Settings(np.float32(0.1)), "e": [Color.RED, Level.LOW],
    }  # fmt: skip
    engine.save(state, place, overwrite=True)
    assert_same(engine.load(place, types=CLASSES), state)
    result = engine.load_with_report(place)
    plain = {
        "p": (torch.ones(2), 1), "s": {"rate": np.float32(0.1), "name": "adam"}, "e": ["red", 1],
    }  # fmt: skip
    assert_same(result.state, plain)
    assert [note.split(":")[0] for note in result.report.notes] == ["p", "s", "e.0", "e.1"]
    assert len(engine.load_with_report(place, types=[Point, Settings]).report.notes) == 2


@pytest.mark.parametrize(
    ("bad", "fqn"),
    [
        ({"a": torch.ones(5), "b": [lambda: 0]}, "b.0"),
        ({"a": torch.ones(5), "b": {"c": torch.zeros(2, device="meta")}}, "b.c"),
        ({"a": torch.ones(5), "b": torch.eye(2).to_sparse()}, "b"),
        ({"a": torch.ones(5), "b": np.array([{}])}, "b"),
        ({"a": torch.ones(5), "b": {object: 1}}, f"b.{object!r}"),
        (os, "state"),
    ],
    ids=["function", "meta", "sparse", "objects", "key", "module"],
)
def test_what_is_refused_leaves_nothing_behind(
    engine: sync.Engine, tmp_path: Path, bad: Any, fqn: str
) -> None:
    """No directory, no file: it is refused before anything is written."""
    with pytest.raises(UnsupportedLeafError) as caught:
        engine.save(bad, tmp_path / "new" / "ckpt")
    assert caught.value.fqn in (fqn, "")
    assert os.listdir(tmp_path) == []


def test_cycles_and_depths_leave_nothing_behind(engine: sync.Engine, tmp_path: Path) -> None:
    """The same error, with the name of the place."""
    cycle: dict[str, Any] = {"w": torch.ones(1)}
    cycle["self"] = [cycle]
    deep: Any = torch.ones(1)
    for _ in range(MAX_DEPTH + 1):
        deep = {"d": deep}
    for state in (cycle, deep):
        with pytest.raises(UnsupportedLeafError):
            engine.save(state, tmp_path / "ckpt")
    assert os.listdir(tmp_path) == []
    engine.save(deep["d"], tmp_path / "ckpt")
    assert_same(engine.load(tmp_path / "ckpt"), deep["d"])
    engine.load(tmp_path / "ckpt", deep["d"])


def everything() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
        "rng": torch.get_rng_state(),
        "python": random.Random(1).getstate(),
        "numpy": np.random.default_rng(1).bit_generator.state,
        "legacy": np.random.RandomState(1).get_state(),
        "array": np.arange(5),
        "bytes": b"x" * 3000,
        "classes": [Point(1, 2), Settings(1), Color.RED, {Key(1, 2): {3}}],
    }


PICKLE = "pickle was called"


def test_nothing_is_ever_pickled(
    engine: sync.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on save nor on load, by us or by anyone on our behalf."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError(PICKLE)

    state = everything()
    for module, names in (
        (pickle, ["load", "loads", "dump", "dumps", "Pickler", "Unpickler", "_Pickler", "_loads"]),
        (pickle, ["_Unpickler", "_dumps", "_load", "_dump"]),
        (marshal, ["load", "loads", "dump", "dumps"]),
        (torch, ["load", "save"]),
        (shelve, ["open"]),
        (np, ["load", "save"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    engine.save(state, tmp_path / "c")
    engine.load(tmp_path / "c", types=CLASSES)
    engine.load(tmp_path / "c", {**everything(), "classes": None})
    engine.verify(tmp_path / "c")
    with pytest.raises(AssertionError, match=PICKLE):
        pickle.dumps(1)


def test_no_file_holds_a_pickle(engine: sync.Engine, tmp_path: Path) -> None:
    """No byte of a checkpoint is for an unpickler."""
    engine.save(everything(), tmp_path / "c")
    for name in os.listdir(tmp_path / "c"):
        data = (tmp_path / "c" / name).read_bytes()
        with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError)):
            pickle.load(io.BytesIO(data))  # noqa: S301  # our own file


def test_random_states_come_back(engine: sync.Engine, place: str) -> None:
    """Of Python, numpy and torch: what they draw afterwards is what they would have drawn."""
    python, numpy = random.Random(3), np.random.default_rng(3)
    generator = torch.Generator().manual_seed(3)
    state = {
        "python": python.getstate(), "numpy": numpy.bit_generator.state,
        "torch": generator.get_state(),
    }  # fmt: skip
    engine.save(state, place, overwrite=True)
    expected = (python.random(), numpy.random(), torch.rand(3, generator=generator))
    found = engine.load(place)
    python.setstate(found["python"])
    numpy.bit_generator.state = found["numpy"]
    generator.set_state(found["torch"])
    assert_same((python.random(), numpy.random(), torch.rand(3, generator=generator)), expected)


SCHEDULERS: dict[str, Any] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "linear": torch.optim.lr_scheduler.LinearLR,
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.1),
    "adamw": lambda p: torch.optim.AdamW(p, torch.tensor(0.1), amsgrad=True),
    "rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "groups": lambda p: torch.optim.Adam([{"params": [q], "lr": 0.1 * i} for i, q in enumerate(p)]),
}


class Training:
    """A model, an optimizer and a schedule, and steps on fixed data."""

    def __init__(self, optimizer: str, scheduler: str) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        )
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()))
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.state = {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler,
        }  # fmt: skip

    def steps(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            data = torch.randn(16, 6, generator=generator)
            loss = (self.model(data) - data.sum(1, keepdim=True)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [(name, "step") for name in OPTIMIZERS] + [("adam", name) for name in SCHEDULERS],
)
@pytest.mark.parametrize("steps", [0, 4])
def test_training_resumes_as_if_nothing_had_happened(
    engine: sync.Engine, place: str, optimizer: str, scheduler: str, steps: int
) -> None:
    """From a fresh optimizer without moments, to the same losses and the same parameters."""
    training = Training(optimizer, scheduler)
    training.steps(0, steps)
    engine.save(training.state, place, overwrite=True)
    expected = training.steps(steps, steps + 4)

    resumed = Training(optimizer, scheduler)
    result = engine.load_with_report(place, resumed.state, strict="raise")
    assert result.report.missing == result.report.unexpected == ()
    assert resumed.steps(steps, steps + 4) == expected
    assert_same(dict(resumed.model.state_dict()), dict(training.model.state_dict()))
    assert resumed.scheduler.get_last_lr() == training.scheduler.get_last_lr()


def test_a_module_can_be_the_whole_state(engine: sync.Engine, place: str) -> None:
    """Saved and loaded as itself; as a dict without a target."""
    module, other = torch.nn.LSTM(3, 4), torch.nn.LSTM(3, 4)
    engine.save(module, place, overwrite=True)
    assert engine.load(place, other) is other
    assert_same(dict(other.state_dict()), dict(module.state_dict()))
    assert_same(dict(engine.load(place)), dict(module.state_dict()))


def test_safetensors_reads_every_bucket(engine: sync.Engine, tmp_path: Path) -> None:
    """`safe_open` and `load_file` give the values; data lies on pages; all names are there."""
    state = {
        f"{name}.{i}": random_tensor(shape, dtype)
        for name, dtype in TORCH_DTYPES.items()
        for i, shape in enumerate([(), (5,), (3, 0), (64, 64), (99, 301)])
    }
    engine.save(state, tmp_path / "c")
    found: dict[str, torch.Tensor] = {}
    files = buckets_of(tmp_path / "c")
    assert len(files) > 2
    for file in files:
        loaded = safetensors.torch.load_file(file)
        with safetensors.safe_open(file, "pt") as opened:
            assert sorted(opened.keys()) == sorted(loaded)
            assert opened.metadata()["format"] == "pt"
            notes = opened.metadata()
            for name in opened.keys():  # noqa: SIM118  # it is no dict
                assert bytes_of(opened.get_tensor(name)) == bytes_of(loaded[name])
        for name, tensor in loaded.items():
            noted = notes.get(f"ckptio.dtype.{name}")
            assert noted is None or noted == str(state[name].dtype).removeprefix("torch.")
            found[name] = tensor if noted is None else _as(tensor, TORCH_DTYPES[noted])
        with open(file, "rb") as stream:
            head = stream.read(header_nbytes(stream.read(8), os.path.getsize(file)) - 8)
        assert (len(head) + 8) % 4096 == 0
        raw = (len(head)).to_bytes(8, "little") + head
        tensors, _ = decode_header(raw, os.path.getsize(file) - len(raw))
        assert all(t.start % state[t.name].itemsize == 0 for t in tensors)
        assert all(t.start % 4096 == 0 for t in tensors if t.nbytes and t.nbytes % 4096 == 0)
    assert_same({name: found[name] for name in state}, state)


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View what a foreign kind is stored as in its own type."""
    if dtype.is_complex:
        return torch.view_as_complex(tensor)
    return tensor.view(dtype)


@pytest.mark.parametrize("options", [{}, {"direct_io": "off"}, {"max_writes": 1, "max_reads": 1}])
def test_options_of_the_engine_change_no_byte(tmp_path: Path, options: dict[str, Any]) -> None:
    """One writer or several, direct or not: the same data files."""
    sizes = [5, 90_000, 700_000]
    state = {f"t{i}": random_tensor((n,), torch.uint8, i) for i, n in enumerate(sizes)}
    found = []
    for name, config in (("a", SMALL), ("b", config_with(durability="none", **options))):
        sync.save(state, tmp_path / name, config=config)
        assert_same(sync.load(tmp_path / name, config=config), state)
        found.append([Path(file).read_bytes() for file in buckets_of(tmp_path / name)])
    assert found[0] == found[1]
