"""From a manifest and what the caller wants to destinations, ranges and a result.

This is the part of a load that knows about tensors: it decides where each byte lands,
and puts the state together afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckptio.errors import FormatError, MismatchError
from ckptio.format.encode import TAG
from ckptio.layout import DTYPES, Box, numel, row_major_strides, shared_runs
from ckptio.plan.load import Wanted
from ckptio.staging.copy import Destination
from ckptio.state.flatten import collection_paused
from ckptio.state.rebuild import Rebuilder, allocate, torch_dtype, view_of
from ckptio.state.target import Matcher
from ckptio.state.tree import prune, read_tree, tensor_index, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptio.format.manifest import Manifest, TensorEntry
    from ckptio.state.target import Fill, Match
    from ckptio.state.tree import Predicate


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A load as it was asked for.

    Attributes:
        into: The target; `None` to make everything new.
        device: Where new tensors go; the CPU if not given.
        dtype: Element type for floating-point tensors; their own if not given.
        keep: Accepts the names to load; everything if not given.
        strict: What to do when target and checkpoint disagree.
        types: Classes that may be built.
    """

    into: Any = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    keep: Predicate | None = None
    strict: str = "raise"
    types: Sequence[type] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load found.

    Attributes:
        path: The checkpoint.
        save_id: The save that wrote it.
        nbytes: Bytes read.
        num_tensors: Tensors filled or made.
        missing: Names of the target that the checkpoint does not have; left as they were.
        unexpected: Names of the checkpoint that the target does not have; not read.
        mismatched: One line for each name that differs in shape, type or kind; left.
        notes: One line for each value that came back as a plain one, and why.
    """

    path: str
    save_id: str
    nbytes: int
    num_tensors: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Need(NamedTuple):
    """A stored tensor, or a byte range of it, that a destination takes.

    Attributes:
        entry: The tensor.
        destination: Index of the destination.
        span: The range of its row-major bytes; all of them if not given.
    """

    entry: TensorEntry
    destination: int
    span: tuple[int, int] | None = None

    def expand(self, wanted: list[Wanted]) -> None:
        """Add the ranges of files that bring it."""
        entry, destination, span = self
        if len(entry.chunks) == 1:
            chunk = entry.chunks[0]
            first, stop = span or (0, entry.nbytes)
            if first < stop:
                start = chunk.start + first
                wanted.append(Wanted(chunk.file, start, stop - first, destination, 0))
            return
        whole: list[Wanted] = []
        want_region(entry, Box((0,) * len(entry.shape), entry.shape), destination, whole)
        wanted += whole if span is None else _cut_out(whole, *span)


@dataclass(slots=True)
class Restoration:
    """A load with its decisions made.

    Attributes:
        makers: Give the tensors that take bytes, each once; new ones are made only then.
        needs: What each takes; `Need.destination` counts `makers`.
        finish: Puts the result together once everything has landed. On the caller's thread.
        has_values: Whether something is loaded that is no tensor.
        match: How target and checkpoint agree; `None` without a target.
        notes: Filled in by `finish`.
    """

    makers: list[Callable[[], Destination]] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)
    finish: Callable[[], Any] = lambda: None
    match: Match | None = None
    has_values: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all is loaded."""
        return not self.needs and not self.has_values

    def files(self) -> list[int]:
        """Give the files that hold what is needed."""
        return sorted({chunk.file for need in self.needs for chunk in need.entry.chunks})

    def wanted(self) -> list[Wanted]:
        """Give the ranges that bring what is needed, after the sizes of files were checked.

        Raises:
            FormatError: The chunks are cut into more pieces than any sharding has.
        """
        wanted: list[Wanted] = []
        for need in self.needs:
            need.expand(wanted)
        return wanted

    def destinations(self) -> list[Destination]:
        """Make what is new, on the caller's thread, after the sizes of files were checked."""
        return [make() for make in self.makers]


#: Ranges of one tensor, at most: a load plans each, and takes about 150 bytes for it.
_MAX_RANGES = 8_000_000


class _Kind(NamedTuple):
    """How to make a new tensor."""

    device: torch.device | None
    dtype: torch.dtype | None


def plan_restoration(manifest: Manifest, path: str, request: LoadRequest) -> Restoration:
    """Decide where everything goes. Changes no target; makes no tensor yet of a target's size.

    Raises:
        MismatchError: Target and checkpoint disagree and `strict` is `"raise"`.
        TargetError: A target cannot be filled.
        FormatError: The tree contradicts the manifest.
    """
    try:
        with collection_paused():
            if request.into is None:
                return _all_new(manifest, request)
            return _into(manifest, path, request)
    except RecursionError:
        raise FormatError("values nested too deep in the manifest") from None


def _all_new(manifest: Manifest, request: LoadRequest) -> Restoration:
    """Make every tensor of the (selected) tree."""
    tree = read_tree(manifest)
    if request.keep is not None:
        tree = prune(tree, request.keep)
    restoration = Restoration(has_values=request.keep is None or tree != {})
    tensors: dict[int, torch.Tensor] = {}
    kinds: dict[int, _Kind] = {}
    for _, node in walk("", tree):
        index = tensor_index(node)
        if index is None:
            continue
        kind = kinds.get(index, _Kind(request.device, request.dtype))
        if node[TAG] in ("np", "bytes", "bytearray"):
            kind = _Kind(None, None)  # host memory of its own type
        elif node[TAG] == "view":
            kind = _Kind(kind.device, None)  # views need its bytes; the rebuilder converts
        kinds[index] = kind
    _make(manifest, kinds, tensors, restoration)
    rebuilder = Rebuilder(tensors, request.types, restoration.notes, request.dtype)
    restoration.finish = lambda: rebuilder.rebuild("", tree)
    return restoration


