"""Find tensors of a state that share memory, and store each byte of it once.

Memory is compared, not objects: two views of one weight are two objects, and two tensors
of one storage may have nothing in common. Only clusters of overlapping memory are looked
at closely; in a state without any, this is one sort.

    the same elements in the same order     one tensor, two places in the tree, always; but a
                                            tensor and an array, or arrays of two shapes, are two
    inside a contiguous tensor              a view of that one
    a dense heap of views, or an expansion  their common memory is stored, all are views
    sparse views of a large storage         stored apart: 64 bytes of a 64 MiB storage
                                            write 64 bytes; reported if they may overlap
                                            (dense ones that they lie over stay tied)
"""

from __future__ import annotations

import bisect
import itertools
from typing import TYPE_CHECKING, Any

import torch

from ckptio.errors import UnsupportedLeafError
from ckptio.format.encode import TAG
from ckptio.format.manifest import MAX_EXTENT

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from ckptio.state.looks import Occurrence

#: What is wrong with such a tensor.
WITHOUT_MEMORY = (
    "it has no memory of that size: a transform of torch.func is under way, or its storage was"
    " resized"
)


def resolve_ties(
    occurrences: Sequence[Occurrence], distinct: Callable[[str], str], first: int = 0
) -> tuple[list[Occurrence], tuple[str, ...]]:
    """Settle what is stored, and write each occurrence's reference into its node.

    Args:
        occurrences: Tensors in the order of the state.
        distinct: Makes a name that no other tensor has.
        first: Index of the first one that is stored.

    Returns:
        What is stored, in order; and the names of tensors that may share memory but are
        stored apart.

    Raises:
        UnsupportedLeafError: A tensor has no memory of its own.
    """
    spans = [(0, 0) if o.look is None else o.look.span for o in occurrences]
    others = [number for number, o in enumerate(occurrences) if o.look is None]
    has_expanded = bool(others) and _measure(occurrences, others, spans)
    # mostly no memory overlaps
    if not has_expanded and all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans))):
        for index, occurrence in enumerate(occurrences, first):
            _refer(occurrence, index)
        return list(occurrences), ()
    twins = _twins(spans, occurrences)
    bases: dict[int, Occurrence] = {}  # of each member of a settled cluster, by its index
    untied: list[str] = []
    numbers = [i for i in range(len(occurrences)) if i not in twins]
    for cluster in _clusters(numbers, spans, occurrences):
        bases |= _bases_in(cluster, spans, occurrences, distinct)
        # of bytes, which nobody writes to, nobody can tell whether they are one object
        members = [i for i in cluster if occurrences[i].node[TAG] != "bytes"]
        if len(members) > 1:
            untied += [occurrences[i].name for i in members if i not in bases]
    firsts = [twins.get(i, i) for i in range(len(occurrences))]
    stored = list({id(o): o for o in (bases.get(i, occurrences[i]) for i in firsts)}.values())
    place = {id(occurrence): position for position, occurrence in enumerate(stored, first)}
    for i, occurrence in zip(firsts, occurrences, strict=True):
        if i in bases:
            _view(occurrence, bases[i], place[id(bases[i])])
        else:
            _refer(occurrence, place[id(occurrences[i])])
    return stored, tuple(untied)


def _measure(
    occurrences: Sequence[Occurrence], others: Sequence[int], spans: list[tuple[int, int]]
) -> bool:
    """Find the spans of tensors that were not looked at yet.

    Args:
        occurrences: All tensors.
        others: Numbers of those to measure.
        spans: Takes what is found, at its number.

    Returns:
        Whether a tensor has less memory than bytes.

    Raises:
        UnsupportedLeafError: One has no memory of its own.
    """
    tensors = [occurrences[number].tensor for number in others]
    sizes = [tensor.nbytes for tensor in tensors]
    found = spans_of(tensors, sizes)
    if isinstance(found, int):
        name = occurrences[others[found]].name
        raise UnsupportedLeafError(name, WITHOUT_MEMORY, "save it where it has")
    for number, span in zip(others, found, strict=True):
        spans[number] = span
    return any(stop - start < size for (start, stop), size in zip(found, sizes, strict=True))


