"""A slice of a tensor is what it would be of the loaded tensor, and reads little more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptio import sync
from ckptio.errors import CheckpointError, ConfigError, TargetError
from ckptio.events import ReadProgressed
from tests.loads import BLOCK
from tests.strategies import SMALL, TORCH_DTYPES, assert_same, bytes_of, random_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckptio.events import Event


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return []


@pytest.fixture(scope="module")
def engine(events: list[Event]) -> Iterator[sync.Engine]:
    with sync.Engine(SMALL, observer=events.append) as engine:
        yield engine


SHAPE = (37, 50, 21)


def indices(size: int) -> st.SearchStrategy[int | slice]:
    bounds = st.none() | st.integers(-size - 3, size + 3)
    return st.integers(-size, size - 1) | st.builds(slice, bounds, bounds)


@pytest.fixture(scope="module")
def volumes(
    engine: sync.Engine, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("slices") / "ckpt"
    state = {name: random_tensor(SHAPE, dtype) for name, dtype in TORCH_DTYPES.items()}
    engine.save(state, path)
    return str(path), state


@given(
    data=st.data(),
    name=st.sampled_from(sorted(TORCH_DTYPES)),
    ndim=st.integers(0, 3),
)
def test_a_slice_is_the_slice_of_the_tensor(
    engine: sync.Engine,
    volumes: tuple[str, dict[str, torch.Tensor]],
    data: st.DataObject,
    name: str,
    ndim: int,
) -> None:
    """Whatever ints and slices, as `tensor[index]` takes them."""
    path, state = volumes
    index = tuple(data.draw(indices(size)) for size in SHAPE[:ndim])
    found = engine.load_slice(path, name, index[0] if ndim == 1 else index)
    assert_same(found, state[name][index])
    assert found.is_contiguous()


@pytest.mark.parametrize("index", [-37, 36, slice(5, 2), slice(-40, 40), slice(40, 50)])
def test_an_index_reaches_as_far_as_that_of_a_tensor(
    engine: sync.Engine, volumes: tuple[str, dict[str, torch.Tensor]], index: int | slice
) -> None:
    path, state = volumes
    assert_same(engine.load_slice(path, "float32", index), state["float32"][index])


@given(start=st.integers(0, 36), count=st.integers(0, 37))
def test_a_slice_reads_its_bytes_and_two_blocks(
    engine: sync.Engine,
    events: list[Event],
    volumes: tuple[str, dict[str, torch.Tensor]],
    start: int,
    count: int,
) -> None:
    """Rows of a large tensor are read without the rest of it."""
    path, state = volumes
    events.clear()
    found = engine.load_slice(path, "float32", slice(start, start + count))
    assert_same(found, state["float32"][start : start + count])
    read = max((e.read_nbytes for e in events if isinstance(e, ReadProgressed)), default=0)
    assert found.nbytes <= read <= (found.nbytes + 2 * BLOCK if found.nbytes else 0)


@pytest.mark.parametrize(
    ("name", "index", "error"),
    [
        ("nothing", 0, TargetError), ("float32", 37, TargetError), ("float32", -38, TargetError),
        ("float32", (0, 0, 0, 0), TargetError), ("float32", slice(0, 9, 2), ConfigError),
        ("float32", slice(None, None, -1), ConfigError), ("float32", None, ConfigError),
        ("float32", "0", ConfigError), ("float32", (0, ...), ConfigError),
        ("float32", [1, 2], ConfigError), ("float32", 1.0, ConfigError),
        ("float32", slice("a"), CheckpointError), ("float32", True, ConfigError),
        ("float32", slice(0, 9, 0), ConfigError), ("float32", slice(0, 9, 1.0), ConfigError),
        ("float32", slice(0, 9, np.ones(2)), ConfigError), ("float32", (10**5000,), TargetError),
    ],
)  # fmt: skip
def test_an_index_that_does_not_fit_is_refused(
    engine: sync.Engine,
    volumes: tuple[str, dict[str, torch.Tensor]],
    name: str,
    index: Any,
    error: type[Exception],
) -> None:
    """With a typed error that says what is taken."""
    with pytest.raises(error, match=f"{name!r}|load_slice takes"):
        engine.load_slice(volumes[0], name, index)


@pytest.mark.parametrize("name", [slice(0, 4), None, b"float32", np.array(["float32"] * 2)])
def test_what_is_no_name_is_refused(
    engine: sync.Engine, volumes: tuple[str, dict[str, torch.Tensor]], name: Any
) -> None:
    """Where name and index are in each other's place, for one."""
    with pytest.raises(ConfigError, match="name of a tensor before the index"):
        engine.load_slice(volumes[0], name, 0)
    with pytest.raises(ConfigError, match="is no device"):
        engine.load_slice(volumes[0], "float32", 0, device=2**70)  # type: ignore[arg-type]  # refused


def test_numbers_of_numpy_are_indices(
    engine: sync.Engine, volumes: tuple[str, dict[str, torch.Tensor]]
) -> None:
    path, state = volumes
    found = engine.load_slice(path, "float32", (np.int64(3), slice(np.uint8(1), np.int32(3))))
    assert_same(found, state["float32"][3, 1:3])


