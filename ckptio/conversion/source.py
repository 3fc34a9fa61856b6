"""A checkpoint that is read tensor by tensor, or by parts of tensors, in bounded memory.

A conversion and a comparison are of checkpoints that may be larger than memory: `leaves` names
what is there, `parts_of` cuts what is large, `read` brings so much at a time. What is read is
verified as in a load. Values that are no tensors are in the manifest, and built at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ckptio._texts import shown, some_of
from ckptio.conversion.strip import below
from ckptio.conversion.unfit import UnfitError
from ckptio.engine.landing import Reading
from ckptio.engine.load import check_sizes, read_plan
from ckptio.engine.regions import Need, want_region
from ckptio.errors import ConfigError, TargetError
from ckptio.format.encode import TAG
from ckptio.layout import DTYPES, Box, nbytes_of, numel
from ckptio.plan.load import plan_load
from ckptio.staging.copy import Destination, TargetState
from ckptio.state.leaves import DTYPE_NAMES, as_integers, is_convertible
from ckptio.state.prune import prune
from ckptio.state.rebuild import Rebuilder, torch_dtype, view_of
from ckptio.state.references import check_view
from ckptio.state.select import make_predicate
from ckptio.state.tree import indices_in, read_tree, tensor_index, walk
from ckptio.state.wrappers import wrappers_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptio.format.encode import Json
    from ckptio.format.manifest import Manifest, TensorEntry
    from ckptio.plan.load import Wanted
    from ckptio.runtime.core import EngineCore
    from ckptio.state.select import Select
    from ckptio.storage.resolve import PathLike

#: Read at a time: what is on its way from one format to another.
PART_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of the state under one of its names.

    Attributes:
        name: The name.
        entry: What is stored.
        node: What the tree has there.
        converted: The element type that it is to have, if that is another one.
    """

    name: str
    entry: TensorEntry
    node: Json
    converted: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether it is a tensor, and all of what is stored."""
        return type(self.node[TAG]) is int

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, whole or a view: no array, and nothing made of several."""
        return self.is_plain or self.node[TAG] == "view"

    @property
    def stored_dtype(self) -> str:
        """Its element type in the checkpoint."""
        return str(self.node["d"]) if self.node[TAG] == "view" else self.entry.dtype

    @property
    def dtype(self) -> str:
        """Its element type, as it is wanted."""
        return self.converted or self.stored_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.node["s"]) if "s" in self.node else self.entry.shape

    @property
    def nbytes(self) -> int:
        """Its bytes, in that type; an array's as they are stored, which may have another."""
        return nbytes_of(self.shape, self.dtype) if self.is_tensor else self.entry.nbytes

    def as_wanted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert what was read of it."""
        return tensor.to(torch_dtype(self.converted)) if self.converted else tensor


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangular part of a stored tensor, one range of its row-major bytes.

    Attributes:
        entry: The tensor.
        region: The part.
        start: Where it begins in those bytes.
        name: The name under which it is wanted.
    """

    entry: TensorEntry
    region: Box
    start: int
    name: str = ""

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return nbytes_of(self.region.shape, self.entry.dtype)


