"""What happens to a load, and between ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection  # noqa: TC003  # of a field of an event
from dataclasses import dataclass, field

from ckptio.events.observer import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksAwaited(Event):
    """This rank has been waiting for others for a while, and goes on waiting.

    Some are slower, or never come: `save` and `load` have to be called on every rank.

    Attributes:
        phase: What they have to come to.
        absent: Those that have not come. Only rank 0 knows; it is empty on the others.
        waited_s: Seconds so far.
    """

    phase: str
    absent: tuple[int, ...]
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSubstituted(Event):
    """A file of a checkpoint is lost; everything in it is read from copies in others.

    Attributes:
        file: The lost file.
        error: What is wrong with it.
    """

    file: str
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPassedOver(Event):
    """The first tier, `path`, does not have the checkpoint whole; the second one is read.

    Attributes:
        to: Path or URL of the second tier.
        error: What is wrong with the first.
    """

    to: str
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePlanned(Event):
    """It is decided which rank of a job reads what. Rank 0 says so, for all.

    There is no such event where `exchange` is `"off"`: then each rank reads what it wants, and
    nothing is planned together.

    Attributes:
        is_exchanged: Whether ranks pass on what they read; if not, each reads what it wants.
        read_nbytes: Bytes that each rank reads.
        sent_nbytes: Bytes that go from rank to rank.
        explainer: Does what `explain` does. It keeps the plan in memory, as long as it lives.
    """

    is_exchanged: bool
    read_nbytes: tuple[int, ...]
    sent_nbytes: int
    explainer: Callable[[Collection[str] | None], str] = field(repr=False)

    def explain(self, names: Collection[str] | None = None) -> str:
        """Say which rank reads which bytes of which file, for whom and why, a line each.

        Costs nothing until it is called; then a line for each range of each file.

        Args:
            names: Only what holds bytes of these tensors; everything if not given.
        """
        return self.explainer(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStarted(Event):
    """A load has its plan and begins to read.

    Attributes:
        nbytes: Bytes that are to come to this rank: read, or passed on by another rank.
        num_tensors: Tensors to fill.
        num_files: Files that this rank reads.
    """

    nbytes: int
    num_tensors: int
    num_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadProgressed(Event):
    """A range was read, or passed on by another rank, and its checksums agreed.

    Attributes:
        read_nbytes: Bytes that have come so far, in either way.
        nbytes: Bytes that are to come in all.
    """

    read_nbytes: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFinished(Event):
    """Every wanted tensor is filled.

    Attributes:
        nbytes: Bytes that came to this rank: read, or passed on by another rank.
        elapsed_s: Seconds since `load` was called.
    """

    nbytes: int
    elapsed_s: float
