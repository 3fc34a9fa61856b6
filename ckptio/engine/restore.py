"""From a manifest and what the caller wants to destinations, ranges and a result.

This is the part of a load that knows about tensors: it decides where each byte lands,
and puts the state together afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptio._gc import collection_paused
from ckptio.errors import FormatError, MismatchError
from ckptio.format.encode import TAG
from ckptio.layout import DTYPES, Box, numel, row_major_strides, shared_runs
from ckptio.plan.load import Wanted
from ckptio.staging.copy import Destination
from ckptio.state.rebuild import Rebuilder, allocate, torch_dtype
from ckptio.state.target import Matcher
from ckptio.state.tree import prune, read_tree, tensor_index, walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ckptio.format.manifest import Chunk, Manifest, TensorEntry
    from ckptio.state.fills import Fill, Match
    from ckptio.state.tree import Predicate

#: Chooses one of the places of a chunk: a file, and where the chunk starts in it.
Place = Callable[["Chunk"], tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """A load as it was asked for.

    Attributes:
        into: The target; `None` to make everything new.
        device: Where new tensors go, those for tensors of `into` on the meta device too;
            the CPU if not given.
        dtype: Element type for floating-point tensors; their own if not given.
        keep: Accepts the names to load; everything if not given.
        strict: What to do when target and checkpoint disagree.
        types: Classes that may be built.
        rank: Whose values to take of those that were kept for each rank.
    """

    into: Any = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    keep: Predicate | None = None
    strict: str = "raise"
    types: Sequence[type] = ()
    rank: int = 0


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
    """A stored tensor, or a part of it, that a destination takes.

    Attributes:
        entry: The tensor.
        destination: Index of the destination.
        span: The range of its row-major bytes; all of them if not given.
        region: The block of it; all of it if not given. Never with `span`.
    """

    entry: TensorEntry
    destination: int
    span: tuple[int, int] | None = None
    region: Box | None = None

    def expand(self, wanted: list[Wanted], place: Place | None = None) -> None:
        """Add the ranges of files that bring it.

        Args:
            wanted: Takes them.
            place: Chooses the place of each chunk; the first one if not given.
        """
        entry, destination, span, region = self
        if len(entry.chunks) == 1 and region is None:
            chunk = entry.chunks[0]
            first, stop = span or (0, entry.nbytes)
            if first < stop:
                file, start = (chunk.file, chunk.start) if place is None else place(chunk)
                wanted.append(Wanted(file, start + first, stop - first, destination, 0))
            return
        found = wanted if span is None else []
        want_region(entry, region or _all_of(entry), destination, found, place)
        if span is not None:
            wanted += _cut_out(found, *span)

    def chunks(self) -> list[Chunk]:
        """Give the chunks that have something of it."""
        region = self.region
        if region is None or len(self.entry.chunks) == 1:
            return list(self.entry.chunks)
        return [
            chunk for chunk in self.entry.chunks if numel(_shared(self.entry, chunk, region).shape)
        ]


@dataclass(slots=True)
class Restoration:
    """A load with its decisions made.

    Attributes:
        makers: Give the tensors that take bytes, each once; new ones are made only then.
        needs: What each takes; `Need.destination` counts `makers`.
        finish: Puts the result together once everything has landed. On the caller's thread.
        has_values: Whether something is loaded that is no tensor.
        num_tensors: Tensors that are filled or made; several `makers` may be parts of one.
        match: How target and checkpoint agree; `None` without a target.
        notes: Filled in by `finish`.
    """

    makers: list[Callable[[], Destination]] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)
    finish: Callable[[], Any] = lambda: None
    match: Match | None = None
    num_tensors: int = 0
    has_values: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all is loaded."""
        return not self.num_tensors and not self.has_values

    def files(self, place: Place | None = None) -> list[int]:
        """Give the files that hold what is needed; see `wanted`."""
        chunks = (chunk for need in self.needs for chunk in need.chunks())
        return sorted({chunk.file if place is None else place(chunk)[0] for chunk in chunks})

    def wanted(self, place: Place | None = None) -> list[Wanted]:
        """Give the ranges that bring what is needed, after the sizes of files were checked.

        Args:
            place: Chooses the place of each chunk; the first one if not given.

        Raises:
            FormatError: The chunks are cut into more pieces than any sharding has.
        """
        wanted: list[Wanted] = []
        for need in self.needs:
            need.expand(wanted, place)
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
    tree = read_tree(manifest, request.rank)
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
    matcher = Matcher(
        manifest.tensors, dtype=request.dtype, keep=request.keep, device=request.device
    )
    assemble = matcher.merge("", request.into, read_tree(manifest, request.rank))
    match = matcher.match
    if request.strict == "raise" and not match.agrees:
        raise MismatchError(path, match.missing, match.unexpected, match.mismatched)
    restoration = Restoration(
        match=match, num_tensors=match.num_filled, has_values=match.num_values > 0
    )
    late: list[Callable[[], None]] = []
    for fill in match.fills:
        _fill(manifest, fill, restoration, late)
    tensors: dict[int, torch.Tensor] = {}
    _make(manifest, dict.fromkeys(sorted(match.fresh), _Kind(None, None)), tensors, restoration)
    rebuilder = Rebuilder(tensors, request.types, restoration.notes)

    def finish() -> Any:
        for copy in late:
            copy()
        match.mark_written()
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
    restoration.num_tensors += len(kinds)
    for index, kind in kinds.items():
        entry = manifest.tensors[index]
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


