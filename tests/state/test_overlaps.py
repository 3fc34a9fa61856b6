"""Targets that share memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import ckptio.sync
from ckptio import Shard
from ckptio.errors import TargetError
from ckptio.events import LoadFinished
from ckptio.format.manifest import TensorEntry
from ckptio.layout import Box
from ckptio.state import overlaps
from ckptio.state.fills import Fill
from ckptio.state.flatten import flatten
from ckptio.state.overlaps import settle_overlaps
from ckptio.state.rebuild import view_of
from ckptio.state.sharded import Block
from ckptio.state.target import Matcher
from tests.strategies import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptio.events import Event


MATRIX = torch.randn(100, 100)


@pytest.fixture
def apart(tmp_path: Path) -> str:
    """A checkpoint of two tensors that have nothing in common."""
    path = str(tmp_path / "apart")
    ckptio.sync.save({"a": torch.ones(4), "b": torch.full((4,), 2.0)}, path)
    return path


def test_of_one_tensor_under_two_names_the_first_is_loaded(apart: str) -> None:
    """Memory holds one of two stored tensors; which, and that it is so, is said."""
    tensor = torch.zeros(4)
    result = ckptio.sync.load_with_report(apart, into={"b": tensor, "a": tensor})
    assert torch.equal(tensor, torch.full((4,), 2.0))
    (note,) = result.report.notes
    assert note.startswith("a: is one tensor with 'b' in the target")
    assert result.report.num_tensors == 1


def test_who_gets_no_report_reads_it_in_the_log(
    apart: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`load` gives the state alone, and one of two stored tensors is not in it."""
    tensor = torch.zeros(4)
    ckptio.sync.load(apart, into={"b": tensor, "a": tensor})
    (record,) = caplog.records
    assert "a: is one tensor with 'b' in the target" in record.message


def test_of_one_tensor_that_was_two_views_of_one_the_first_is_loaded(tmp_path: Path) -> None:
    """Views of one stored tensor may be as different as two of them; names are the target's."""
    base, path = torch.arange(8.0), str(tmp_path / "views")
    ckptio.sync.save({"base": base, "low": base[:3], "high": base[5:]}, path)
    tensor = torch.zeros(3)
    target = {"low": tensor, "high": tensor}
    result = ckptio.sync.load_with_report(path, into=target, strict="ignore")
    assert torch.equal(tensor, base[:3])
    assert "high: is one tensor with 'low' in the target" in "".join(result.report.notes)


def test_views_that_overlap_elsewhere_than_they_were_saved_are_refused(tmp_path: Path) -> None:
    """The same stored tensor is no excuse: neither would come whole."""
    base, path = torch.arange(8.0), str(tmp_path / "views")
    ckptio.sync.save({"base": base, "low": base[:3], "high": base[5:]}, path)
    memory = torch.zeros(8)
    with pytest.raises(TargetError, match="'high' and 'low': they share"):
        ckptio.sync.load(
            path, into={"low": memory[:3], "high": memory[2:5], "base": torch.zeros(8)}
        )
    assert not memory.any()


def test_a_buffer_of_many_views_is_settled_in_one_pass(tmp_path: Path) -> None:
    """A flat buffer and thousands of views of it, as flat optimizers have: minutes in pairs."""
    path, num = str(tmp_path / "flat"), 8000
    saved = torch.arange(4.0 * num)
    state = {"flat": saved, **{f"p{i}": saved[4 * i : 4 * i + 4] for i in range(num)}}
    ckptio.sync.save(state, path)
    memory = torch.zeros(4 * num)
    target = {"flat": memory, **{f"p{i}": memory[4 * i : 4 * i + 4] for i in range(num)}}
    assert not ckptio.sync.load_with_report(path, into=target).report.notes
    assert torch.equal(memory, saved)


def test_what_overlaps_in_part_is_refused(apart: str) -> None:
    """Neither would come whole; nothing changes."""
    memory = torch.zeros(6)
    with pytest.raises(TargetError, match="'b' and 'a': they share a part of their memory"):
        ckptio.sync.load(apart, into={"a": memory[:4], "b": memory[1:5]})
    assert not memory.any()