class Source:
    """A checkpoint that is read.

    Args:
        core: An engine of this process alone.
        path: The checkpoint, of any format that is known.
        select: Names to take; all if not given.
        strip: Take only what is below this name, and drop it from the names.
        dtype: The element type of floating-point tensors among the leaves, but for those that a
            quantised one is made of; their own if not given.

    Raises:
        CheckpointNotFoundError: There is none.
        FormatError: It is damaged, or of no known format.
        TargetError: There is nothing to take.
    """

    def __init__(
        self,
        core: EngineCore,
        path: PathLike,
        select: Select | None = None,
        strip: str = "",
        dtype: torch.dtype | None = None,
    ) -> None:
        self._core = core
        self._dtype = dtype
        self._storage = core.storage(path)
        self.manifest: Manifest = core.call_blocking(
            lambda context: context.cache.get(self._storage), "inspect"
        )
        tree = read_tree(self.manifest)
        if strip:
            firsts = dict.fromkeys(name.partition(".")[0] for name, _ in walk("", tree) if name)
            tree = below(tree, strip.removesuffix("."))
            if tree == {}:
                found = f", which has {some_of([*firsts])}" if firsts else ""
                raise TargetError(
                    f"there is nothing below {strip!r} in checkpoint {self.path!r}{found}"
                )
        self.tree = tree if select is None else prune(tree, make_predicate(select))
        if select is not None and self.tree == {}:
            names = ""
            if strip:
                first = next((name for name, _ in walk("", tree) if name), "")
                names = f": without strip={strip!r}, names are as {first!r}; give them so, or none"
            raise TargetError(f"{shown(select)} selects nothing in {self.path!r}{names}")

    @property
    def path(self) -> str:
        """What it is called."""
        return self._storage.path

    def leaves(self) -> Iterator[Leaf]:
        """Give every tensor, array and stored string of bytes, under each of its names."""
        bare = "state" if tensor_index(self.tree) is not None else ""  # it has no name itself
        wrapped = () if self._dtype is None else wrappers_in(self.tree)
        kept = set[int]().union(*map(indices_in, wrapped))
        for name, node in walk(bare, self.tree):
            index = tensor_index(node)
            assert index is not None  # noqa: S101  # of a tree that was checked
            leaf = Leaf(name, self.manifest.tensors[index], node)
            yield leaf if index in kept else self._converted(leaf)

    def _converted(self, leaf: Leaf) -> Leaf:
        if self._dtype is None or not leaf.is_tensor:
            return leaf
        own = torch_dtype(leaf.stored_dtype)
        if own == self._dtype or not is_convertible(own):
            return leaf
        return replace(leaf, converted=DTYPE_NAMES[self._dtype])

    def indices(self) -> list[int]:
        """Number the stored tensors that are taken, each once."""
        return sorted(indices_in(self.tree))

    def check(self) -> None:
        """Look whether all files that are needed are there and whole.

        Raises:
            CorruptionError: One is not.
        """
        tensors = [self.manifest.tensors[index] for index in self.indices()]
        files = sorted({chunk.file for tensor in tensors for chunk in tensor.chunks})
        reading = Reading(self._storage, self.manifest)
        self._core.call_blocking(lambda context: check_sizes(reading, files, context), "check")

    def fill(self, wanted: Sequence[Wanted], destinations: Sequence[Destination]) -> None:
        """Read, verify and land ranges. Thread-safe.

        Raises:
            CorruptionError: A block does not have its checksum.
            StorageError: It cannot be read.
        """
        plan = plan_load(self.manifest, wanted, self._core.config)
        target = TargetState(destinations, None)
        reading = Reading(self._storage, self.manifest, target=target)
        self._core.call_blocking(lambda context: read_plan(plan, reading, context), "read")

    def read(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """Read parts of tensors, in one go."""
        wanted: list[Wanted] = []
        destinations = []
        for number, part in enumerate(parts):
            want_region(part.entry, part.region, number, wanted)
            dtype = torch_dtype(part.entry.dtype)
            room = torch.empty(part.region.shape, dtype=dtype, device="cpu")
            destinations.append(Destination(room, dtype))
        self.fill(wanted, destinations)
        return [destination.tensor for destination in destinations]

    def whole(self, entry: TensorEntry) -> torch.Tensor:
        """Read a whole tensor."""
        return self.read([whole_of(entry)])[0]

    def values(self, standing_in: Callable[[int], torch.Tensor]) -> Any:
        """Build the state with its values, and something else for the tensors.

        Args:
            standing_in: Gives what stands for the stored tensor of an index, wherever it is
                used as a tensor and whole; everything else is read.
        """
        kinds: dict[int, set[Any]] = {}
        for _, node in walk("", self.tree):
            index = tensor_index(node)
            assert index is not None  # noqa: S101  # of a tree that was checked
            kinds.setdefault(index, set()).add(type(node[TAG]) is int)
        tensors = {index: standing_in(index) for index, used in kinds.items() if used == {True}}
        others = [index for index in kinds if index not in tensors]
        parts = [whole_of(self.manifest.tensors[index]) for index in others]
        tensors.update(zip(others, self.read(parts), strict=True))
        return Rebuilder(tensors, (), []).rebuild("", self.tree)


def require_text(name: str) -> None:
    """Check that a data file can name a tensor so: as JSON in UTF-8.

    Raises:
        ConfigError: It is no text; `os.fsdecode` makes such, and Python's dicts take it.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{name!r} is no Unicode text, and cannot be a name in a safetensors file; leave it out"
            " with select="
        ) from None


def read_views(
    source: Source, leaves: Sequence[Leaf], max_nbytes: int = PART_NBYTES
) -> Iterator[torch.Tensor]:
    """Read tensors that are stored as parts of others, or as other views of them.

    Of each what it spans is read, several in one go: small ones share their blocks. Views that
    lie between each other (columns of one matrix) span more together than there is: then all of
    what they are views of is read, once for all that stand together in `leaves`.

    Args:
        source: The checkpoint.
        leaves: What to read; some may be stored whole.
        max_nbytes: Bytes that are read in one go, if one alone has no more.

    Yields:
        Each, in this order, in row-major order.
    """
    spanned: dict[int, int] = {}
    for leaf in leaves:
        spanned[id(leaf.entry)] = spanned.get(id(leaf.entry), 0) + len(_span_of(leaf))
    batch: list[Leaf] = []
    nbytes = 0
    base: tuple[TensorEntry, torch.Tensor] | None = None
    for leaf in leaves:
        entry, span = leaf.entry, _span_of(leaf)
        is_apart = spanned[id(entry)] <= entry.nbytes
        if batch and (not is_apart or nbytes + len(span) > max_nbytes):
            yield from _read_spans(source, batch)
            batch, nbytes = [], 0
        if is_apart:
            batch.append(leaf)
            nbytes += len(span)
            base = None
            continue
        if base is None or base[0] is not entry:
            base = None  # gone before another takes its room
            base = entry, source.whole(entry)
        yield _viewed(base[1], leaf.node) if leaf.node[TAG] == "view" else base[1]
    yield from _read_spans(source, batch)


def _span_of(leaf: Leaf) -> range:
    """Give the bytes of what is stored from the first to the last of a tensor.

    Raises:
        FormatError: They reach outside of it.
    """
    if leaf.node[TAG] != "view":
        return range(leaf.entry.nbytes)
    return range(leaf.node["o"], check_view(leaf.node, leaf.entry.nbytes))


def _read_spans(source: Source, leaves: Sequence[Leaf]) -> Iterator[torch.Tensor]:
    """Read what each tensor spans, in one go."""
    wanted: list[Wanted] = []
    rooms = []
    for number, leaf in enumerate(leaves):
        span = _span_of(leaf)
        if span:
            Need(leaf.entry, number, span=(span.start, span.stop)).expand(wanted)
        rooms.append(torch.empty(len(span), dtype=torch.uint8, device="cpu"))
    if wanted:
        source.fill(wanted, [Destination(room, torch.uint8) for room in rooms])
    for leaf, room in zip(leaves, rooms, strict=True):
        if leaf.node[TAG] == "view":
            yield _viewed(room, {**leaf.node, "o": 0})
        else:
            yield room.view(torch_dtype(leaf.entry.dtype)).view(leaf.entry.shape)


def _viewed(base: torch.Tensor, node: Json) -> torch.Tensor:
    view = view_of(base, node)
    return as_integers(view).contiguous().resolve_conj().resolve_neg().view(view.dtype)


def whole_of(entry: TensorEntry) -> Part:
    """Make one part of a whole tensor."""
    return Part(entry, entry.box, 0)


def parts_of(
    entry: TensorEntry, max_nbytes: int = PART_NBYTES, *, name: str = ""
) -> Iterator[Part]:
    """Cut a tensor into parts of `max_nbytes` at most, in the order of its bytes.

    Args:
        entry: The tensor.
        max_nbytes: Bytes of a part; an element's, if that is more.
        name: What to call the parts.
    """
    itemsize = DTYPES[entry.dtype].itemsize
    if entry.nbytes:
        for part in _cut(entry, (), 0, max(max_nbytes, itemsize), itemsize):
            yield replace(part, name=name) if name else part


def _cut(
    entry: TensorEntry, fixed: tuple[int, ...], start: int, max_nbytes: int, itemsize: int
) -> Iterator[Part]:
    """Cut what has the first indices `fixed`."""
    shape = entry.shape
    depth = len(fixed)
    ones = (1,) * depth
    rest = shape[depth:]
    if numel(rest) * itemsize <= max_nbytes:
        yield Part(entry, Box((*fixed, *(0,) * len(rest)), (*ones, *rest)), start)
        return
    row = numel(rest[1:]) * itemsize
    rows = max_nbytes // row
    if not rows:
        for index in range(rest[0]):
            yield from _cut(entry, (*fixed, index), start + index * row, max_nbytes, itemsize)
        return
    for first in range(0, rest[0], rows):
        count = min(rows, rest[0] - first)
        offset = (*fixed, first, *(0,) * (len(rest) - 1))
        yield Part(entry, Box(offset, (*ones, count, *rest[1:])), start + first * row)


def require_dict(state: Any, path: str) -> dict[str, Any]:
    """Refuse a state that has no names at its top."""
    if not isinstance(state, dict):
        raise UnfitError(f"the state in {path!r} is no dict: it has no names to be saved under")
    return state
