"""Cut the power at points of a recorded disk's log, and look at what is there afterwards.

A disk promises only what was written before a completed flush. So the image after a power
cut has every write up to the last flush before the cut, and a random half of the later
ones; some of those are torn at a sector.
"""

from __future__ import annotations

import collections
import os
import random
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio import sync
from ckptio.errors import CheckpointError, CheckpointNotFoundError
from ckptio.format.manifest import MANIFEST_NAME
from tests.rig import SMALL, assert_tidy, names_in
from tests.stress.lab import FileSystem, mounted
from tests.stress.recorder import HEADER, READY, Kind
from tests.stress.workload import (
    KEEP,
    LATEST,
    RUN,
    Step,
    all_steps,
    decode_step,
    number_of,
    promised,
    state_of,
    step_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_P_KEPT = 0.5
_P_TORN = 0.2
_QUIET_S = 7200.0
_COMMIT_LEN = 16  # records; between the manifest's name and the mark there are about that many
_CUTS_PER_COMMIT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What happened on the disk; `data` are the bytes of a write or of a mark."""

    kind: Kind
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The disk after a power cut, and what had been promised by then."""

    kind: str
    index: int
    image: bytearray
    acknowledged: Sequence[Step]


class Tally(collections.Counter[str]):
    """How many cuts there were, and how checkpoints came through them.

    `lost` were acknowledged, and are absent, broken or older than what was acknowledged;
    `broken` have a manifest and do not load; `wrong` load, and are not what was saved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.findings: list[str] = []

    def find(self, kind: str, cut: Cut, what: str) -> None:
        self[kind] += 1
        self.findings.append(f"{kind}: {what}, power cut after record {cut.index}")

    def __str__(self) -> str:
        kinds = (
            "cuts",
            "acknowledged",
            "lost",
            "not yet acknowledged and whole",
            "broken",
            "wrong",
        )
        return ", ".join(f"{self[kind]} {kind}" for kind in kinds)


def read_log(path: str) -> list[Record]:
    """Read all records of a log."""
    with open(path, "rb") as file:
        data = file.read()
    records, at = [], 0
    while at < len(data):
        kind, offset, nbytes = HEADER.unpack_from(data, at)
        at += HEADER.size
        records.append(Record(kind=Kind(kind), offset=offset, data=data[at : at + nbytes]))
        at += nbytes
    return records


def choose_cuts(records: Sequence[Record], num_cuts: int, seed: int) -> list[int]:
    """Choose records to cut the power after: marks, what comes just before, and any others.

    The first mark says that the disk is ready; everything after it is fair game.
    """
    rng = random.Random(seed)
    marks = [i for i, record in enumerate(records) if record.kind is Kind.MARK]
    commits = [mark - rng.randrange(1, _COMMIT_LEN) for mark in marks[1:] * _CUTS_PER_COMMIT]
    num_others = max(num_cuts - len(marks) - len(commits), 0)
    return sorted(marks + commits + rng.choices(range(marks[0], len(records)), k=num_others))


def cut_power(
    kind: str, records: Sequence[Record], indices: Sequence[int], fs: FileSystem, seed: int
) -> Iterator[Cut]:
    """Give the disk as it may be found after each cut; `indices` ascend."""
    stable = bytearray(fs.disk_nbytes)
    steps: list[Step] = []
    num_stable = num_seen = 0
    rng = random.Random(seed)
    for index in indices:
        for i in range(num_seen, index + 1):
            if records[i].kind is Kind.MARK and records[i].data != READY:
                steps.append(decode_step(records[i].data))
            elif records[i].kind is Kind.FLUSH:
                for record in records[num_stable:i]:
                    _apply(stable, record)
                num_stable = i
        num_seen = index + 1
        image = bytearray(stable)
        for record in records[num_stable:num_seen]:
            if record.kind is Kind.WRITE and rng.random() < _P_KEPT:
                is_torn = rng.random() < _P_TORN
                _apply(image, _torn(record, fs.sector_nbytes, rng) if is_torn else record)
        yield Cut(kind=kind, index=index, image=image, acknowledged=tuple(steps))


def _torn(record: Record, sector_nbytes: int, rng: random.Random) -> Record:
    """Keep only the first or only the last sectors of a write."""
    at = rng.randrange(0, len(record.data) + 1, sector_nbytes)
    if rng.random() < _P_KEPT:
        return Record(kind=record.kind, offset=record.offset, data=record.data[:at])
    return Record(kind=record.kind, offset=record.offset + at, data=record.data[at:])


def _apply(image: bytearray, record: Record) -> None:
    if record.kind is Kind.WRITE:
        image[record.offset : record.offset + len(record.data)] = record.data


def check_cut(cut: Cut, fs: FileSystem, directory: str, tally: Tally, *, goes_on: bool) -> None:
    """Mount what a power cut left, load everything, and count.

    Args:
        cut: The disk, and what had been promised.
        fs: What is on it.
        directory: For the image and the mount point.
        tally: Where counts go.
        goes_on: Also save to the path that was being saved to, as a training run that
            comes back would, and check that this works and clears up.
    """
    image_path = f"{directory}/image"
    mount_point = f"{directory}/replayed"
    os.makedirs(mount_point, exist_ok=True)
    with open(image_path, "wb") as file:
        file.write(cut.image)
    tally["cuts"] += 1
    try:
        with mounted(fs, image_path, mount_point) as root, sync.Engine(SMALL) as engine:
            _check_paths(engine, root, cut, tally)
            if goes_on:
                _go_on(engine, root, cut)
    except subprocess.CalledProcessError as error:
        raise AssertionError(f"cut after record {cut.index}: {error.stderr!r}") from error
    finally:
        os.unlink(image_path)


def _check_paths(engine: sync.Engine, root: str, cut: Cut, tally: Tally) -> None:
    """Load every path that ever was saved to, and whatever else has a manifest."""
    kept = promised(cut.kind, cut.acknowledged)
    tried = {step.path: step.number for step in all_steps(cut.kind)[: len(cut.acknowledged) + 1]}
    known = {step.path: step.number for step in cut.acknowledged}
    for path in sorted(set(tried) | _listed(root)):
        number: int | None = None
        try:
            number = number_of(engine.load(f"{root}/{path}"))
        except CheckpointNotFoundError:
            pass
        except CheckpointError as error:
            tally.find("broken", cut, f"{path}: {error!r}")
        else:
            if number is None or number > tried.get(path, -1):
                tally.find("wrong", cut, f"{path} has content {number}")
        if path in kept:
            tally["acknowledged"] += 1
            if number is None or number < kept[path]:
                tally.find("lost", cut, f"{path} has {number} and should have {kept[path]}")
        if number is not None and number > known.get(path, -1):
            tally["not yet acknowledged and whole"] += 1


def _listed(root: str) -> set[str]:
    """Name every directory with a manifest."""
    walk = os.walk(root)
    return {os.path.relpath(parent, root) for parent, _, names in walk if MANIFEST_NAME in names}


def _go_on(engine: sync.Engine, root: str, cut: Cut) -> None:
    """Save again where the power cut struck, once what it left may be cleared away."""
    steps = all_steps(cut.kind)
    done = len(cut.acknowledged)
    if cut.kind == RUN:
        _run_on(engine, f"{root}/{RUN}", done)
        return
    step = steps[done] if done < len(steps) else Step(path=LATEST, number=len(steps))
    path = f"{root}/{step.path}"
    if os.path.isdir(path):
        _age(path)
    engine.save(state_of(step.number), path, overwrite=True)
    assert number_of(engine.load(path)) == step.number
    assert_tidy(path)


def _run_on(engine: sync.Engine, root: str, number: int) -> None:
    """Go on with a run: what it does not keep goes, and what the power cut has left."""
    os.makedirs(root, exist_ok=True)
    for name in names_in(root):
        _age(f"{root}/{name}")
    with sync.Checkpointer(root, keep=KEEP, engine=engine) as checkpointer:
        newest = checkpointer.latest()
        number = number if newest is None else newest + 1
        checkpointer.save(state_of(number), number)
        steps = checkpointer.steps()
    assert steps[-1] == number
    expected = [os.path.basename(step_of(n).path) for n in steps if n > number - KEEP.num_steps]
    assert names_in(root) == expected, {name: names_in(f"{root}/{name}") for name in names_in(root)}
    assert_tidy(f"{root}/{expected[-1]}")  # beside the one before, what its save left goes with it


def _age(directory: str) -> None:
    """Let hours pass: until then, what another boot left may be a living save elsewhere."""
    then_s = time.time() - _QUIET_S
    for path in (*(f"{directory}/{name}" for name in names_in(directory)), directory):
        os.utime(path, (then_s, then_s))