def test_all_that_something_with_gaps_lies_over_is_named(tmp_path: Path) -> None:
    """Each has values that may be either's, and a reader looks for its name."""
    base = torch.arange(8, dtype=torch.int16)
    ckptio.sync.save({"gaps": base + 100, "head": base[:4], "all": base}, tmp_path / "c")
    memory = torch.zeros(16, dtype=torch.int16)
    target = {"gaps": memory[::2], "head": memory[:4], "all": memory[:8]}
    notes = ckptio.sync.load_with_report(tmp_path / "c", into=target).report.notes
    assert [note for note in notes if "gaps" in note and "'head'" in note]
    assert [note for note in notes if "gaps" in note and "'all'" in note]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("wide", "column", "apart"),
    [
        (slice(0, 3), 1, False),
        (slice(0, 3), 3, True),
        (slice(0, 6, 2), 4, False),
        (slice(0, 6, 2), 3, True),
        (slice(0, 6), 5, False),
    ],
)
def test_what_has_gaps_and_lies_over_another_has_a_note(
    tmp_path: Path, wide: slice, column: int, *, apart: bool, turned: bool
) -> None:
    """In whichever order; a dense one has no gaps. What lies between others has none."""
    memory = torch.zeros(4, 6)
    target = {"a": memory[:, wide], "b": memory[:, column]}
    saved = {"a": torch.full(target["a"].shape, 2.0), "b": torch.full((4,), -1.0)}
    ckptio.sync.save(saved, tmp_path / "c")
    if turned:
        target = dict(reversed(target.items()))
    notes = ckptio.sync.load_with_report(tmp_path / "c", into=target).report.notes
    if apart:
        assert not notes
        assert all(torch.equal(target[name], saved[name]) for name in saved)
        return
    (note,) = notes
    assert re.match(r"[ab]: shares a part of its memory with '[ab]' in the target", note)


