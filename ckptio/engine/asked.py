"""What a caller of `load` asks for, before any of it is checked. Needs no torch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch
    from typing_extensions import TypeVar  # torch needs it; here it is for type checkers alone

    from ckptio.state.select import Select

    #: What `load` returns: the target, if one is given; else nobody knows what is stored. (With
    #: a default (PEP 696), as overloads would say each signature twice more. Those that block
    #: have overloads: checkers forget the default where a function is handed to a thread.)
    T = TypeVar("T", default=Any)

Strict = Literal["raise", "report", "ignore"]


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """The arguments of a load; see `api.Engine.load`. `make_request` checks them.

    Attributes:
        into: The target, or `None`.
        device: Where new tensors go.
        dtype: Element type of floating-point tensors.
        select: Names to load.
        strict: What to do when target and checkpoint disagree.
        types: Classes to build.
        reports: Whether the caller gets a report.
    """

    into: Any
    device: torch.device | str | None
    dtype: torch.dtype | None
    select: Select | None
    strict: str
    types: Collection[type]
    _: KW_ONLY
    reports: bool
