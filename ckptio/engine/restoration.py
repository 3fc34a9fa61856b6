"""A load with its decisions made, and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptio._gc import without_collection
from ckptio.staging.copy import Destination

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptio.engine.regions import Need, Place
    from ckptio.errors import MismatchError
    from ckptio.plan.load import Wanted
    from ckptio.state.fills import Match


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load found.

    Attributes:
        path: The checkpoint.
        save_id: The save that wrote it.
        nbytes: Bytes that came to this rank: read, or passed on by another rank.
        num_tensors: Tensors filled or made.
        missing: Names of the target that the checkpoint does not have; left as they were.
        unexpected: Names of the checkpoint that the target does not have; not read.
        mismatched: One line for each name that differs in shape, type or kind; left.
        notes: One line for each value that came back as a plain one, and why; and for what lies
            beside a checkpoint of another program, or is said of it, and is no part of it.
    """

    path: str
    save_id: str
    nbytes: int
    num_tensors: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Restoration:
    """A load with its decisions made.

    Attributes:
        makers: The tensors that take bytes, or what gives each, once; new ones are made only
            then.
        needs: What each takes; `Need.destination` counts `makers`.
        finish: Puts the result together once everything has landed. On the caller's thread.
        has_values: Whether something is loaded that is no tensor.
        num_tensors: Tensors that are filled or made; several `makers` may be parts of one.
        match: How target and checkpoint agree; `None` without a target.
        notes: For the report; `finish` adds some.
        unclaimed: The error of a target that lacks names, where those of other ranks may have
            them: each rank of a pipeline has its own layers. It is raised if none has.
    """

    makers: list[Destination | Callable[[], Destination]] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)
    finish: Callable[[], Any] = lambda: None
    match: Match | None = None
    num_tensors: int = 0
    has_values: bool = False
    notes: list[str] = field(default_factory=list)
    unclaimed: MismatchError | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all is loaded."""
        return not self.num_tensors and not self.has_values

    def files(self, place: Place | None = None) -> list[int]:
        """Give the files that hold what is needed; see `wanted`."""
        chunks = (chunk for need in self.needs for chunk in need.chunks())
        return sorted({chunk.file if place is None else place(chunk)[0] for chunk in chunks})

    @without_collection
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

    @without_collection
    def destinations(self) -> list[Destination]:
        """Make what is new, on the caller's thread, after the sizes of files were checked."""
        return [make if isinstance(make, Destination) else make() for make in self.makers]