@pytest.mark.parametrize(
    "state",
    [
        {"column": MATRIX[:, 0], "row": MATRIX[0]},
        {"diagonal": MATRIX.diagonal(), "row": MATRIX[3]},
        {"a": MATRIX[0:10, 0:10], "b": MATRIX[5:15, 5:15]},
        {"array": MATRIX.numpy(), "column": MATRIX[:, 0]},
        {"a": MATRIX[0], "b": MATRIX[0, :5], "probe": MATRIX[::9, 3]},
    ],
    ids=", ".join,
)
def test_a_state_that_is_stored_apart_loads_into_itself(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    """Views of one memory with little in common take the same bytes back, each its own copy."""
    before = MATRIX.clone()
    ckptio.sync.save(state, tmp_path / "c")
    MATRIX.zero_()
    ckptio.sync.load(tmp_path / "c", into=state)
    found = ckptio.sync.load(tmp_path / "c")
    MATRIX.copy_(before)
    assert_same(state, found)


def test_columns_by_the_hundred_take_no_time(tmp_path: Path) -> None:
    """Each lies between all the others; each is compared with a few."""
    memory = torch.zeros(40, 500)
    ckptio.sync.save({str(i): torch.full((40,), float(i)) for i in range(500)}, tmp_path / "c")
    ckptio.sync.load(tmp_path / "c", into={str(i): memory[:, i] for i in range(500)})
    assert torch.equal(memory, torch.arange(500.0).expand(40, 500))


def test_tied_targets_on_meta_take_the_first(apart: str) -> None:
    """They become one tensor, too, and readers would race for it."""
    meta = torch.empty(4, device="meta")
    result = ckptio.sync.load_with_report(apart, into={"b": meta, "a": meta})
    assert result.state["b"] is result.state["a"]
    assert torch.equal(result.state["a"], torch.full((4,), 2.0))
    (note,) = result.report.notes
    assert note.startswith("a: is one tensor with 'b' in the target")
    assert result.report.num_tensors == 1
    other = {"a": meta, "b": meta.view(torch.int32)}  # nothing of one memory, but of two types
    assert ckptio.sync.load(apart, into=other, strict="ignore")["a"].dtype == torch.float32


def test_tied_shards_take_the_first(apart: str) -> None:
    """Whole tensors, as blocks; once in the notes, however many blocks there are."""
    memory = torch.zeros(4)
    shards = {name: Shard(memory, (4,), (0,)) for name in ("a", "b")}
    result = ckptio.sync.load_with_report(apart, into=shards)
    assert torch.equal(memory, torch.ones(4))
    (note,) = result.report.notes
    assert note.startswith("b: is one tensor with 'a' in the target")
    assert result.report.num_tensors == 1
    with pytest.raises(TargetError, match="cannot fill 'b' and 'a'"):
        ckptio.sync.load(apart, into={"a": shards["a"], "b": memory})


def test_a_tensor_in_many_blocks_is_said_once_to_be_another() -> None:
    """However many of them are left out."""
    memory, notes = torch.zeros(4), list[str]()
    blocks = [Block(Box((at,), (2,)), memory, (at,)) for at in (0, 2)]
    fills = [
        Fill(stored, memory, name, block=block)
        for stored, name in enumerate("ab")
        for block in blocks
    ]
    assert settle_overlaps(fills, notes) == fills[:2]
    assert [note.partition(":")[0] for note in notes] == ["b"]


@pytest.mark.parametrize(
    "view",
    [lambda m: m.view(8, 2), lambda m: m.t().contiguous().view(8, 2)],
    ids=["another order", "other memory"],
)
def test_a_transpose_that_the_target_has_otherwise_is_refused(tmp_path: Path, view: Any) -> None:
    """One stored tensor and one memory are not enough: each place has to be one element."""
    path, base = str(tmp_path / "c"), torch.arange(16.0).view(2, 8)
    ckptio.sync.save({"base": base, "turned": base.t()}, path)
    memory = torch.zeros(2, 8)
    target = {"base": memory, "turned": view(memory)}
    if target["turned"].data_ptr() == memory.data_ptr():
        with pytest.raises(TargetError, match="they share a part"):
            ckptio.sync.load(path, into=target)
        return
    ckptio.sync.load(path, into=target)
    assert torch.equal(memory, base)
    assert torch.equal(target["turned"], base.t())


def test_a_conjugate_that_the_target_has_otherwise_is_refused(tmp_path: Path) -> None:
    """And one that it has as it was saved is no other tensor."""
    values = torch.randn(4, dtype=torch.complex64)
    for number, saved in enumerate(({"z": values, "c": values}, {"z": values, "c": values.conj()})):
        path = str(tmp_path / str(number))
        ckptio.sync.save(saved, path)
        memory = torch.zeros(4, dtype=torch.complex64)
        target = {"z": memory, "c": memory.conj()}
        if number == 0:
            with pytest.raises(TargetError, match="they share a part"):
                ckptio.sync.load(path, into=target)
            continue
        assert not ckptio.sync.load_with_report(path, into=target).report.notes
        assert torch.equal(memory, values)


def test_ties_that_differ_in_strides_that_do_not_matter_are_ties(tmp_path: Path) -> None:
    """Of a dimension of one element."""
    path, weight = str(tmp_path / "c"), torch.arange(4.0).view(4, 1)
    ckptio.sync.save({"a": weight.view(1, 4), "b": weight.t()}, path)
    memory = torch.zeros(4, 1)
    target = {"a": memory.view(1, 4), "b": memory.t()}
    assert not ckptio.sync.load_with_report(path, into=target).report.notes
    assert torch.equal(memory, weight)


def test_strided_views_of_one_tensor_read_it_once(tmp_path: Path) -> None:
    """Columns of a fused weight take one copy of it beside them, not one each."""
    path, base = str(tmp_path / "c"), torch.randn(1 << 14, 64)
    ckptio.sync.save({f"v{i}": base[:, i] for i in range(64)}, path)
    target = {f"v{i}": torch.zeros(1 << 14) for i in range(64)}
    read: list[int] = []

    def note(event: Event) -> None:
        if isinstance(event, LoadFinished):
            read.append(event.nbytes)

    with ckptio.sync.Engine(observer=note) as engine:
        engine.load(path, into=target)
    assert all(torch.equal(target[f"v{i}"], base[:, i]) for i in range(64))
    (nbytes,) = read
    assert base.nbytes <= nbytes < 2 * base.nbytes


def test_bits_in_strided_views_are_filled(tmp_path: Path) -> None:
    """Torch has no copy of them."""
    path, uint4 = str(tmp_path / "c"), vars(torch)["uint4"]
    bits = torch.arange(8, dtype=torch.uint8).view(uint4)
    ckptio.sync.save({"a": bits, "v": bits[::2]}, path)
    memory = torch.zeros(12, dtype=torch.uint8)
    target = {"a": memory[:8].view(uint4), "v": memory[8:].view(uint4)}
    ckptio.sync.load(path, into=target)
    assert memory.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 2, 4, 6]


