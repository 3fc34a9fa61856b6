from __future__ import annotations

import argparse
import collections
import datetime as dt
import enum
import errno
import os
import re
import struct
import types
import zipfile
from collections import OrderedDict
from pathlib import Path  # fixtures are annotated with it
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch

from ckptio import sync
from ckptio.engine import lanes
from ckptio.errors import FormatError, UnknownFormatError
from ckptio.events import ReadProgressed
from ckptio.storage import linux
from tests.adapters.rig import small_disk
from tests.foreign.rig import assert_same_state, make_training_state, save_dcp, save_small
from tests.foreign.test_dcp import Payload
from tests.rig import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptio.events import Event


@pytest.fixture(params=[True, False], ids=["zip", "old"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "state.pt"
    torch.save(make_training_state(), path, _use_new_zipfile_serialization=request.param)
    return path


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_old_files_of_other_protocols_load_as_far_as_torch_loads_them(tmp_path: Path) -> None:
    """Of the third; the next ones are known for what they are, and why nobody reads them."""
    state = {"w": torch.arange(3.0), "n": 1}
    for protocol in (3, 4, 5):
        torch.save(
            state, tmp_path / "x", _use_new_zipfile_serialization=False, pickle_protocol=protocol
        )
        if protocol == 3:
            assert_same_state(sync.load(tmp_path / "x", config=SMALL), state)
            continue
        with pytest.raises(FormatError, match="Unsupported operand"):
            sync.load(tmp_path / "x", config=SMALL)


@pytest.mark.usefixtures("no_leaks")
def test_a_state_comes_back(file: Path) -> None:
    """Of both formats that torch has had."""
    assert_same_state(sync.load(file, config=SMALL), make_training_state())


def test_select_slice_and_into_work_as_with_our_own(file: Path) -> None:
    """The target is filled in place."""
    state = make_training_state()
    with sync.Engine(SMALL) as engine:
        assert engine.load(file, select="epoch") == {"epoch": 11}
        rows = engine.load_slice(file, "model.embed.weight", slice(1, 3))
        assert torch.equal(rows, state["model"]["embed.weight"][1:3])
        target = {"model": {n: torch.zeros_like(t) for n, t in state["model"].items()}}
        engine.load_with_report(file, target, strict="ignore")
        assert_same_state(target["model"], state["model"])


def test_ties_and_views_stay(tmp_path: Path) -> None:
    """What shared its memory does so again, as with a checkpoint of ours."""
    base = torch.arange(12.0).reshape(3, 4)
    torch.save(OrderedDict(a=base, b=base, rows=base[1:]), tmp_path / "x.pt")
    found: Any = sync.load(tmp_path / "x.pt", config=SMALL)
    assert type(found) is OrderedDict
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert torch.equal(found["rows"], base[1:])


@pytest.mark.parametrize(
    ("versions", "is_kept"),
    [
        ({"": {"version": 1}, "a": {"norm": {"w.version": 1, "b": "x"}, "n": None}}, True),
        (3, False),
        ({"": {}, "a": 3}, False),
        ({"": {"version": 1, "w": [1]}}, False),
        ({"": {"norm": {"w.version": 1, "b": [1]}}}, False),
    ],
)
def test_versions_of_modules_come_along(tmp_path: Path, versions: object, *, is_kept: bool) -> None:
    """And nothing else that a state of modules has for an attribute of their name."""
    state = torch.nn.Linear(2, 3).state_dict()
    state._metadata = versions  # type: ignore[attr-defined]  # torch's own
    torch.save({"m": state}, tmp_path / "x.pt")
    found: Any = sync.load(tmp_path / "x.pt", config=SMALL)["m"]
    assert_same_state(dict(found), dict(state))
    assert getattr(found, "_metadata", None) == (versions if is_kept else None)


def test_types_of_tensors_without_elements_stay_in_one_storage(tmp_path: Path) -> None:
    """Of a file that it maps, torch would make both of the first one's type."""
    empty, path = torch.empty((0, 2), dtype=torch.uint8), tmp_path / "state.pt"
    torch.save({"a": empty, "b": empty.view(torch.bfloat16), "w": torch.ones(3)}, path)
    assert_same_state(sync.load(path, config=SMALL), torch.load(path))


def test_a_file_that_is_more_than_data_runs_nothing(tmp_path: Path) -> None:
    """Of both formats; the error says what it was."""
    proof = tmp_path / "proof"
    for is_zip in (True, False):
        state = {"w": torch.ones(2), "x": Payload(f"touch {proof}")}
        torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
        with pytest.raises(FormatError, match="more than data"):
            sync.load(tmp_path / "x.pt", config=SMALL)
    assert not proof.exists()


class Marks:
    """Leaves a mark when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return leave_mark, (str(self.path),)


def leave_mark(path: str) -> None:
    Path(path).touch()


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")  # as torch 2.15 says
@pytest.mark.parametrize("is_zip", [True, False])
def test_what_is_more_than_data_is_left_out_if_nobody_wants_it(
    tmp_path: Path, *, is_zip: bool
) -> None:
    """A script's arguments beside a model do not cost the model; nothing of them is made."""
    file, mark = tmp_path / "x.pt", tmp_path / "mark"
    state: dict[str, Any] = {
        "model": {"w": torch.arange(6.0)},
        "counts": collections.defaultdict(list, {"a": [1, 2]}),
        "args": argparse.Namespace(lr=1, inner=types.SimpleNamespace(a=torch.ones(9))),
        "marks": [Marks(mark)],
        "sparse": torch.eye(3).to_sparse(),
    }
    torch.save(state, file, _use_new_zipfile_serialization=is_zip)
    found: Any = sync.load(file, config=SMALL, select=["model", "counts"])
    assert torch.equal(found["model"]["w"], state["model"]["w"])
    assert found["counts"] == {"a": [1, 2]}
    target = {"model": {"w": torch.zeros(6)}}
    sync.load(file, into=target, config=SMALL, select="model")
    assert torch.equal(target["model"]["w"], state["model"]["w"])
    sync.convert(file, tmp_path / "ours", to="ckptio", select=["model"])
    ours: Any = sync.load(tmp_path / "ours")
    assert torch.equal(ours["model"]["w"], state["model"]["w"])
    for select in (None, ["args"], ["marks"], ["sparse"]):
        with pytest.raises(FormatError, match="more than data") as caught:
            sync.load(file, config=SMALL, select=select)
        if select in (None, ["args"]):
            assert "'args' (argparse.Namespace)" in str(caught.value)
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")  # of the old format
@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("into", [None, torch.nn.Linear(2, 2), {"w": torch.zeros(2)}])
def test_a_whole_module_is_told_as_one(tmp_path: Path, into: Any, *, is_zip: bool) -> None:
    """Whatever it is loaded into; and what to do about it."""
    path = tmp_path / "whole.pt"
    torch.save(torch.nn.Linear(2, 2), path, _use_new_zipfile_serialization=is_zip)
    how = "is a whole pickled module .torch.nn.modules.linear.Linear." if is_zip else "has a whole"
    said = rf"whole.pt' {how}.*weights_only=False\).state_dict\(\), and load that"
    with pytest.raises(UnknownFormatError, match=said):
        sync.load(path, config=SMALL, into=into)


def test_a_module_beside_data_is_told_where_it_is_asked_for(tmp_path: Path) -> None:
    """What is beside it is loaded all the same."""
    path = tmp_path / "part.pt"
    torch.save({"m": torch.nn.Sequential(torch.nn.Linear(2, 2)), "step": 3}, path)
    with pytest.raises(UnknownFormatError, match=r"'m' .*; of a whole pickled module that you"):
        sync.load(path, config=SMALL)
    assert sync.load(path, config=SMALL, select="step") == {"step": 3}


def test_one_object_that_is_more_than_data_is_told_as_one(tmp_path: Path) -> None:
    """It has no name that could be left out."""
    path = tmp_path / "one.pt"
    torch.save(argparse.Namespace(lr=1), path)
    for into in (None, {"lr": 2}):
        with pytest.raises(UnknownFormatError, match=r"is one object .*\(argparse\.Namespace\)"):
            sync.load(path, config=SMALL, into=into)


def test_torchscript_is_told_as_such(tmp_path: Path) -> None:
    """It looks like a file of torch.save, and its code is compressed."""
    path = tmp_path / "scripted.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("data.pkl", "constants.pkl", "version"):
            archive.writestr(f"scripted/{name}", b"3")
        archive.writestr("scripted/code/x.py", b"x" * 99, compress_type=zipfile.ZIP_DEFLATED)
    with pytest.raises(FormatError, match=r"it is TorchScript.*torch\.jit\.load\(path\)"):
        sync.load(path, config=SMALL)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x.bin"])
def test_an_empty_file_is_told_as_such(tmp_path: Path, name: str) -> None:
    """Whatever it was to become."""
    (tmp_path / name).touch()
    with pytest.raises(UnknownFormatError, match=f"{name}' is empty"):
        sync.load(tmp_path / name, config=SMALL)


class Options(dict[str, Any]):
    """A dict with attributes, as libraries of options have them."""


class Names(list[str]):
    """A list of another class."""


class Scaled(torch.Tensor):
    """A tensor of another class, with something beside its elements."""


class Packed(torch.Tensor):
    """A tensor that has another one in it, as quantised ones have."""

    _inner: torch.Tensor

    @staticmethod
    def of(inner: torch.Tensor) -> Packed:
        made: Packed = torch.Tensor._make_wrapper_subclass(Packed, inner.shape, dtype=inner.dtype)
        made._inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, *called: Any, **_: Any) -> Any:
        raise NotImplementedError(called)


class Phase(enum.Enum):
    """A key of tables."""

    WARM = 1


class Place(NamedTuple):
    """Another one."""

    row: int


def make_options() -> Options:
    options = Options(lr=1, inner=[torch.ones(2)])
    options.frozen = True  # type: ignore[attr-defined]  # that is what they are for
    return options


OBJECTS: dict[str, tuple[Any, str]] = {
    "dict": (make_options(), f"'x' ({__name__}.Options)"),
    "list": (Names("ab"), f"'x' ({__name__}.Names)"),
    "deque": (collections.deque([1, 2]), "'x' (collections.deque)"),
    "tensor": (torch.ones(3).as_subclass(Scaled), f"'x' ({__name__}.Scaled)"),
    "parameter": (
        torch.nn.Parameter(torch.ones(3).as_subclass(Scaled)),
        f"'x' ({__name__}.Scaled)",
    ),
    "tensor in a tensor": (Packed.of(torch.ones(3)), f"'x' ({__name__}.Packed)"),
    "key": ({"a": 1, Phase.WARM: 2}, f"(a key of type {__name__}.Phase)"),
    "keys": ({Place(1): 1, Place(2): 2, (3, Phase.WARM): 3}, "(a key of type builtins.tuple)"),
    "set": ({"a", Phase.WARM}, f"'x' (a key of type {__name__}.Phase)"),
    "frozenset": ({frozenset([1]): 2}, "(a key of type builtins.frozenset)"),
    "function": (print, "'x' (builtins.print)"),
    "class": (Phase, f"'x' ({__name__}.Phase)"),
}


@pytest.mark.parametrize("case", list(OBJECTS))
@pytest.mark.parametrize("is_zip", [True, False])
def test_whatever_an_object_is_it_does_not_cost_the_rest(
    tmp_path: Path, case: str, *, is_zip: bool
) -> None:
    """Also one that torch fills, or makes of a tensor, and one that is a key."""
    value, said = OBJECTS[case]
    state = {"w": torch.arange(6.0), "x": value, "n": 3}
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    found = sync.load(tmp_path / "x.pt", config=SMALL, select=["w", "n"])
    assert torch.equal(found["w"], state["w"])
    assert found["n"] == 3
    with pytest.raises(FormatError, match=re.escape(said)):
        sync.load(tmp_path / "x.pt", config=SMALL)


def test_a_key_without_a_portable_form_does_not_cost_its_neighbours(tmp_path: Path) -> None:
    """They are beside it in one dict, which may be the state itself."""
    state: dict[Any, Any] = {"w": torch.ones(2), Phase.WARM: 1, Place(1): torch.ones(1)}
    torch.save(state, tmp_path / "x.pt")
    assert list(sync.load(tmp_path / "x.pt", config=SMALL, select="w")) == ["w"]
    with pytest.raises(FormatError, match=r"'<.*Phase 1>' .*'<.*Place 2>' "):
        sync.load(tmp_path / "x.pt", config=SMALL)


def test_what_torch_takes_from_nobody_is_refused_with_the_file_and_by_its_name(
    tmp_path: Path,
) -> None:
    """A list with attributes, or a function of the system."""
    names = Names("ab")
    names.frozen = True  # type: ignore[attr-defined]  # that is what they are for
    for value, said in ((names, f"{__name__}.Names is a container with"), (os.system, "posix.sys")):
        torch.save({"w": torch.ones(2), "x": value}, tmp_path / "x.pt")
        with pytest.raises(FormatError, match=f"more than data.*{re.escape(said)}"):
            sync.load(tmp_path / "x.pt", config=SMALL, select="w")


class Zone(dt.tzinfo):
    """Is made by way of an attribute, as those of zoneinfo are."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).make, ()

    @classmethod
    def make(cls) -> Zone:
        return cls()


def test_what_torch_refuses_without_a_name_is_told_with_the_way_out(tmp_path: Path) -> None:
    """And not with where some object of its own is in memory."""
    zone = Zone.make()
    torch.save({"x": dt.datetime(2026, 1, 1, tzinfo=zone), "w": torch.ones(2)}, tmp_path / "x.pt")
    said = r"more than data.*getattr object>; if you trust it, save what torch\.load\(.*, and"
    with pytest.raises(FormatError, match=said):
        sync.load(tmp_path / "x.pt", config=SMALL)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_container_inside_itself_or_too_many_is_left_out_if_nobody_wants_it(
    tmp_path: Path, *, is_zip: bool
) -> None:
    """Torch loads it; what it stands for has no end."""
    state: dict[str, Any] = {"w": torch.ones(2), "deep": []}
    state["self"] = OrderedDict(inner=[state])
    for _ in range(150):
        state["deep"] = [state["deep"]]
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    assert list(sync.load(tmp_path / "x.pt", config=SMALL, select="w")) == ["w"]
    for select in (None, "self", "deep"):
        with pytest.raises(FormatError, match="inside itself"):
            sync.load(tmp_path / "x.pt", config=SMALL, select=select)


def double(tensor: torch.Tensor) -> torch.Tensor:
    """Stand for what a trusted function makes of a tensor."""
    return tensor * 2


class Doubled:
    """Comes back as twice what it was made of."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return double, (self.tensor,)


def test_a_tensor_that_is_made_while_it_is_loaded_has_its_own_values(tmp_path: Path) -> None:
    """It is made of what is in the file, which is loaded as a whole for that, not of holes."""
    w = torch.arange(1.0, 7.0)
    torch.save({"w": w, "made": Doubled(w)}, tmp_path / "x.pt")
    with torch.serialization.safe_globals([double]):
        assert_same_state(sync.load(tmp_path / "x.pt", config=SMALL), {"w": w, "made": w * 2})


def test_arrays_of_numpy_are_refused_with_what_lets_them_in(tmp_path: Path) -> None:
    """`weights_only` does not take them unasked; who trusts the file may say that it does."""
    file, array = tmp_path / "x.pt", np.arange(5)
    torch.save({"w": torch.ones(2), "rng": array}, file)
    with pytest.raises(FormatError, match=r"'rng' \(numpy.*numpy\.ndarray.*safe_globals"):
        sync.load(file, config=SMALL)
    assert list(sync.load(file, config=SMALL, select="w")) == ["w"]
    made_with: list[Any] = [array.__reduce__()[0], np.ndarray, np.dtype, type(array.dtype)]
    with torch.serialization.safe_globals(made_with):
        assert np.array_equal(sync.load(file, config=SMALL)["rng"], array)


def test_a_file_that_was_cut_is_a_format_error(file: Path) -> None:
    """Wherever it was cut."""
    for nbytes in (file.stat().st_size - 1, 1000, 20):
        os.truncate(file, nbytes)
        with pytest.raises(FormatError):
            sync.load(file, config=SMALL)


@pytest.fixture
def without_sums() -> Iterator[None]:
    """Have torch write no sums of members, as newer versions do when they are told to."""
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("this torch always writes sums")
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.mark.usefixtures("without_sums")
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_was_written_without_sums_loads(tmp_path: Path, kind: str) -> None:
    """As torch loads it, which looks at none; what was cut off is found all the same."""
    state = make_training_state()
    path = tmp_path / kind
    if kind == "directory":
        save_dcp(path, state)
    else:
        torch.save(state, path)
    assert_same_state(sync.load(path, config=SMALL), state)
    (file,) = path.glob("*.distcp") if kind == "directory" else [path]
    os.truncate(file, file.stat().st_size - 300)
    with pytest.raises(FormatError):
        sync.load(path, config=SMALL)


def test_a_sum_that_is_there_has_to_be_right(tmp_path: Path) -> None:
    """A value that was damaged is not loaded as another one."""
    torch.save({"epoch": "eleven"}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    assert data.count(b"eleven") == 1
    (tmp_path / "x.pt").write_bytes(data.replace(b"eleven", b"twelve"))
    assert torch.load(tmp_path / "x.pt") == {"epoch": "twelve"}
    with pytest.raises(FormatError, match="CRC"):
        sync.load(tmp_path / "x.pt", config=SMALL)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, of sparse and quantised tensors
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (torch.Tensor.to_sparse, "sparse_coo"),
        (torch.Tensor.to_sparse_csr, "sparse_csr"),
        (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "quantised"),
        (lambda t: t.to("meta"), "meta"),
    ],
    ids=["coo", "csr", "quantised", "meta"],
)
def test_what_has_no_portable_form_is_refused_by_name(
    tmp_path: Path, make: Callable[[torch.Tensor], torch.Tensor], kind: str
) -> None:
    torch.save({"s": make(torch.eye(3))}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=rf"'s' \(a {kind} tensor\)"):
        sync.load(tmp_path / "x.pt", config=SMALL)


