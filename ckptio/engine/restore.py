"""From a manifest and what the caller wants to destinations, ranges and a result.

This is the part of a load that knows about tensors: it decides where each byte lands,
and puts the state together afterwards.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckptio._gc import without_collection
from ckptio._texts import some_of
from ckptio.engine.hints import hint_for
from ckptio.engine.regions import Need
from ckptio.engine.restoration import Restoration
from ckptio.errors import FormatError, MismatchError, TargetError
from ckptio.format.encode import TAG
from ckptio.layout import nbytes_of, row_major_strides
from ckptio.staging.copy import Destination
from ckptio.state.numbered import numbered_below
from ckptio.state.overlaps import settle_overlaps
from ckptio.state.prune import prune
from ckptio.state.rebuild import Rebuilder, allocate, torch_dtype
from ckptio.state.take import STAYS_META
from ckptio.state.target import Matcher
from ckptio.state.tree import indices_in, read_tree, tensor_index, walk
from ckptio.state.wrappers import wrappers_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckptio.engine.request import LoadRequest
    from ckptio.format.manifest import Manifest, TensorEntry
    from ckptio.state.fills import Fill, Match

_log = logging.getLogger("ckptio")


class _Kind(NamedTuple):
    """How to make a new tensor."""

    device: torch.device | None
    dtype: torch.dtype | None
    order: tuple[int, ...] = ()


@without_collection
def plan_restoration(manifest: Manifest, path: str, request: LoadRequest) -> Restoration:
    """Decide where everything goes. Changes no target; makes no tensor yet of a target's size.

    Raises:
        MismatchError: Target and checkpoint disagree and `strict` is `"raise"`.
        TargetError: A target cannot be filled.
        FormatError: The tree contradicts the manifest.
    """
    try:
        if request.into is None:
            return _all_new(manifest, request)
        return _into(manifest, path, request)
    except RecursionError:
        if request.into is not None:  # the tree alone is less deep than that
            raise TargetError("cannot fill the target: it is too deep") from None
        raise FormatError("values nested too deep in the manifest") from None


def _all_new(manifest: Manifest, request: LoadRequest) -> Restoration:
    """Make every tensor of the (selected) tree."""
    tree = read_tree(manifest, request.rank)
    if manifest.document is not None:
        tree = numbered_below(tree)
    if request.keep is not None:
        tree = prune(tree, request.keep)
    restoration = Restoration(has_values=tree != {})
    tensors: dict[int, torch.Tensor] = {}
    kinds: dict[int, _Kind] = {}
    # scales and codes mean something in their own type alone
    kept = set() if request.dtype is None else set[int]().union(*map(indices_in, wrappers_in(tree)))
    for _, node in walk("", tree):
        index = tensor_index(node)
        if index is None:
            continue
        order = tuple(node["p"]) if "p" in node else ()
        kind = kinds.get(index, _Kind(request.device, request.dtype, order))
        if kind.order != order:  # what views refer to is row-major
            kind = kind._replace(order=())
        if node[TAG] in ("np", "bytes", "bytearray"):
            kind = _Kind(None, None)  # host memory of its own type
        elif index in kept:
            kind = kind._replace(dtype=None)
        elif node[TAG] == "view":
            kind = _Kind(kind.device, None)  # views need its bytes; the rebuilder converts
        kinds[index] = kind
    _make(manifest, kinds, tensors, restoration)
    rebuilder = Rebuilder(tensors, request.types, restoration.notes, request.dtype, kept)
    restoration.finish = lambda: rebuilder.rebuild("", tree)
    return restoration


def _into(manifest: Manifest, path: str, request: LoadRequest) -> Restoration:
    """Fill the caller's tensors; make only what the target does not have."""
    matcher = Matcher(
        manifest.tensors,
        dtype=request.dtype,
        keep=request.keep,
        device=request.device,
        resizes=request.strict == "raise",
        types=request.types,
        is_exact=manifest.writer != "torch.distributed.checkpoint",  # it drops empty dicts
        is_alone=request.num_ranks == 1,
    )
    assemble = matcher.merge("", request.into, read_tree(manifest, request.rank))
    match = matcher.match
    match.look_again(manifest.tensors)
    notes = [f"{name}: saved for other ranks only; left as it is" for name in match.kept]
    unclaimed = _disagreement(manifest, path, request, match)
    fills = _settled(match, path, request, notes)
    left_out = set() if fills is match.fills else _names(match.fills) - _names(fills)
    restoration = Restoration(
        match=match,
        num_tensors=match.num_filled - len(left_out),
        has_values=match.num_values > 0,
        notes=notes,
        unclaimed=unclaimed,
    )
    late: list[Callable[[], None]] = []
    bases: dict[int, torch.Tensor | None] = {}
    for fill in fills:
        _fill(manifest, fill, restoration, late, bases)
    tensors: dict[int, torch.Tensor] = {}
    kinds = {  # of their own type: `dtype` says what a target may have
        index: _Kind(None if index in match.on_host else request.device, None, order)
        for index, order in sorted(match.fresh.items())
    }
    _make(manifest, kinds, tensors, restoration)
    rebuilder = Rebuilder(tensors, request.types, restoration.notes)
    for taken in match.taken:  # what does not fit is an error before anything is filled
        taken.make_ahead(rebuilder)

    def finish() -> Any:
        for copy in late:
            copy()
        match.mark_written()
        if matcher.runs_foreign:
            matcher.untouched.sample(match.fills)
        num_notes = len(notes)  # the restoration has this function: no reference cycle
        result = assemble(rebuilder)
        _tell_of_meta(manifest, path, request, notes, num_notes)
        matcher.untouched.check_before(len(match.fills), len(match.fills))
        return result

    restoration.finish = finish
    return restoration