@given(
    parts=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 5)), min_size=2, max_size=6),
    ties=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_memory_is_shared_as_it_was_saved_or_refused(
    parts: list[tuple[int, int]], ties: list[bool]
) -> None:
    """Whatever overlaps with what: nothing of a target is loaded as something else's."""
    memory = torch.arange(16.0)
    views = [memory[first : first + count] for first, count in parts]
    saved = {
        f"v{i}": v if tie else v + 100 for i, (v, tie) in enumerate(zip(views, ties, strict=False))
    }
    flat = flatten(saved)
    entries = tuple(TensorEntry(s.name, s.dtype, s.shape, ()) for s in flat.specs)
    room = torch.zeros(16)
    target = {f"v{i}": room[first : first + count] for i, (first, count) in enumerate(parts)}
    matcher = Matcher(entries)
    matcher.merge("", target, flat.tree)
    notes: list[str] = []
    try:
        fills = settle_overlaps(matcher.match.fills, notes)
    except TargetError:
        assert not all(ties)
        return
    for fill in fills:
        base = flat.sources[fill.stored]
        fill.memory().copy_(base if fill.view is None else view_of(base, fill.view))
    named = {fill.name for fill in fills}
    assert all(torch.equal(target[name], saved[name]) for name in named)
    assert len(notes) == len(parts) - len(named)


def test_a_tensor_and_its_transpose_are_one_memory(tmp_path: Path) -> None:
    """Where they were saved so they are filled so; where they were two, that is refused."""
    path, other = str(tmp_path / "two"), str(tmp_path / "one")
    rows = torch.arange(4.0).reshape(2, 2)
    ckptio.sync.save({"w": rows, "t": rows.t().clone()}, path)
    ckptio.sync.save({"w": rows, "t": rows.t()}, other)
    memory = torch.zeros(2, 2)
    with pytest.raises(TargetError, match="they share a part of their memory"):
        ckptio.sync.load(path, into={"w": memory, "t": memory.t()})
    assert not memory.any()
    ckptio.sync.load(other, into={"w": memory, "t": memory.t()})
    assert torch.equal(memory, rows)


@pytest.mark.parametrize("parts", [(slice(4), slice(4, 8)), (slice(None, None, 2), slice(1, 8, 2))])
def test_parts_of_one_memory_beside_each_other_are_filled(
    apart: str, parts: tuple[slice, slice]
) -> None:
    """Halves of a buffer, and strided views that lie between each other."""
    memory = torch.zeros(8)
    first, second = parts
    result = ckptio.sync.load_with_report(apart, into={"a": memory[first], "b": memory[second]})
    assert torch.equal(memory[first], torch.ones(4))
    assert torch.equal(memory[second], torch.full((4,), 2.0))
    assert not result.report.notes


def test_what_was_saved_as_views_of_one_memory_is_filled_as_such(tmp_path: Path) -> None:
    """Tied tensors and views take the same stored bytes."""
    saved = torch.arange(8.0)
    path = str(tmp_path / "tied")
    ckptio.sync.save({"whole": saved, "view": saved[2:5], "again": saved}, path)
    memory = torch.zeros(8)
    target = {"whole": memory, "view": memory[2:5], "again": memory}
    assert not ckptio.sync.load_with_report(path, into=target).report.notes
    assert torch.equal(memory, saved)


