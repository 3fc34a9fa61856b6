"""What has to be the same on all ranks, of what is stored as a tensor.

Tensors of one name, shape and type on several ranks are taken for copies, and one of them is
written: nobody reads a whole model once more, and running statistics may differ. But some tensors
are values by which ranks differ, though their names do not: random states, data positions in
bytes or arrays, and moments of an optimizer, which numbers its parameters on each rank of a
pipeline from zero on. So these are marked, in the tree that a rank sends, with what tells them
apart; where marks differ, so do the values, and no checkpoint is made of them.

    bytes, arrays, tensors of uint8 that are no module's    a checksum
    state of an optimizer                                   the parameter's name, and a checksum

Long tensors and arrays are summed up in part. What is on a device is not read: the caller's stream
would have to be waited for.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from ckptio.format.checksum import crc32c
from ckptio.format.encode import TAG
from ckptio.plan.differences import MARK
from ckptio.state.leaves import raw_bytes
from ckptio.state.looks import PLAIN_TENSORS
from ckptio.state.samples import some_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptio.state.looks import Occurrence

#: Longer tensors are summed up in part: values in which a number may differ, and moments, which
#: differ all over, and of which there may be gigabytes.
_MAX_SUMMED_NBYTES, _MAX_MOMENT_NBYTES = 1 << 20, 1 << 12
#: Of an optimizer's parameters so many are looked at: who numbers others has other ones from 0 on.
_NUM_SUMMED = 64


class Alike:
    """Marks tensors of one rank's state.

    Attributes:
        owner: The object whose state is taken apart, if any.
    """

    def __init__(self) -> None:
        self.owner: Any = None
        #: Values, and how many bytes of each are summed up.
        self._values: list[tuple[Occurrence, int]] = []
        #: What was taken of optimizers: the optimizer, its name, and what is there of it.
        self._optimizers: list[tuple[torch.optim.Optimizer, str, list[Occurrence]]] = []

    def note(self, found: Occurrence, *, is_value: bool) -> None:
        """Note a tensor that is no optimizer's, if it is to be the same.

        Args:
            found: The tensor.
            is_value: Whether it was bytes or an array.
        """
        is_state = found.dtype == "uint8" and not isinstance(self.owner, torch.nn.Module)
        if is_value or is_state:
            is_whole = found.node[TAG] in ("bytes", "bytearray")
            self._values.append((found, sys.maxsize if is_whole else _MAX_SUMMED_NBYTES))

    def note_optimizer(self, fqn: str, optimizer: Any, taken: list[Occurrence]) -> None:
        """Note what was taken of an optimizer, by its name."""
        self._optimizers.append((optimizer, fqn, taken))

    def finish(self, held: Iterable[Occurrence]) -> None:
        """Mark what was noted, once all of the state is known, and what of it is tied.

        Not before: a node that says more than its tensor is tied to nothing, and memory that is
        not there is found out then.

        Args:
            held: All tensors of the state.
        """
        for found, longest in self._values:
            if mark := _checksum(found.tensor, longest):
                found.node[MARK] = mark
        if not self._optimizers:
            return
        names: dict[int, str] = {}
        for found in held:
            names.setdefault(_place_of(found.tensor), found.name)
        names.pop(0, None)
        for optimizer, fqn, taken in self._optimizers:
            prefix = f"{fqn}.state." if fqn else "state."
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for found in taken:
                number = found.name.removeprefix(prefix).partition(".")[0]
                index = int(number) if number.isdecimal() else -1
                owner, summed = "", ""
                if 0 <= index < len(parameters):
                    owner = names.get(_place_of(parameters[index]), "")
                if index < _NUM_SUMMED:
                    summed = _checksum(found.tensor, _MAX_MOMENT_NBYTES)
                mark = ", ".join(filter(None, (owner and f"of {owner!r}", summed)))
                if mark:
                    found.node[MARK] = mark


def _place_of(tensor: Any) -> int:
    """Tell where a tensor begins; 0 for one that has no memory of its own."""
    if type(tensor) not in PLAIN_TENSORS:
        return 0
    try:
        return int(tensor.data_ptr()) if tensor.numel() else 0
    except RuntimeError:  # wrapped by a transform of torch.func, or lazy
        return 0


def _checksum(tensor: torch.Tensor, longest: int) -> str:
    """Sum a tensor up, in part above so many bytes; nothing of one that cannot be read at once."""
    if type(tensor) not in PLAIN_TENSORS or not tensor.is_cpu:
        return ""
    if tensor.nbytes > longest:
        return f"crc32c {crc32c(some_of(tensor) or b''):08x}"
    return f"crc32c {crc32c(raw_bytes(tensor).numpy().data):08x}"
