"""Values that are taken from a checkpoint as they are, and made as early as can be."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from ckptio.errors import TargetError
from ckptio.format.decode import Made

if TYPE_CHECKING:
    from collections.abc import Container

    from ckptio.format.encode import Json
    from ckptio.state.rebuild import Rebuilder


@dataclass(slots=True, eq=False)
class Taken:
    """A value of a target that is taken from the checkpoint; made once, whoever asks first.

    Attributes:
        fqn: Its name.
        node: What is stored; later with all that needs no tensor made.
        own: Classes of the target that may be made.
        holds_tensors: Whether it holds any.
        beside: Keys that it must not have: those of a mapping that it is put into.
    """

    fqn: str
    node: Json
    own: tuple[type, ...]
    _: KW_ONLY
    holds_tensors: bool = False
    beside: Container[object] = ()

    def make_ahead(self, rebuilder: Rebuilder) -> None:
        """Make it, as far as it is made of no tensor: what does not fit is an error here.

        Raises:
            FormatError: It is not what `flatten` makes.
            TargetError: A class does not take it, say; or keys are those that there are.
        """
        if self.holds_tensors:
            self.node = rebuilder.made_ahead(self.fqn, self.node, self.own)
        else:
            self.node = Made(self.value(rebuilder))

    def value(self, rebuilder: Rebuilder) -> Any:
        """Give it, once the tensors that it holds are there."""
        if type(self.node) is Made:
            return self.node.value
        value = rebuilder.rebuild(self.fqn, self.node, self.own)
        if self.beside != () and any(key in self.beside for key in value):
            raise TargetError(
                f"keys of the dict at {self.fqn!r} are equal as plain values to others of the"
                " target; pass their classes in types="
            )
        return value