def test_a_file_of_another_byte_order_is_loaded_as_a_whole(tmp_path: Path) -> None:
    """What torch has to change while it loads cannot be read from the file by ranges."""
    torch.save({"w": torch.tensor([1.0, 2.0])}, tmp_path / "little.pt")
    with (
        zipfile.ZipFile(tmp_path / "little.pt") as little,
        zipfile.ZipFile(tmp_path / "big.pt", "w") as big,
    ):
        for name in little.namelist():
            data = little.read(name)
            if name.endswith("/data/0"):
                data = struct.pack(">2f", 1.0, 2.0)
            big.writestr(name, b"big" if name.endswith("/byteorder") else data)
    assert torch.load(tmp_path / "big.pt")["w"].tolist() == [1, 2]
    assert sync.load(tmp_path / "big.pt", config=SMALL)["w"].tolist() == [1, 2]


@pytest.mark.parametrize("refused", ["memfd_create", "ftruncate"])
@pytest.mark.usefixtures("no_leaks")
def test_where_no_file_in_memory_is_to_be_had_it_is_loaded_as_a_whole(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A low limit of file sizes holds for it, too; a conversion works as well."""
    torch.save(make_training_state(), tmp_path / "x.pt")

    def refuse(*_: Any) -> int:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    with monkeypatch.context() as patch:
        patch.setattr(os, refused, refuse)
        assert_same_state(sync.load(tmp_path / "x.pt", config=SMALL), make_training_state())
    with small_disk(2000):
        assert sync.load(tmp_path / "x.pt", select="epoch", config=SMALL) == {"epoch": 11}


def test_a_tensor_is_looked_for_in_the_page_cache_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that lies before each was counted, too: 20,000 tensors in 2 GB took a minute for it."""
    state = {f"t{index}": torch.full((20_000,), float(index)) for index in range(50)}
    torch.save(state, tmp_path / "a.pt")
    counted: list[int] = []
    count = linux.num_cached_pages

    def note(fd: int, offset: int, nbytes: int) -> int | None:
        counted.append(nbytes)
        return count(fd, offset, nbytes)

    monkeypatch.setattr(linux, "num_cached_pages", note)
    assert_same_state(sync.load(tmp_path / "a.pt"), state)
    assert 0 < sum(counted) <= 3 * (tmp_path / "a.pt").stat().st_size


@pytest.mark.parametrize("kind", ["torch.save", "dcp"])
def test_thousands_of_tensors_are_read_a_few_in_each_visit_to_a_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """Each is a file of its own here; by way of the loop each took half a millisecond."""
    monkeypatch.setattr(lanes, "_TURN_S", 3600.0)
    state = {f"w{i}": torch.full((100,), float(i)) for i in range(200)}
    path = save_small(kind, tmp_path / "state", state)
    events: list[Event] = []
    assert_same_state(sync.load(path, config=SMALL, observer=events.append), state)
    progress = [event for event in events if isinstance(event, ReadProgressed)]
    assert len(progress) < 100  # each visit takes its share of what is left
