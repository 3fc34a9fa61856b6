"""What has to be the same on all ranks, of what is stored as a tensor.

Tensors of one name, shape and type on several ranks are taken for copies, and one of them is
written: nobody reads a whole model once more, and running statistics may differ. But some tensors
are values by which ranks differ, though their names do not: random states, data positions in
bytes or arrays, and moments of an optimizer, which numbers its parameters on each rank of a
pipeline from zero on. So these are marked, in the tree that a rank sends, with facts about them.
Where ranks know the same of a tensor, and it is not equal, so are their values not, and no
checkpoint is made of them.

    bytes and arrays, tensors of uint8 but for a module's   a checksum
    tensors of an optimizer; of the dict of one those that  a checksum; and the name of the
    it has by numbers, and in its groups                    parameter, where that is saved, too

Long tensors and arrays are summed up in part. What is on a device is not read: the caller's stream
would have to be waited for. Nor are parts of DTensors: trees of ranks would all be different. The
mesh of a DTensor says nothing: where two dimensions cut a model, what one of them leaves whole is
on a mesh of its own in each row, and the same in all.

What modules and optimizers give is told by its form in the tree, too, whoever called
`state_dict()`.
"""

from __future__ import annotations

import itertools
import re
import sys
from typing import TYPE_CHECKING, Any

import torch

from ckptio.format.checksum import crc32c
from ckptio.format.encode import RANKS_TAG, TAG
from ckptio.plan.differences import DICT_TAGS, RECORD_TAGS
from ckptio.plan.marks import MARK
from ckptio.state.held import Held
from ckptio.state.leaves import raw_bytes
from ckptio.state.looks import PLAIN_TENSORS
from ckptio.state.samples import some_of
from ckptio.state.sharded import begin_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptio.format.encode import Json
    from ckptio.state.looks import Occurrence

#: Longer tensors are summed up in part: values in which a number may differ, and moments, which
#: differ all over, and of which there may be gigabytes.
_MAX_SUMMED_NBYTES, _MAX_MOMENT_NBYTES = 1 << 20, 1 << 12
#: Of what an optimizer keeps the first so many parameters' is summed up: whoever numbers others has
#: other ones from the first on.
_NUM_SUMMED = 64
_NUMBER = re.compile(r"[0-9]{1,18}")


class Alike:
    """Marks tensors of one rank's state.

    Attributes:
        owner: The object whose state is taken apart, if any.
    """

    def __init__(self) -> None:
        self.owner: Any = None
        #: Values by their nodes, how many bytes of each are summed up, and whether a module's are.
        self._values: dict[int, tuple[Occurrence, int, bool]] = {}
        #: Parameters of optimizers that are there themselves, by the nodes of their states.
        self._parameters: dict[int, list[Any]] = {}

    def note(self, found: Occurrence, *, is_value: bool) -> None:
        """Note a tensor, if it is to be the same whatever it is in.

        Args:
            found: The tensor.
            is_value: Whether it was bytes or an array.
        """
        is_state = found.dtype == "uint8" and not isinstance(self.owner, torch.nn.Module)
        if is_value or is_state:
            is_whole = found.node[TAG] in ("bytes", "bytearray")
            longest = sys.maxsize if is_whole else _MAX_SUMMED_NBYTES
            self._values[id(found.node)] = found, longest, is_value

    def note_optimizer(self, node: Json, optimizer: torch.optim.Optimizer) -> None:
        """Note whose state a node is."""
        groups = getattr(optimizer, "param_groups", ())  # its class may make none
        self._parameters[id(node)] = [p for group in groups for p in group.get("params", ())]

    def finish(self, tree: Json, plain: Iterable[Occurrence], held: Iterable[Held]) -> None:
        """Mark what is to be the same, once all of the state is known, and what of it is tied.

        Not before: a node that says more than its tensor is tied to nothing, and memory that is
        not there is found out then.

        Args:
            tree: The tree.
            plain: Tensors that are not kept for each rank.
            held: Those that ranks hold in parts.
        """
        tensors: dict[int, Occurrence | Held] = {id(found.node): found for found in plain}
        tensors.update((id(node), one) for one in held for node in one.nodes)
        names: dict[int, str] = {}
        if self._parameters:
            for one in tensors.values():
                parts = one.sharded.local if isinstance(one, Held) else (one.tensor,)
                for part in parts:
                    names.setdefault(begin_of(part), one.name)
        ahead = [(tree, False)]
        while ahead:
            node, is_module = ahead.pop()
            if id(node) in self._values:
                found, longest, is_value = self._values[id(node)]
                if is_value or not is_module:
                    _mark(node, crc32c=_checksum(found.tensor, longest))
            entries = dict(_entries_of(node))
            if ("param_groups" in entries and "state" in entries) or id(node) in self._parameters:
                self._mark_optimizer(node, entries, tensors, names)
            is_module |= type(node) is dict and "m" in node and node.get(TAG) == "odict"
            ahead += [(item, is_module) for item in _containers_in(node)]

    def _mark_optimizer(
        self,
        node: Json,
        entries: dict[Any, Json],
        tensors: dict[int, Occurrence | Held],
        names: dict[int, str],
    ) -> None:
        """Mark the tensors of an optimizer's state.

        Args:
            node: The state.
            entries: What is in it.
            tensors: All tensors, by their nodes.
            names: Of tensors, by where they begin.
        """
        parameters = self._parameters.get(id(node))
        count = itertools.count()
        for key, entry in _entries_of(entries.pop("state", None)):
            number = int(key) if _NUMBER.fullmatch(str(key)) else -1
            if number < 0 and parameters is None:  # by names, which are the same on all ranks
                continue
            is_known = parameters is not None and 0 <= number < len(parameters)
            owner = begin_of(parameters[number]) if parameters and is_known else 0
            name = names.get(owner, "") if owner else ""
            longest = _MAX_MOMENT_NBYTES if next(count) < _NUM_SUMMED else -1
            for item, one in _tensors_below(entry, tensors):
                _mark_tensor(item, one, longest, name)
        for key, entry in entries.items():
            if parameters is not None or key == "param_groups":
                for item, one in _tensors_below(entry, tensors):
                    _mark_tensor(item, one, _MAX_MOMENT_NBYTES)


