from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptio import Shard, sync
from ckptio.errors import UnsupportedLeafError
from ckptio.state.flatten import FlatState, flatten
from ckptio.state.rebuild import Rebuilder
from tests.strategies import SMALL, assert_same, random_tensor

if TYPE_CHECKING:
    from pathlib import Path


def stored_nbytes(state: Any) -> int:
    return flatten(state).nbytes


def rebuilt(flat: FlatState) -> Any:
    """Put a flat state together from copies of what is stored."""
    tensors = {
        i: source.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        for i, source in enumerate(flat.sources)
    }
    return Rebuilder(tensors).rebuild("", flat.tree)


def is_tied(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_the_same_tensor_twice_is_stored_once_and_tied() -> None:
    """A write through one name is seen through the other."""
    weight = torch.nn.Parameter(torch.randn(8, 4))
    flat = flatten({"embed": weight, "head": weight, "alias": weight.view(8, 4)})
    assert len(flat.specs) == 1
    state = rebuilt(flat)
    state["head"][3] = 7
    assert (state["embed"][3] == 7).all()
    assert is_tied(state["alias"], state["embed"])
    assert flat.untied == ()


def test_a_transposed_view_is_a_view_of_its_base() -> None:
    """Tied weights of a linear layer and an embedding, whichever comes first."""
    base = torch.randn(6, 4)
    for state in ([base, base.t()], [base.t(), base]):
        assert stored_nbytes(state) == base.nbytes
        found = rebuilt(flatten(state))
        assert_same(found, state)
        assert is_tied(*found)
        assert found[0].stride() == state[0].stride()


def test_views_inside_a_tensor_are_stored_with_it() -> None:
    """Slices, rows and columns of a tensor that is there cost nothing."""
    base = torch.randn(10, 10)
    state = {"row": base[3], "whole": base, "column": base[:, 2], "part": base[2:4, 1:9:2]}
    assert stored_nbytes(state) == base.nbytes
    found = rebuilt(flatten(state))
    assert_same(found, state)
    found["whole"].zero_()
    assert all((t == 0).all() for t in found.values())


def test_overlapping_views_without_their_base_share_what_they_cover() -> None:
    """`x[0:6]` and `x[4:10]`: their common memory is stored once."""
    base = torch.arange(100.0)
    state = [base[0:6], base[4:10]]
    assert stored_nbytes(state) == 10 * 4
    found = rebuilt(flatten(state))
    assert_same(found, state)
    found[0][5] = -1
    assert found[1][1] == -1


def test_a_small_view_of_a_large_storage_is_all_that_is_stored() -> None:
    """64 bytes of a 64 MiB storage are 64 bytes."""
    big = torch.zeros(16 << 20)
    assert stored_nbytes([big[1000:1016]]) == 64
    assert stored_nbytes([big[::1_048_576]]) == 64
    assert stored_nbytes([big[0:8], big[-8:]]) == 64


def test_sparse_views_that_overlap_are_stored_apart_and_named() -> None:
    """Storing their common span would write more than storing both."""
    big = torch.zeros(1 << 20)
    state = {"a": big[:: 1 << 16], "b": big[:: 1 << 17]}
    flat = flatten(state)
    assert flat.nbytes == 16 * 4 + 8 * 4
    assert flat.untied == ("a", "b")
    assert_same(rebuilt(flat), state)


def test_bytes_that_are_one_object_are_no_tie_that_is_lost() -> None:
    """Nobody writes to them, so nobody can tell; of a bytearray, all would see it."""
    data, room = b"x" * 5000, bytearray(5000)
    array = np.frombuffer(data, np.uint8)
    assert flatten({"a": data, "b": [data], "c": array}).untied == ()
    assert flatten({"a": data, "c": array, "d": array[::2]}).untied == ("c", "d")
    assert flatten({"a": room, "b": room}).untied == ("a", "b")


def test_a_sparse_view_over_all_unties_nothing_else() -> None:
    """What lies within what the others have in common is a view of it; what does not is apart."""
    big = torch.arange(10_000.0)
    state = {
        "a": big[:10],
        "b": big[5:15],
        "probe": big[::100],
        "within": big[:15:5],
        "far": big[5_000:5_010],
        "beside": big[5_005:5_015],
        "twin": big[::100],
    }
    flat = flatten(state)
    assert flat.untied == ("probe",)
    assert flat.nbytes == (15 + 15 + 100) * 4
    found = rebuilt(flat)
    assert_same(found, state)
    assert is_tied(found["a"], found["b"])
    assert is_tied(found["a"], found["within"])
    assert is_tied(found["far"], found["beside"])
    assert is_tied(found["probe"], found["twin"])
    assert not is_tied(found["probe"], found["a"])


def test_views_with_gaps_are_tied_beside_sparser_ones() -> None:
    """Parts of a fused weight have gaps, and all of it in common."""
    fused = torch.randn(100, 64)
    state = {"q": fused[:, :32], "k": fused[:, 32:], "part": fused[:, :40], "probe": fused[::50, 1]}
    apart = torch.randn(200, 64)
    state |= {"halves": apart[:100, :32], "others": apart[:100, 16:], "few": apart[::50, 20]}
    flat = flatten(state)
    assert flat.untied == ("few",)
    assert flat.nbytes == fused.nbytes + (99 * 64 + 64) * 4 + 4 * 4
    found = rebuilt(flat)
    assert_same(found, state)
    assert all(is_tied(found["q"], found[name]) for name in ("k", "part", "probe"))
    assert is_tied(found["halves"], found["others"])


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"c": slice(100)},
        {"c": slice(100), "e": slice(500, 700), "f": slice(500, 600), "g": slice(507, 700, 8)},
    ],
    ids=["alone", "with a part of it", "with others"],
)
def test_a_view_with_gaps_is_tied_to_what_it_lies_in_beside_a_sparser_one(
    others: dict[str, slice],
) -> None:
    """Which lies over both, and is stored apart."""
    buffer = torch.randn(1000)
    base = buffer[:200]
    state = {"a": base, "b": buffer[::10], "d": base[7::8]}
    state |= {name: buffer[part] for name, part in others.items()}
    flat = flatten(state)
    assert [spec.name for spec in flat.specs] == ["a", "b", *(["e"] if "e" in others else [])]
    assert "b" in flat.untied
    assert not {"d", "g"} & {*flat.untied}
    found = rebuilt(flat)
    assert_same(found, state)
    assert is_tied(found["a"], found["d"])