BYTES = torch.arange(1, 9, dtype=torch.uint8)
FLOATS = torch.arange(8.0)


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        pytest.param(
            {"a": FLOATS, "b": FLOATS.as_strided((2, 2), (4, 1))},
            lambda room: {"a": room[::2], "b": room.as_strided((2, 2), (4, 2))},
            id="the same steps, one of them in another dimension",
        ),
        pytest.param(
            {"a": BYTES.view(torch.float32), "b": BYTES[:3]},
            lambda room: {"a": room[:4:2], "b": room.view(torch.uint8)[:6:2]},
            id="the same steps, of elements of another size",
        ),
        pytest.param(
            {"a": FLOATS[:3], "b": FLOATS[2:5]},
            lambda room: {"a": room[:6:2], "b": room[2:8:2]},
            id="as far from each other, but not in steps",
        ),
    ],
)
def test_views_that_lie_otherwise_than_they_were_saved_have_a_note(
    tmp_path: Path, saved: dict[str, torch.Tensor], target: Callable[[torch.Tensor], dict[str, Any]]
) -> None:
    """Views of one stored tensor that begin at one place of it, and take other steps from there."""
    path, into = str(tmp_path / "c"), target(torch.zeros(16))
    ckptio.sync.save(saved, path)
    (note,) = ckptio.sync.load_with_report(path, into=into).report.notes
    assert "shares a part of its memory with" in note
    assert not all(torch.equal(into[name], saved[name]) for name in saved)


def test_views_of_a_tensor_that_lies_otherwise_are_filled(tmp_path: Path) -> None:
    """Columns first, say: what is one of its parts is so there, too, of any type that it has."""
    path, rows = str(tmp_path / "c"), torch.arange(24.0).view(4, 6)
    bits = rows.view(torch.int32)
    ckptio.sync.save({"w": rows, "t": rows.t(), "part": rows[:, 1:4], "bits": bits}, path)
    memory = torch.zeros(6, 4).t()
    target = {"w": memory, "t": memory.t(), "part": memory[:, 1:4]}
    target["bits"] = memory.view(torch.int32)
    report = ckptio.sync.load_with_report(path, into=target, strict="report").report
    assert not report.notes
    assert torch.equal(memory, rows)


@pytest.mark.parametrize("steps", [(7, 1), (4, 1)])
def test_steps_of_one_element_are_none(tmp_path: Path, steps: tuple[int, int]) -> None:
    """A row of a matrix has the step of its rows, or any other."""
    base = torch.arange(8.0)
    ckptio.sync.save({"base": base, "row": base[2:6].view(1, 4)}, tmp_path / "c")
    memory = torch.zeros(8)
    target = {"base": memory, "row": memory.as_strided((1, 4), steps, 2)}
    assert not ckptio.sync.load_with_report(tmp_path / "c", into=target).report.notes
    assert torch.equal(memory, base)


@pytest.mark.parametrize("steps", [(7, 1), (4, 1)])
def test_a_row_of_other_steps_is_the_same_memory(apart: str, steps: tuple[int, int]) -> None:
    """It is no other tensor that overlaps in part: the first of the two is loaded."""
    memory = torch.zeros(4, 1)
    target = {"a": memory.as_strided((1, 4), steps), "b": memory.view(1, 4)}
    ckptio.sync.save({"a": torch.ones(1, 4), "b": torch.zeros(1, 4)}, f"{apart}/rows")
    (note,) = ckptio.sync.load_with_report(f"{apart}/rows", into=target).report.notes
    assert note.startswith("b: is one tensor with 'a' in the target")
    assert torch.equal(memory, torch.ones(4, 1))


def test_two_rows_that_lie_otherwise_than_they_were_saved_are_refused(tmp_path: Path) -> None:
    """Their step matters, however few they are."""
    base, memory = torch.arange(8.0), torch.zeros(8)
    ckptio.sync.save({"base": base, "rows": base.as_strided((2, 2), (4, 1))}, tmp_path / "c")
    with pytest.raises(TargetError, match="they share a part of their memory"):
        ckptio.sync.load(tmp_path / "c", into={"base": memory, "rows": memory[:4].view(2, 2)})
    assert not memory.any()


def test_what_begins_where_another_ends_shares_nothing(tmp_path: Path) -> None:
    """Whatever else of the target does share memory."""
    ckptio.sync.save({"a": FLOATS, "tied": FLOATS, "b": FLOATS + 8}, tmp_path / "c")
    memory = torch.zeros(16)
    target = {"a": memory[:8], "tied": memory[:8], "b": memory[8:]}
    assert not ckptio.sync.load_with_report(tmp_path / "c", into=target).report.notes
    assert torch.equal(memory, torch.arange(16.0))