def _tensors_below(
    node: Json, tensors: dict[int, Occurrence | Held]
) -> Iterator[tuple[dict[str, Any], Occurrence | Held]]:
    """Give the nodes of tensors in a node, and the tensors."""
    ahead = [node]
    while ahead:
        item = ahead.pop()
        ahead += _containers_in(item)
        if (one := tensors.get(id(item))) is not None:
            yield item, one


def _mark_tensor(
    node: dict[str, Any], one: Occurrence | Held, longest: int, name: str = ""
) -> None:
    """Mark a tensor of an optimizer; not summed up if `longest` is negative."""
    summed = "" if longest < 0 or isinstance(one, Held) else _checksum(one.tensor, longest)
    _mark(node, of=name, crc32c=summed)


def _entries_of(node: Json) -> Iterator[tuple[Any, Json]]:
    """Give keys and values of a node that is a dict or a list; nothing of others."""
    if type(node) is list:
        yield from enumerate(node)
    elif type(node) is dict and (TAG not in node or node[TAG] in DICT_TAGS):
        held = node["v"] if TAG in node else node
        for key, item in held.items() if type(held) is dict else held:
            if type(key) in (str, int):
                yield key, item


def _containers_in(node: Json) -> Iterator[Json]:
    """Give what is in a node of the tree, but for plain values and what is kept for each rank."""
    items: Iterable[Json] = ()
    if type(node) is list:
        items = node
    elif type(node) is dict:
        tag = node.get(TAG)
        if TAG not in node:
            items = node.values()
        elif tag in DICT_TAGS or tag in RECORD_TAGS:
            held = node["v"]
            items = held.values() if type(held) is dict else (item for _, item in held)
        elif tag == "tuple":
            items = node["v"]
        elif tag == "enum":
            items = (node["v"],)
    return (
        item
        for item in items
        if type(item) is list or (type(item) is dict and item.get(TAG) != RANKS_TAG)
    )


def _mark(node: dict[str, Any], **facts: str) -> None:
    """Mark a node with what is known of it, and add to what was before."""
    known = {fact: value for fact, value in facts.items() if value}
    if known:
        node[MARK] = {**node.get(MARK, {}), **known}


def _checksum(tensor: torch.Tensor, longest: int) -> str:
    """Sum a tensor up, in part above so many bytes; nothing of one that cannot be read at once."""
    if type(tensor) not in PLAIN_TENSORS or not tensor.is_cpu:
        return ""
    if tensor.nbytes > longest:
        some = some_of(tensor)
        return "" if some is None else f"{crc32c(some):08x}"
    return f"{crc32c(raw_bytes(tensor).numpy().data):08x}"