@pytest.mark.parametrize("turn", [torch.conj, torch._neg_view], ids=["conjugate", "negative"])
def test_what_is_not_in_memory_as_it_reads_is_no_base(turn: Any) -> None:
    """A part of that memory would come back conjugated or negated."""
    memory = torch.randn(6, dtype=torch.complex64)
    state = {"a": turn(memory), "b": memory[:3]}
    assert_same(rebuilt(flatten(state)), state)
    state = {"a": turn(memory)[:4], "b": memory[2:]}
    assert stored_nbytes(state) == memory.nbytes
    assert_same(rebuilt(flatten(state)), state)


@pytest.mark.parametrize("turn", [torch.conj, torch._neg_view, torch.t])
def test_what_is_not_in_memory_as_it_reads_is_no_base_of_another_storage(turn: Any) -> None:
    """Nor is one in another order: a part of it would be another one."""
    array = np.arange(80) + 1j
    state = {"a": turn(torch.from_numpy(array).view(8, 10)), "b": torch.from_numpy(array[5:])[::9]}
    flat = flatten(state)
    assert flat.untied == ("a", "b")
    assert_same(rebuilt(flat), state)


def test_what_is_stored_for_views_has_the_type_of_the_only_one() -> None:
    """Bytes for several; and what is a base itself stays a plain tensor in the tree."""
    buffer = torch.arange(20.0)
    state = {"a": buffer[5:8].expand(4, 3), "b": buffer[10::2], "c": buffer[11::2]}
    flat = flatten(state)
    found = [(spec.name, spec.dtype, spec.shape) for spec in flat.specs]
    assert found == [("a~storage", "float32", (3,)), ("b~storage", "uint8", (40,))]
    assert_same(rebuilt(flat), state)
    assert flatten({"a": buffer, "b": buffer[3:]}).tree["a"] == {"~": 0}