def _twins(spans: Sequence[tuple[int, int]], occurrences: Sequence[Occurrence]) -> dict[int, int]:
    """Find what has the very elements of an earlier one: the number of that, by number.

    These stay one tensor whatever else shares their memory, with gaps or in another order.
    """
    firsts: dict[Hashable, int] = {}
    twins: dict[int, int] = {}
    for i, ((start, stop), occurrence) in enumerate(zip(spans, occurrences, strict=True)):
        tensor, node = occurrence.tensor, occurrence.node
        is_array = node[TAG] == "np"
        if start == stop or not (is_array or node.keys() <= {TAG, "p"}):
            continue
        kind = (node["d"], *node["s"]) if is_array else (tensor.is_conj(), tensor.is_neg())
        form = tensor.device, tensor.dtype, tensor.shape, tensor.stride(), kind
        if (number := firsts.setdefault((start, stop, form), i)) != i:
            twins[i] = number
    return twins


def spans_of(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[tuple[int, int]] | int:
    """Give the span of each tensor, by its size in bytes; the number of one without its memory."""
    spans = []
    for number, (tensor, nbytes) in enumerate(zip(tensors, sizes, strict=True)):
        try:
            start, stop = span_of(tensor, nbytes)
            storage = tensor.untyped_storage()
            is_there = bool(start) and stop <= storage.data_ptr() + storage.nbytes()
        except RuntimeError:  # torch.func wraps tensors while a transform runs
            return number
        if nbytes and not is_there:  # that of one to be made functional is at 0
            return number
        spans.append((start, stop))
    return spans


def span_of(tensor: torch.Tensor, nbytes: int) -> tuple[int, int]:
    """Give first byte and end of a tensor's elements; equal for none."""
    start = tensor.data_ptr()
    if nbytes and not tensor.is_contiguous():
        nbytes = tensor.itemsize * (
            1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        )
    return start, start + nbytes


def _clusters(
    numbers: Sequence[int], spans: Sequence[tuple[int, int]], occurrences: Sequence[Occurrence]
) -> list[list[int]]:
    """Group tensors whose memory overlaps; lone ones only if expanded (less memory than bytes)."""
    order = sorted((i for i in numbers if spans[i][0] < spans[i][1]), key=spans.__getitem__)
    clusters: list[list[int]] = []
    stop = -1
    device = None
    for i in order:
        tensor = occurrences[i].tensor
        if spans[i][0] < stop and tensor.device == device:
            clusters[-1].append(i)
        else:
            clusters.append([i])
            stop = -1
            device = tensor.device
        stop = max(stop, spans[i][1])
    return [
        sorted(cluster)
        for cluster in clusters
        if len(cluster) > 1
        or spans[cluster[0]][1] - spans[cluster[0]][0] < occurrences[cluster[0]].tensor.nbytes
    ]


def _bases_in(
    cluster: Sequence[int],
    spans: Sequence[tuple[int, int]],
    occurrences: Sequence[Occurrence],
    distinct: Callable[[str], str],
) -> dict[int, Occurrence]:
    """Give what to store for each member of a cluster, as far as that is more than the member.

    One sparse view over all of a memory is no reason to store apart what has that in common: where
    there is no base, what has the widest gaps is left out, and the rest looked at again. In each
    turn gaps are half as wide at most, so there are few. What lies within a base then is a view of
    it all the same.
    """
    bases: dict[int, Occurrence] = {}
    found: list[Occurrence] = []
    left: list[int] = []
    ahead = [list(cluster)]
    while ahead:
        numbers = ahead.pop()
        base = _base_of([occurrences[i] for i in numbers], [spans[i] for i in numbers], distinct)
        if base is not None:
            bases.update(dict.fromkeys(numbers, base))
            found.append(base)
            continue
        gaps = {i: (spans[i][1] - spans[i][0]) / occurrences[i].tensor.nbytes for i in numbers}
        widest = max(gaps.values())
        if widest > 1:
            wide = {i for i in numbers if gaps[i] > max(1, widest / 2)}
            left += wide
            rest = [i for i in numbers if i not in wide]
            clusters = _clusters(rest, spans, occurrences)
            ahead += clusters
            lone = [occurrences[i] for i in set(rest).difference(*clusters)]
            found += filter(_is_base, lone)  # stored as it is, whatever lies within it
    found.sort(key=lambda base: base.tensor.data_ptr())
    starts = [base.tensor.data_ptr() for base in found]
    for i in left:
        start, stop = spans[i]
        number = bisect.bisect_right(starts, start) - 1
        is_within = number >= 0 and stop <= starts[number] + found[number].tensor.nbytes
        if is_within and _is_part([occurrences[i]], starts[number]):
            bases[i] = found[number]
    return bases


def _is_base(occurrence: Occurrence) -> bool:
    """Whether what is stored of a tensor is the memory that it spans, as it is."""
    tensor, node = occurrence.tensor, occurrence.node
    return tensor.is_contiguous() and _is_physical(tensor) and node.keys() == {TAG}


def _is_part(members: Sequence[Occurrence], start: int) -> bool:
    """Whether tensors can be views of what begins at an address."""
    aligned = all((m.tensor.data_ptr() - start) % m.tensor.itemsize == 0 for m in members)
    return aligned and all(m.node.keys() <= {TAG, "p"} for m in members)


def _base_of(
    members: Sequence[Occurrence],
    spans: Sequence[tuple[int, int]],
    distinct: Callable[[str], str],
) -> Occurrence | None:
    """Give what to store for a cluster so that each member is a view of it, or `None`."""
    start, stop = min(a for a, _ in spans), max(b for _, b in spans)
    if not _is_part(members, start):
        return None
    for member, span in zip(members, spans, strict=True):
        tensor = member.tensor
        if span == (start, stop) and tensor.is_contiguous() and _is_physical(tensor):
            return member
    first = members[0]
    # several may begin at one place; the longest has all that any of them has
    storages = [m.tensor.untyped_storage() for m in members]
    storage = max(storages, key=torch.UntypedStorage.nbytes)
    lone = len(members) == 1
    if stop - start > sum(m.tensor.nbytes for m in members) or any(
        each.data_ptr() != storage.data_ptr() for each in storages
    ):
        return None
    if lone and not _is_physical(first.tensor):
        return None
    dtype = first.tensor.dtype if lone else torch.uint8
    flat = torch.empty(0, dtype=dtype, device=first.tensor.device)
    if type(flat) is not torch.Tensor:
        raise UnsupportedLeafError(
            first.name,
            f"it shares memory, and torch makes a {type(flat).__name__} of that here",
            "save outside of that mode",
        )
    begin = start - storage.data_ptr()
    length = (stop - start) // dtype.itemsize
    flat.set_(storage, begin // dtype.itemsize, (length,), (1,))
    return type(first)(
        distinct(f"{first.name}~storage"), flat, first.dtype if lone else "uint8", {}
    )


def _is_physical(tensor: torch.Tensor) -> bool:
    """Whether memory holds the values themselves, not their conjugates or negatives."""
    return not (tensor.is_conj() or tensor.is_neg())


def _refer(occurrence: Occurrence, index: int) -> None:
    """Let a node refer to a stored tensor."""
    node = occurrence.node
    node["t" if "t" in node else TAG] = index


def _view(member: Occurrence, base: Occurrence, index: int) -> None:
    """Let a node refer to a part of a stored tensor; to all of it, if that is what it is."""
    tensor, whole = member.tensor, base.tensor
    same = (
        member.dtype == base.dtype
        and tensor.data_ptr() == whole.data_ptr()
        and tensor.shape == whole.shape
        and tensor.stride() == whole.stride()
        and _is_physical(tensor)
    )
    if same:
        member.node[TAG] = index
        return
    node: dict[str, Any] = {
        TAG: "view",
        "t": index,
        "d": member.dtype,
        "o": tensor.data_ptr() - whole.data_ptr(),
        "s": list(tensor.shape),
        # of one element strides say nothing, and may be anything
        "r": [min(stride, MAX_EXTENT - 1) for stride in tensor.stride()],
    }
    if tensor.is_conj():
        node["conj"] = True
    if tensor.is_neg():
        node["neg"] = True
    member.node.clear()
    member.node.update(node)