def _disagreement(
    manifest: Manifest, path: str, request: LoadRequest, match: Match
) -> MismatchError | None:
    """Give the error of a target that lacks names which those of other ranks may have.

    Raises:
        MismatchError: The target does not fit, whatever other ranks have.
    """
    if match.agrees:
        return None
    if request.strict != "raise":  # another rank may be strict about what no target has
        return MismatchError(path, (), match.unexpected, ())
    hint = hint_for(match, request.into, manifest, request.rank)
    error = MismatchError(path, match.missing, match.unexpected, match.mismatched, hint)
    if not (match.missing or match.mismatched or request.num_ranks == 1):
        return error
    try:
        raise error
    finally:
        del error  # it refers to this frame: no reference cycle


def _settled(match: Match, path: str, request: LoadRequest, notes: list[str]) -> Sequence[Fill]:
    """Give the fills of which no two disagree on the same memory; notes what that leaves out."""
    num_notes = len(notes)
    notes += match.doubles
    fills = settle_overlaps(match.fills, notes)
    if request.strict != "report":  # whoever gets no report has to hear of it, too
        for note in notes[num_notes:]:
            _log.warning("%s: %s", path, note)
    return fills


def _tell_of_meta(
    manifest: Manifest, path: str, request: LoadRequest, notes: list[str], start: int
) -> None:
    """Say of what a module cannot be used without, also where nobody gets the report.

    Args:
        manifest: The checkpoint's.
        path: Where it is.
        request: What was asked for.
        notes: Of the report; those of what was not selected are corrected.
        start: The first of them that may be about such a thing.
    """
    names = []
    known: set[str] = set()
    if request.keep is not None and len(notes) > start:  # it is asked about what is there alone
        known = {fqn for fqn, _ in walk("", read_tree(manifest, request.rank))}
    for number, note in enumerate(notes[start:], start):
        name = note.removesuffix(STAYS_META)
        if name == note:
            continue
        if request.keep is not None and name in known and not request.keep(name):
            notes[number] = f"{name}: stays on the meta device; it was not selected"
        else:
            names.append(name)
    if names and request.strict != "report":
        words = "%s has nothing that fits what stays on the meta device (%s): make that anew"
        _log.warning(words, path, some_of(names))


def _names(fills: Iterable[Fill]) -> set[str]:
    return {fill.name for fill in fills}


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
            made = allocate(entry, device=kind.device, dtype=kind.dtype, order=kind.order)
            tensors[index] = made
            is_plain = (made.is_cpu or made.is_cuda) and made.is_contiguous()
            if made.dtype is not stored or not is_plain:  # on another maker's device, say
                return Destination(made, stored)
            start, device = made.data_ptr(), made.device if made.is_cuda else None
            return Destination(made, stored, (start, start + made.nbytes), device)

        restoration.makers.append(make)
        restoration.needs.append(Need(entry, len(restoration.makers) - 1))


def _fill(
    manifest: Manifest,
    fill: Fill,
    restoration: Restoration,
    late: list[Callable[[], None]],
    bases: dict[int, torch.Tensor | None],
) -> None:
    """Want the bytes of one tensor of the target.

    Args:
        manifest: What they are taken from.
        fill: The tensor.
        restoration: Takes destinations and ranges.
        late: Takes what is copied once everything is there.
        bases: Takes what it is copied from, by index: one of each, however many views there are.
    """
    index, tensor, node, block = fill.stored, fill.tensor, fill.view, fill.block
    entry = manifest.tensors[index]
    stored = torch_dtype(entry.dtype)
    destination = len(restoration.makers)
    if node is None and block is None and isinstance(tensor, torch.Tensor):
        filled = Destination(tensor, stored, fill.span, fill.device, fill.storage)
        restoration.makers.append(filled)
        restoration.needs.append(Need(entry, destination))
        return
    if node is None:
        region = None if block is None else block.box
        restoration.makers.append(lambda: Destination(fill.memory(), stored))
        restoration.needs.append(Need(entry, destination, region=region))
        return
    shape = tuple(node["s"])
    is_plain = list(row_major_strides(shape)) == node["r"]
    if is_plain and block is None and not node.get("conj") and not node.get("neg"):
        dtype = torch_dtype(node["d"])
        restoration.makers.append(lambda: Destination(fill.memory(), dtype))
        first, count = node["o"], nbytes_of(shape, node["d"])
        restoration.needs.append(Need(entry, destination, (first, first + count)))
        return

    # a strided view, or a block of a view: its base is read beside it, and copied from
    # when everything is there
    def copy() -> None:
        base = bases[index]
        assert base is not None  # noqa: S101  # it was made before anything landed
        fill.copy_from(base)

    late.append(copy)
    if index in bases:
        return
    bases[index] = None

    def make() -> Destination:
        base = bases[index] = allocate(entry)
        return Destination(base, stored)

    restoration.makers.append(make)
    restoration.needs.append(Need(entry, destination))