def test_overlapping_memory_of_two_storages_is_stored_apart() -> None:
    """As none of them has all of it."""
    array = np.arange(9.0)
    state = {"a": torch.from_numpy(array[:6]), "b": torch.from_numpy(array[3:])}
    flat = flatten(state)
    assert flat.untied == ("a", "b")
    assert_same(rebuilt(flat), state)


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_two_storages_that_begin_at_one_place_are_stored_once(names: str) -> None:
    """Whichever is first: one over an array reaches as far as what was made of it."""
    array = np.arange(12.0)
    views = {
        "a": torch.from_numpy(array[:6]).view(2, 3).t(),
        "b": torch.from_numpy(array).view(3, 4).t(),
    }
    state = {name: views[name] for name in names}
    flat = flatten(state)
    assert flat.nbytes == array.nbytes
    found = rebuilt(flat)
    assert_same(found, state)
    assert is_tied(found["a"], found["b"])


def test_what_has_a_base_is_settled() -> None:
    """Though some of it has gaps, and the rest has a smaller base of its own."""
    buffer = torch.randn(20)
    state = [buffer[::2], buffer[1::2], buffer[:6], buffer[3:9]]
    assert stored_nbytes(state) == buffer.nbytes
    assert_same(rebuilt(flatten(state)), state)


def test_a_thousand_sparse_views_are_settled_in_a_few_turns() -> None:
    """However many widths their gaps have."""
    big = torch.zeros(1 << 20)
    state = {str(i): big[i :: 37 * (i + 2)] for i in range(1000)} | {"a": big[:9], "b": big[4:12]}
    flat = flatten(state)
    assert len(flat.untied) == 1000
    assert len(flat.specs) == 1001


def test_a_storage_that_mixes_element_types_is_stored_once() -> None:
    """Views of other types see the same bytes, afterwards, too."""
    base = random_tensor((64,), torch.uint8)
    state = [
        base,
        base.view(torch.float32),
        base[8:24].view(torch.int64),
        base.view(torch.bfloat16),
    ]
    assert stored_nbytes(state) == 64
    found = rebuilt(flatten(state))
    assert_same(found, state)
    assert all(is_tied(found[0], t) for t in found)


def test_mixed_views_without_a_base_are_stored_once() -> None:
    """The base may be nobody's: its bytes are stored under a name of their own."""
    base = random_tensor((64,), torch.uint8)
    state = {"f": base[:40].view(torch.float32), "i": base[24:].view(torch.int64)}
    flat = flatten(state)
    assert flat.nbytes == 64
    assert [spec.name for spec in flat.specs] == ["f~storage"]
    assert_same(rebuilt(flat), state)


def test_views_that_do_not_lie_at_whole_elements_of_their_memory_are_stored_apart() -> None:
    """A view of another type begins at a whole element, so the common bytes have none to give."""
    base = random_tensor((64,), torch.uint8)
    state = {"u": base[3:20], "f": base[4:24].view(torch.float32)}
    flat = flatten(state)
    assert flat.nbytes == 17 + 20
    assert flat.untied == ("u", "f")
    assert_same(rebuilt(flat), state)


def test_memory_may_begin_anywhere() -> None:
    """In a file, say: what counts is where a view begins in it."""
    memory = torch.from_numpy(np.zeros(41, np.uint8)[1:].view(np.float32))
    state = {"a": memory[:6], "b": memory[2:]}
    flat = flatten(state)
    assert flat.nbytes == memory.nbytes
    assert_same(rebuilt(flat), state)


@pytest.mark.parametrize("dtype", ["float32", "M8[D]", ">i4"])
def test_the_same_array_twice_is_stored_once_and_tied(dtype: str) -> None:
    """Whatever its elements; a part of it, and the same bytes as another type, are their own."""
    array = np.arange(24).reshape(4, 6).astype(dtype)
    state = {"a": array, "b": [array, array.view()], "part": array[1:], "raw": array.view("u1")}
    flat = flatten(state)
    assert flat.nbytes == 2 * array.nbytes + array[1:].nbytes
    found = rebuilt(flat)
    assert_same(found, state)
    assert np.shares_memory(found["a"], found["b"][0])
    assert np.shares_memory(found["a"], found["b"][1])
    assert not np.shares_memory(found["a"], found["part"])