def want_region(
    entry: TensorEntry,
    region: Box,
    destination: int,
    wanted: list[Wanted],
    place: Place | None = None,
) -> None:
    """Want a rectangular part of a stored tensor, in a destination of just that shape.

    Args:
        entry: The tensor.
        region: The part.
        destination: Index of the destination.
        wanted: Takes the ranges.
        place: Chooses the place of each chunk; the first one if not given.

    Raises:
        FormatError: The chunks are cut into more pieces than any sharding has.
    """
    itemsize = DTYPES[entry.dtype].itemsize
    for chunk in entry.chunks:
        shared = _shared(entry, chunk, region)
        if not numel(shared.shape):
            continue
        block = _box_of(entry, chunk)
        file, first = (chunk.file, chunk.start) if place is None else place(chunk)
        in_chunk = tuple(a - b for a, b in zip(shared.offset, block.offset, strict=True))
        in_region = tuple(a - b for a, b in zip(shared.offset, region.offset, strict=True))
        runs = shared_runs(shared.shape, (in_chunk, block.shape), (in_region, region.shape))
        for start, at, count in runs:
            if len(wanted) >= _MAX_RANGES:
                raise FormatError(
                    f"{entry.name!r} is cut into more than {_MAX_RANGES} pieces; load a part of it"
                )
            begin, nbytes = first + start * itemsize, count * itemsize
            wanted.append(Wanted(file, begin, nbytes, destination, at * itemsize))


def _all_of(entry: TensorEntry) -> Box:
    return Box((0,) * len(entry.shape), entry.shape)


def _box_of(entry: TensorEntry, chunk: Chunk) -> Box:
    """Give the block of a tensor that a chunk is."""
    if chunk.global_offset is None:
        return _all_of(entry)
    return Box(chunk.global_offset, chunk.local_shape or entry.shape)


def _shared(entry: TensorEntry, chunk: Chunk, region: Box) -> Box:
    """Give what a chunk has of a region; its shape has a zero if that is nothing."""
    block = _box_of(entry, chunk)
    first = tuple(map(max, block.offset, region.offset))
    shape = tuple(
        max(0, min(a + s, b + t) - start)
        for a, s, b, t, start in zip(
            block.offset, block.shape, region.offset, region.shape, first, strict=True
        )
    )
    return Box(first, shape)


def _fill(
    manifest: Manifest, fill: Fill, restoration: Restoration, late: list[Callable[[], None]]
) -> None:
    """Want the bytes of one tensor of the target."""
    entry = manifest.tensors[fill.index]
    stored = torch_dtype(entry.dtype)
    node = fill.view
    destination = len(restoration.makers)
    if node is None:
        region = None if fill.block is None else fill.block.box
        restoration.makers.append(lambda: Destination(fill.memory(), stored))
        restoration.needs.append(Need(entry, destination, region=region))
        return
    shape = tuple(node["s"])
    is_plain = list(row_major_strides(shape)) == node["r"]
    if is_plain and fill.block is None and not node.get("conj") and not node.get("neg"):
        dtype = torch_dtype(node["d"])
        restoration.makers.append(lambda: Destination(fill.memory(), dtype))
        first, count = node["o"], numel(shape) * DTYPES[node["d"]].itemsize
        restoration.needs.append(Need(entry, destination, (first, first + count)))
        return
    # a strided view, or a block of a view: its base is read beside it, and copied from
    # when everything is there
    bases: list[torch.Tensor] = []

    def make() -> Destination:
        bases.append(allocate(entry))
        return Destination(bases[0], stored)

    restoration.makers.append(make)
    restoration.needs.append(Need(entry, destination))
    late.append(lambda: fill.copy_from(bases[0]))


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