def test_tensors_without_elements_are_never_one(tmp_path: Path) -> None:
    """They have no memory, and torch gives that of all of them one address."""
    saved = {"a": FLOATS, "tied": FLOATS, "none": torch.zeros(0), "no": torch.zeros(0)}
    ckptio.sync.save(saved, tmp_path / "c")
    memory = torch.zeros(8)
    target = {"a": memory, "tied": memory, "none": memory[2:2], "no": memory[4:4]}
    report = ckptio.sync.load_with_report(tmp_path / "c", into=target).report
    assert not report.notes
    assert report.num_tensors == len(saved)


def test_a_dense_one_over_one_with_gaps_has_a_note(tmp_path: Path) -> None:
    """Also where it begins behind it."""
    ckptio.sync.save({"gaps": FLOATS, "dense": FLOATS[:4] + 8}, tmp_path / "c")
    memory = torch.zeros(16)
    target = {"gaps": memory[::2], "dense": memory[2:6]}
    (note,) = ckptio.sync.load_with_report(tmp_path / "c", into=target).report.notes
    assert note.startswith("dense: shares a part of its memory with 'gaps'")


def test_of_dense_ones_those_that_one_with_gaps_lies_over_are_named(tmp_path: Path) -> None:
    """Not those that end before; and the longest, however many shorter ones follow."""
    base, memory = torch.arange(64.0), torch.zeros(64)
    parts = {f"p{i}": slice(2 * i, 2 * i + 2) for i in range(20)}
    saved = {"base": base, **{name: base[part] for name, part in parts.items()}}
    saved["gaps"] = torch.zeros(8)
    ckptio.sync.save(saved, tmp_path / "c")
    target = {"base": memory, **{name: memory[part] for name, part in parts.items()}}
    target["gaps"] = memory[40:56:2]
    (note,) = ckptio.sync.load_with_report(tmp_path / "c", into=target).report.notes
    assert note.startswith("gaps: shares a part of its memory with 'base'")