def test_an_array_and_a_tensor_in_one_memory_are_stored_apart() -> None:
    """What is no tensor cannot be a view of one; both come back as what they were."""
    tensor = torch.arange(6.0)
    state = {"a": tensor.numpy(), "t": tensor, "part": tensor[2:4]}
    flat = flatten(state)
    assert flat.untied == ("a", "t", "part")
    found = rebuilt(flat)
    assert isinstance(found["a"], np.ndarray)
    assert_same(found, state)
    for state in ({"a": tensor.numpy()[::3], "t": tensor}, {"a": tensor.numpy(), "t": tensor[::3]}):
        flat = flatten(state)
        assert flat.untied == ("a", "t")
        assert_same(rebuilt(flat), state)


def test_an_expanded_tensor_stores_its_memory() -> None:
    """A million equal rows are one row, and come back expanded."""
    row = torch.randn(5)
    state = [row.expand(1_000_000, 5)]
    assert stored_nbytes(state) == 20
    (found,) = rebuilt(flatten(state))
    assert found.shape == (1_000_000, 5)
    assert found.stride() == (0, 1)
    assert torch.equal(found[999_999], row)


def test_a_conjugate_beside_its_base_is_a_view_of_it() -> None:
    """Conjugation and negation are bits of the view."""
    base = torch.randn(4, dtype=torch.complex64)
    state = [base, base.conj(), base.conj().imag, base.real]
    assert stored_nbytes(state) == base.nbytes
    found = rebuilt(flatten(state))
    assert_same(found, state)
    assert found[1].is_conj()
    assert found[2].is_neg()


@pytest.mark.parametrize("others", [{}, {"d": slice(2, 6)}])
def test_neighbours_are_not_tied(others: dict[str, slice]) -> None:
    """Tensors beside each other in one storage have nothing in common, whatever others have."""
    whole = torch.randn(8)
    state = dict(zip("abc", torch.randn(30).split(10), strict=True))
    state |= {"whole": whole, **{name: whole[part] for name, part in others.items()}}
    flat = flatten(state)
    assert [spec.name for spec in flat.specs] == ["a", "b", "c", "whole"]
    assert flat.untied == ()


def test_tensors_without_bytes_are_not_tied() -> None:
    """Empty tensors share an address, and nothing else."""
    base = torch.empty(4, 0)
    flat = flatten([base, base, torch.empty(0, dtype=torch.int8)])
    assert [spec.name for spec in flat.specs] == ["0", "1", "2"]
    assert_same(rebuilt(flat), [base, base, torch.empty(0, dtype=torch.int8)])


def test_tensors_without_bytes_are_not_tied_beside_others_that_are() -> None:
    """Those at one address, and one that lies within the memory of others."""
    weight, empty = torch.randn(4, 4), torch.empty(0)
    state = {"a": weight, "b": weight, "c": empty, "d": torch.empty(0), "e": weight[2:2]}
    flat = flatten(state)
    assert [spec.name for spec in flat.specs] == ["a", "c", "d", "e"]
    assert flat.untied == ()
    assert_same(rebuilt(flat), state)


def test_a_tensor_in_another_order_of_dimensions_is_stored_once_as_it_is() -> None:
    """Under its own name and type, in its own order, as it is without a second name."""
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    flat = flatten({"a": image, "b": image})
    assert [(spec.name, spec.dtype) for spec in flat.specs] == [("a", "float32")]
    assert flat.tree["a"] == flat.tree["b"] == flatten({"a": image}).tree["a"]


def test_dimensions_of_one_element_leave_the_order_of_the_others() -> None:
    """Whatever their strides are."""
    thin = torch.randn(5, 1, 7).transpose(0, 2)
    for tensor in (thin, thin.as_strided(thin.shape, (1, 3, 7))):
        (source,) = flatten({"a": tensor}).tree.values()
        assert [d for d in source["p"] if d != 1] == [2, 0]