def _into(manifest: Manifest, path: str, request: LoadRequest) -> Restoration:
    """Fill the caller's tensors; make only what the target does not have."""
    matcher = Matcher(manifest.tensors, dtype=request.dtype, keep=request.keep)
    assemble = matcher.merge("", request.into, read_tree(manifest))
    match = matcher.match
    if request.strict == "raise" and not match.agrees:
        raise MismatchError(path, match.missing, match.unexpected, match.mismatched)
    restoration = Restoration(match=match, has_values=match.num_values > 0)
    late: list[Callable[[], None]] = []
    for fill in match.fills:
        _fill(manifest, fill, restoration, late)
    tensors: dict[int, torch.Tensor] = {}
    _make(manifest, dict.fromkeys(sorted(match.fresh), _Kind(None, None)), tensors, restoration)
    rebuilder = Rebuilder(tensors, request.types, restoration.notes)

    def finish() -> Any:
        for copy in late:
            copy()
        return assemble(rebuilder)

    restoration.finish = finish
    return restoration


def _make(
    manifest: Manifest,
    kinds: dict[int, _Kind],
    tensors: dict[int, torch.Tensor],
    restoration: Restoration,
) -> None:
    """Make new tensors and want all of their bytes.

    Args:
        manifest: What they are made from.
        kinds: How to make each, by index.
        tensors: Takes them, by index.
        restoration: Takes destinations and ranges.
    """
    for index, kind in kinds.items():
        entry = _entry(manifest, index)
        stored = torch_dtype(entry.dtype)

        def make(
            index: int = index,
            entry: TensorEntry = entry,
            stored: torch.dtype = stored,
            kind: _Kind = kind,
        ) -> Destination:
            tensors[index] = allocate(entry, device=kind.device, dtype=kind.dtype)
            return Destination(tensors[index], stored)

        restoration.makers.append(make)
        restoration.needs.append(Need(entry, len(restoration.makers) - 1))


def _entry(manifest: Manifest, index: int) -> TensorEntry:
    if not 0 <= index < len(manifest.tensors):
        raise FormatError(f"the tree refers to tensor {index}, which is not there")
    return manifest.tensors[index]


def want_region(entry: TensorEntry, region: Box, destination: int, wanted: list[Wanted]) -> None:
    """Want a rectangular part of a stored tensor, in a destination of just that shape."""
    itemsize = DTYPES[entry.dtype].itemsize
    zeros = (0,) * len(entry.shape)
    for chunk in entry.chunks:
        offset, local = chunk.global_offset or zeros, chunk.local_shape or entry.shape
        if chunk.global_offset is None:
            local = entry.shape
        first = tuple(map(max, offset, region.offset))
        last = tuple(
            min(a + s, b + t)
            for a, s, b, t in zip(offset, local, region.offset, region.shape, strict=True)
        )
        shape = tuple(max(0, b - a) for a, b in zip(first, last, strict=True))
        in_chunk = tuple(a - b for a, b in zip(first, offset, strict=True))
        in_region = tuple(a - b for a, b in zip(first, region.offset, strict=True))
        for start, at, count in shared_runs(shape, (in_chunk, local), (in_region, region.shape)):
            if len(wanted) >= _MAX_RANGES:
                raise FormatError(
                    f"{entry.name!r} is cut into more than {_MAX_RANGES} pieces; load a part of it"
                )
            wanted.append(
                Wanted(
                    chunk.file,
                    chunk.start + start * itemsize,
                    count * itemsize,
                    destination,
                    at * itemsize,
                )
            )


def _fill(
    manifest: Manifest, fill: Fill, restoration: Restoration, late: list[Callable[[], None]]
) -> None:
    """Want the bytes of one tensor of the target."""
    entry = _entry(manifest, fill.index)
    stored = torch_dtype(entry.dtype)
    node = fill.view
    if node is None:
        restoration.makers.append(lambda: Destination(fill.tensor, stored))
        restoration.needs.append(Need(entry, len(restoration.makers) - 1))
        return
    shape = tuple(node["s"])
    if list(row_major_strides(shape)) == node["r"] and not node.get("conj") and not node.get("neg"):
        dtype = torch_dtype(node["d"])
        restoration.makers.append(lambda: Destination(fill.tensor, dtype))
        first, count = node["o"], numel(shape) * DTYPES[node["d"]].itemsize
        need = Need(entry, len(restoration.makers) - 1, (first, first + count))
        restoration.needs.append(need)
        return
    # a strided view: its base is read beside it, and copied from when everything is there
    bases: list[torch.Tensor] = []

    def make() -> Destination:
        bases.append(allocate(entry))
        return Destination(bases[0], stored)

    restoration.makers.append(make)
    restoration.needs.append(Need(entry, len(restoration.makers) - 1))
    late.append(lambda: _copy_view(fill.tensor, bases[0], node))


@torch.no_grad()
def _copy_view(target: torch.Tensor, base: torch.Tensor, node: dict[str, Any]) -> None:
    target.copy_(view_of(base, node))


def _cut_out(wanted: Sequence[Wanted], first: int, stop: int) -> list[Wanted]:
    """Keep what lies in `[first, stop)` of the destination's bytes, counted from `first`."""
    kept = []
    for want in wanted:
        begin = max(want.offset, first)
        end = min(want.offset + want.nbytes, stop)
        if begin < end:
            start = want.start + begin - want.offset
            kept.append(Wanted(want.file, start, end - begin, want.destination, begin - first))
    return kept