def test_what_is_not_soon_found_to_share_memory_has_no_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether two have an element in common may take any time to find out."""
    memory = torch.zeros(60)
    target = {
        "a": memory.as_strided((3, 3, 3), (2, 7, 20)),
        "b": memory.as_strided((3, 3), (3, 11)),
    }
    saved = {"a": torch.ones(3, 3, 3), "b": torch.zeros(3, 3)}
    ckptio.sync.save(saved, tmp_path / "c")
    assert len(ckptio.sync.load_with_report(tmp_path / "c", into=target).report.notes) == 1
    monkeypatch.setattr(overlaps, "_MAX_WORK", 1)
    assert not ckptio.sync.load_with_report(tmp_path / "c", into=target).report.notes


def test_views_whose_dimensions_lie_between_each_other_are_not_mixed_up(tmp_path: Path) -> None:
    """One place is in two steps of the outer dimension: where both begin matters."""
    base = torch.arange(32, dtype=torch.uint8)
    saved = {"base": base, "a": base[:8].view(4, 2), "b": base[2:10].view(4, 2)}
    ckptio.sync.save(saved, tmp_path / "c")
    room = torch.zeros(64, dtype=torch.uint8)
    for b, num_notes in ((6, 1), (3, 1), (1, 1), (13, 0)):
        target = {"a": room.as_strided((4, 2), (2, 3)), "b": room.as_strided((4, 2), (2, 3), b)}
        load = ckptio.sync.load_with_report(tmp_path / "c", into=target, strict="ignore")
        assert len(load.report.notes) == num_notes, b


def test_dimensions_that_make_one_are_one(tmp_path: Path) -> None:
    """In steps of any width, here and there; nothing is said of what is the same either way."""
    base, memory = torch.arange(40.0), torch.zeros(60)
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    shapes = (((2, 8), (10, 1)), ((2, 2, 4), (10, 4, 1)), ((2, 4, 2), (10, 2, 1)))

    def views(of: torch.Tensor, step: int) -> dict[str, Any]:
        return {
            str(i): of.as_strided(shape, tuple(step * n for n in steps))
            for i, (shape, steps) in enumerate(shapes)
        }

    ckptio.sync.save({"base": base, **views(base, 2)}, tmp_path / "c")
    target = views(memory, 3)
    report = ckptio.sync.load_with_report(tmp_path / "c", into=target, strict="ignore").report
    assert not report.notes
    assert torch.equal(target["1"], views(base, 2)["1"])


def test_bytes_of_what_is_converted_are_refused(tmp_path: Path) -> None:
    """They are bytes of another type."""
    path, weight = str(tmp_path / "c"), torch.randn(8)
    ckptio.sync.save({"w": weight, "raw": weight.view(torch.uint8)[:16]}, path)
    memory = torch.zeros(8, dtype=torch.bfloat16)
    target = {"w": memory, "raw": memory.view(torch.uint8)}
    with pytest.raises(TargetError, match="they share a part"):
        ckptio.sync.load(path, into=target, dtype=torch.bfloat16)
    assert not memory.any()


def test_views_of_what_is_converted_are_filled(tmp_path: Path) -> None:
    """They are views of it afterwards, too."""
    path, weight = str(tmp_path / "c"), torch.randn(8)
    ckptio.sync.save({"w": weight, "part": weight[2:6]}, path)
    memory = torch.zeros(8, dtype=torch.bfloat16)
    ckptio.sync.load(path, into={"w": memory, "part": memory[2:6]}, dtype=torch.bfloat16)
    assert torch.equal(memory, weight.bfloat16())


def test_blocks_of_one_memory_that_are_parts_of_other_places_are_refused(tmp_path: Path) -> None:
    """One stored tensor and one memory are not enough for blocks, either."""
    path, whole, memory = str(tmp_path / "c"), torch.arange(8.0), torch.zeros(4)
    ckptio.sync.save({"a": whole, "b": whole, "c": whole[2:6]}, path)

    def block(offset: int, extent: int = 8) -> Shard:
        return Shard(memory, global_shape=(extent,), global_offset=(offset,))

    with pytest.raises(TargetError, match="they share a part"):
        ckptio.sync.load(path, into={"a": block(0), "b": block(4)}, select=["a", "b"])
    assert not memory.any()
    target = {"a": block(0), "b": block(0), "c": block(0, 4)}
    (note,) = ckptio.sync.load_with_report(path, into=target).report.notes
    assert note.startswith("c: is one tensor with 'a' in the target and another in the checkpoint")
    assert torch.equal(memory, whole[:4])


@st.composite
def strided(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw two views of one shape: of what is saved, and of a target."""
    shape = draw(st.lists(st.integers(1, 4), max_size=2))
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32]))
    found = []
    for base in (SOURCE, ROOM):
        steps = [draw(st.integers(1, 6)) for _ in shape]
        reach = sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        first = draw(st.integers(0, 3))
        assume((first + reach + 1) * dtype.itemsize <= base.numel())
        found.append(base.view(dtype).as_strided(shape, steps, first))
    return found[0], found[1]


SOURCE = torch.randperm(256)[:96].to(torch.uint8)
ROOM = torch.zeros(96, dtype=torch.uint8)


@given(pairs=st.lists(strided(), min_size=2, max_size=4))
def test_whatever_lies_otherwise_than_it_was_saved_is_said(
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Views of any strides, there and here: without a word, each is what was saved."""
    saved = {str(i): pair[0] for i, pair in enumerate(pairs)}
    flat = flatten(saved)
    entries = tuple(TensorEntry(s.name, s.dtype, s.shape, ()) for s in flat.specs)
    matcher, notes = Matcher(entries), list[str]()
    try:
        matcher.merge("", {str(i): pair[1] for i, pair in enumerate(pairs)}, flat.tree)
        fills = settle_overlaps(matcher.match.fills, notes)
    except TargetError:
        return
    for fill in fills:
        base = flat.sources[fill.stored].clone(memory_format=torch.contiguous_format)
        fill.memory().copy_(base if fill.view is None else view_of(base, fill.view))
    if not notes:
        for there, here in pairs:  # by their bytes: some are nan
            assert there.contiguous().numpy().tobytes() == here.contiguous().numpy().tobytes()