def test_an_expanded_conjugate_alone_has_lost_no_tie() -> None:
    """It is stored apart from nothing."""
    flat = flatten({"a": torch.ones(3, dtype=torch.complex64).conj().expand(4, 3)})
    assert (len(flat.specs), flat.untied) == (1, ())


def test_a_bytearray_under_two_names_is_stored_for_each() -> None:
    """No tree that names one tensor for two of them is read."""
    buffer = bytearray(range(256)) * 32
    flat = flatten({"a": buffer, "b": buffer})
    assert [spec.name for spec in flat.specs] == ["a", "b"]
    assert rebuilt(flat) == {"a": buffer, "b": buffer}


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Draw views of one storage: any offset, shape, strides and element type."""
    base = random_tensor((96,), torch.uint8, draw(st.integers(0, 99)))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex64]))
        flat = base.view(dtype)
        shape = draw(st.lists(st.integers(0, 4), max_size=2))
        strides = [draw(st.integers(0, 4)) for _ in shape]
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
        if reach >= flat.numel():
            continue
        offset = draw(st.integers(0, flat.numel() - reach - 1))
        view = flat.as_strided(shape, strides, offset)
        if dtype.is_complex and draw(st.booleans()):
            view = view.conj()
        found.append(view)
    return found


@given(state=views())
def test_any_views_of_one_storage_come_back(state: list[torch.Tensor]) -> None:
    """Bit for bit, storing no more than all of them, or than the storage."""
    flat = flatten(state)
    assert_same(rebuilt(flat), state)
    assert flat.nbytes <= max(96, sum(t.nbytes for t in state))
    assert flat.nbytes <= sum(t.nbytes for t in state)


@pytest.mark.parametrize("num", [2, 50])
def test_many_overlapping_views_are_one_cluster(num: int) -> None:
    """A sliding window over a buffer stores the buffer."""
    buffer = torch.randn(num + 9)
    state = [buffer[i : i + 10] for i in range(num)]
    assert stored_nbytes(state) == buffer.nbytes
    assert_same(rebuilt(flatten(state)), state)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, torch.func.functionalize])
def test_a_tensor_inside_a_transform_is_refused(transform: Any) -> None:
    """It has no memory that could be copied; torch says so by a RuntimeError."""
    plain = torch.ones(2)

    def save(wrapped: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedLeafError, match="'b': it has no memory of that size: a tr"):
            flatten({"a": plain, "b": wrapped})
        return wrapped.sum()

    transform(save)(torch.ones(3))


@pytest.mark.parametrize("nbytes", [0, 8, 35])
@pytest.mark.parametrize("how", ["as it is", "strided", "a block"])
def test_a_tensor_whose_memory_was_freed_is_refused(nbytes: int, how: str) -> None:
    """It has a shape, and nothing or not all of the rest; what is behind is not its own."""
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    held = {
        "as it is": parameter,
        "strided": parameter.t(),
        "a block": Shard(parameter.detach(), (6, 3), (3, 0)),
    }[how]
    parameter.untyped_storage().resize_(nbytes)
    with pytest.raises(UnsupportedLeafError, match=r"'b': it has no memory of that size.*resized"):
        flatten({"a": torch.ones(2), "b": held})


def test_a_view_of_what_is_left_of_a_storage_is_saved() -> None:
    """Only what a tensor has of its own has to be there."""
    whole = torch.arange(9.0)
    first = whole[:3]
    whole.untyped_storage().resize_(12)
    assert_same(rebuilt(flatten({"t": first})), {"t": torch.arange(3.0)})


def test_strides_of_one_element_may_be_anything(tmp_path: Path) -> None:
    """They say nothing, and a manifest has no such numbers."""
    base = torch.arange(4.0)
    sync.save({"a": base, "x": base.as_strided((1,), (1 << 60,))}, tmp_path / "c", config=SMALL)
    found = sync.load(tmp_path / "c", config=SMALL)
    assert found["x"].tolist() == [0]
    assert found["x"].data_ptr() == found["a"].data_ptr()
