"""What a training process did, as told by it, and what two of them must agree on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A save that was committed, by the engine's figures.

    Attributes:
        step: The step it is of.
        nbytes: Bytes of its data files.
        staged_s: Seconds from the call until the state could change.
        committed_s: Seconds from the call until the commit.
    """

    step: int
    nbytes: int
    staged_s: float
    committed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """The moment of a process's death.

    Attributes:
        step: The step whose save was under way.
        written_nbytes: Bytes of it that were written.
        nbytes: Bytes it would have had.
        phase: What the trainer was doing.
    """

    step: int
    written_nbytes: int
    nbytes: int
    phase: str


@dataclass(slots=True)
class Outcome:
    """What one process told, line by line.

    Attributes:
        losses: The whole curve, as `float.hex`; empty if the process did not end.
        digests: SHA-256 of all parameters and of the optimizer's moments at the end.
        num_parameters: Of the model.
        saves: Saves committed.
        stalls_s: Seconds the trainer stood still, for each of its saves.
        alone_s: Seconds of forward and backward of steps with no save under way.
        beside_s: The same of steps that began while a save was under way.
        killed: Its death, if that was planned.
        skipped: Steps whose directories were found without a checkpoint at the start.
        resumed: The step it went on from.
        removed: Files of killed saves that its own saves removed, by step.
        direct_io_refused: Why the file system took no direct I/O; empty if it did.
    """

    losses: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    num_parameters: int = 0
    saves: list[Saved] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)
    killed: Killed | None = None
    skipped: list[int] = field(default_factory=list)
    resumed: int | None = None
    removed: dict[int, list[str]] = field(default_factory=dict)
    direct_io_refused: str = ""

    def take(self, kind: str, facts: dict[str, Any]) -> None:
        """Take one line of a diary."""
        match kind:
            case "computed":
                times = self.beside_s if facts["beside_save"] else self.alone_s
                times.append(facts["elapsed_s"])
            case "saved":
                self.saves.append(Saved(**facts))
            case "killed":
                self.killed = Killed(**facts)
            case "skipped":
                self.skipped.append(facts["step"])
            case "resumed":
                self.resumed = facts["step"]
            case "leftovers":
                self.removed.setdefault(facts["step"], []).extend(facts["files"])
            case "direct_io_refused":
                self.direct_io_refused = facts["reason"]
            case "result":
                self.losses = facts["losses"]
                self.digests = facts["digests"]
                self.num_parameters = facts["num_parameters"]
                self.stalls_s = list(facts["stalls_s"].values())


def differences(reference: Outcome, resumed: Outcome) -> list[str]:
    """Say in what a resumed run differs from one that was never interrupted.

    Losses are compared as bits, not as numbers: what differs in the last place differs.

    Returns:
        One line for each difference; none if the runs ended alike.
    """
    found = []
    if not reference.losses:
        found.append("there is no curve to compare with")
    if len(reference.losses) != len(resumed.losses):
        found.append(f"the curves have {len(reference.losses)} and {len(resumed.losses)} losses")
    pairs = zip(reference.losses, resumed.losses, strict=False)
    for step, (want, have) in enumerate(pairs, start=1):
        if want != have:
            found.append(f"the curves part at step {step}: loss {want} and {have}")
            break
    for name in sorted({"parameters", *reference.digests, *resumed.digests}):
        want, have = (o.digests.get(name, "none") for o in (reference, resumed))
        if want != have or want == "none":
            found.append(f"the {name} differ: SHA-256 {want[:16]} and {have[:16]}")
    return found