def test_a_tied_tensor_is_sliced_by_any_of_its_names(engine: sync.Engine, tmp_path: Path) -> None:
    """A part of a view, too, which has no bytes of its own."""
    weight = torch.randn(20, 10)
    engine.save({"a": weight, "b": weight, "t": weight.t(), "s": torch.tensor(3.0)}, tmp_path / "c")
    assert torch.equal(engine.load_slice(tmp_path / "c", "b", slice(2, 5)), weight[2:5])
    assert engine.load_slice(tmp_path / "c", "s", ()).item() == 3
    assert torch.equal(engine.load_slice(tmp_path / "c", "t", 0), weight.t()[0])


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t(),
    "a part": lambda t: t[3:, 1:7],
    "every other": lambda t: t[::2, ::3],
    "expanded": lambda t: t[:1].expand(50, -1),
    "without elements": lambda t: t[:0],
    "conjugate": lambda t: t.conj(),
    "negative": lambda t: t.conj().imag,
    "of another type": lambda t: torch.view_as_real(t)[..., 0],
}


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize(
    "index", [(), 0, -1, slice(1, 2), (slice(None), slice(1, 3)), (0, 0), slice(5, 5)]
)
def test_a_slice_of_a_view_is_that_of_the_tensor(
    engine: sync.Engine, tmp_path: Path, kind: str, index: Any
) -> None:
    """Whatever it is a view of: as `load(path)[name][index]`, and in memory of its own."""
    base = torch.randn(20, 10, dtype=torch.complex64)
    view = VIEWS[kind](base)
    engine.save({"a": base, "v": view}, tmp_path / "c")
    try:
        expected = view[index]
    except IndexError:
        with pytest.raises(TargetError, match="'v' of shape"):
            engine.load_slice(tmp_path / "c", "v", index)
        return
    found = engine.load_slice(tmp_path / "c", "v", index)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert bytes_of(found) == bytes_of(expected)
    assert found.is_contiguous()


@pytest.mark.parametrize("name", ["int4", "bits16"])
@pytest.mark.parametrize("kind", ["transposed", "a part", "every other", "expanded"])
def test_a_slice_of_a_view_of_bits_is_that_of_the_tensor(
    engine: sync.Engine, tmp_path: Path, name: str, kind: str
) -> None:
    """Though torch has no copy of some types of bits."""
    base = random_tensor((20, 10), getattr(torch, name))
    view = VIEWS[kind](base)
    engine.save({"a": base, "v": view}, tmp_path / "c")
    integer = {1: torch.uint8, 2: torch.int16}[view.itemsize]
    for index in ((), 0, (slice(1, 3), slice(2, 5))):
        found = engine.load_slice(tmp_path / "c", "v", index)
        assert found.dtype is view.dtype
        assert torch.equal(found.view(integer), view.view(integer)[index])


def test_a_slice_of_a_view_reads_little_more(
    engine: sync.Engine, events: list[Event], tmp_path: Path
) -> None:
    """From its first byte to its last."""
    base = torch.arange(300_000, dtype=torch.int32)
    few, many = base.reshape(-1, 100)[10:], base.reshape(3, -1)[1:]
    engine.save({"a": base, "few": few, "many": many}, tmp_path / "c")
    for name, view, index in (
        ("few", few, (slice(3, 5),)),
        ("many", many, (slice(1), slice(5, 7))),
    ):
        events.clear()
        found = engine.load_slice(tmp_path / "c", name, index)
        assert torch.equal(found, view[index])
        read = max(event.read_nbytes for event in events if isinstance(event, ReadProgressed))
        assert 0 < read <= found.nbytes + 2 * BLOCK


def test_a_slice_of_what_is_stored_as_bytes_is_refused(engine: sync.Engine, tmp_path: Path) -> None:
    """It has elements only once it is loaded; small ones are no tensors at all."""
    state = {
        "big": np.arange(6, dtype=">f4").reshape(2, 3),
        "days": np.array(["2020-01-01", "2021-01-01"], "M8[D]"),
        "bytes": bytes(5000),
        "array": np.arange(3, dtype=np.uint8),
        "flags": np.array([True, False]),
    }
    engine.save(state, tmp_path / "c")
    for name, what in (("big", "an array of '>f4'"), ("days", "an array of"), ("bytes", "bytes")):
        with pytest.raises(TargetError, match=f"{name!r} is {what}.* with select="):
            engine.load_slice(tmp_path / "c", name, 0)
    state["step"] = 3
    engine.save(state, tmp_path / "d")
    with pytest.raises(TargetError, match=r"no tensor 'step'.*load\(select=\) takes other values"):
        engine.load_slice(tmp_path / "d", "step", 0)
    assert engine.load(tmp_path / "d", select="step") == {"step": 3}
    assert engine.load_slice(tmp_path / "c", "array", slice(1, 3)).tolist() == [1, 2]
    assert engine.load_slice(tmp_path / "c", "flags", 0).item() is True


def test_a_slice_goes_by_names_of_the_state(engine: sync.Engine, tmp_path: Path) -> None:
    """Not by those that tensors are stored under, which may be numbered or escaped."""
    state = {1: 1.0, "1": 2.0, "1~2": 3.0, "\xe9": 4.0, "\\xe9": 5.0}
    engine.save({name: torch.full((2,), value) for name, value in state.items()}, tmp_path / "c")
    for name in ("1~2", "\xe9", "\\xe9"):
        assert engine.load_slice(tmp_path / "c", name, 0).item() == state[name]
    assert engine.load_slice(tmp_path / "c", "1", 0).item() == 1  # the first of that name


def test_a_slice_that_no_memory_holds_is_refused(engine: sync.Engine, tmp_path: Path) -> None:
    """However little is stored of it."""
    engine.save({"x": torch.ones(1).expand(1 << 50)}, tmp_path / "c")
    with pytest.raises(TargetError, match="'x'"):
        engine.load_slice(tmp_path / "c", "x", slice(None))
    assert engine.load_slice(tmp_path / "c", "x", slice(3, 5)).tolist() == [1, 1]
