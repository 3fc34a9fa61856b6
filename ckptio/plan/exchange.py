"""Decide which rank of a group reads which blocks, and for whom.

Several ranks that want the same bytes need not read them several times: one of them reads
and passes on. A *unit* is a run of blocks of a file that just the same ranks want, at most
a slab long, whatever tensors lie in it, so that small tensors travel together. Who reads a
unit is one of those who want it: the rank whose own file it is, then one on the host that
wrote it, then any, as long as no rank reads much more than others (`plan.readers`).

All units are in one order, in which every rank reads and takes its own. That order, by how
much their readers have read before, keeps readers abreast of each other and is why the
exchange cannot come to a stop (`engine.exchange`).

Pure: the same wants give the same plan in every process.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ckptio.errors import PlanError
from ckptio.plan.load import dense
from ckptio.plan.readers import Kind, limit_for, place_whole, share_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptio.format.manifest import Manifest
    from ckptio.plan.load import Wanted

#: What a rank wants: for each file its index and, in rising order, first and end block
#: (exclusive) of each run, end to end. Plain integers, since it goes over the network.
Runs = tuple[tuple[int, tuple[int, ...]], ...]
#: Ranks, in order, and of each unit that just these want all that `Unit` says before that.
Crew = tuple[tuple[int, ...], list[tuple[int, int, int, int, int]]]
#: What a rank has to know of a plan: the units that it wants, by who else does.
Part = list[Crew]

OWN_FILE = "own file"
SAME_HOST = "same host"
ONLY = "nobody else wants it"
BALANCE = "balance"
NO_NEARER = "nobody nearer wants it"


class Unit(NamedTuple):
    """Bytes that one rank reads, for itself and for others.

    Attributes:
        number: Its place in the order of all units.
        file: Index of the file in the manifest.
        start: First byte in the file; a multiple of the block.
        nbytes: Its size, whole blocks but at the end of the file.
        reader: The rank that reads it.
        wanting: The ranks that want it, in order; the reader is one of them. One object for
            all units of a plan that the same ranks want.
    """

    number: int
    file: int
    start: int
    nbytes: int
    reader: int
    wanting: tuple[int, ...]

    @property
    def takers(self) -> tuple[int, ...]:
        """The other ranks that want it, in order.

        Made when it is asked for: kept, it would be a number for each unit and rank.
        """
        place = self.wanting.index(self.reader)
        return self.wanting[:place] + self.wanting[place + 1 :]


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Who reads what for whom.

    Attributes:
        units: What is read, in the order in which it is read and passed on.
        reasons: Why the reader of each unit reads it.
        num_ranks: Ranks of the group.
    """

    units: tuple[Unit, ...]
    reasons: tuple[str, ...]
    num_ranks: int

    def parts(self) -> list[Part]:
        """Write what each rank has to know, for the network; `decode_part` reads it.

        Ranks are named once for all units that they want, and ranks that want the same units
        get one object, which is encoded once. With its takers beside each unit, what rank 0
        sends grew by the square of the ranks: 4 GB to 1,024 of them that all want 16 GiB.
        """
        crews: dict[int, Crew] = {}
        for unit in self.units:
            crews.setdefault(id(unit.wanting), (unit.wanting, []))[1].append(unit[:5])
        shared_by: list[list[Crew]] = [[] for _ in range(self.num_ranks)]
        for crew in crews.values():
            for rank in crew[0]:
                shared_by[rank].append(crew)
        same: dict[tuple[int, ...], Part] = {}
        return [same.setdefault(tuple(map(id, part)), part) for part in shared_by]

    def read_nbytes(self) -> list[int]:
        """Give the bytes that each rank reads."""
        loads = [0] * self.num_ranks
        for unit in self.units:
            loads[unit.reader] += unit.nbytes
        return loads

    def wanted_nbytes(self) -> list[int]:
        """Give the bytes that each rank wants: what it reads if nothing is passed on."""
        wants = [0] * self.num_ranks
        for unit in self.units:
            for rank in unit.wanting:
                wants[rank] += unit.nbytes
        return wants

    def shared_nbytes(self) -> int:
        """Give the bytes that are read for more than one rank."""
        return sum(unit.nbytes for unit in self.units if len(unit.wanting) > 1)

    def sent_nbytes(self) -> int:
        """Give the bytes that go from rank to rank."""
        return sum(unit.nbytes * (len(unit.wanting) - 1) for unit in self.units)


def block_runs(wanted: Iterable[Wanted], block_nbytes: int) -> Runs:
    """Give the merged runs of blocks that bring what a rank wants; `wanted` is in any order."""
    by_file: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for want in dense(wanted, block_nbytes):
        first, stop = want.start // block_nbytes, -(-want.stop // block_nbytes)
        runs = by_file[want.file]
        if runs and runs[-1][0] <= first <= runs[-1][1]:  # mostly they come in order
            runs[-1] = (runs[-1][0], max(runs[-1][1], stop))
        else:
            runs.append((first, stop))
    found = []
    for file in sorted(by_file):
        bounds: list[int] = []
        for first, stop in sorted(by_file[file]):
            if bounds and first <= bounds[-1]:
                bounds[-1] = max(bounds[-1], stop)
            else:
                bounds += (first, stop)
        found.append((file, tuple(bounds)))
    return tuple(found)


def decode_runs(message: Sequence[Any]) -> Runs:
    """Read runs that came over the network as JSON."""
    return tuple((file, tuple(bounds)) for file, bounds in message)


def decode_part(message: Sequence[Any]) -> tuple[Unit, ...]:
    """Read the units of a rank that came over the network as JSON, in the common order.

    Raises:
        PlanError: They are no part of a plan.
    """
    try:
        part = msgspec.convert(message, Part)
    except msgspec.ValidationError as error:
        raise PlanError(f"rank 0 sent what is no part of a plan: {error}") from None
    units = []
    for wanting, lines in part:
        among = set(wanting)
        for line in lines:
            if min(line) < 0 or line[-1] not in among:
                raise PlanError(f"rank 0 sent {line}, which is no unit for ranks {list(wanting)}")
            units.append(Unit(*line, wanting))
        if sorted(among) != list(wanting):
            raise PlanError(f"rank 0 sent units for ranks {list(wanting)}, which are out of order")
    units.sort()
    for last, unit in itertools.pairwise(units):
        if last.number == unit.number:
            raise PlanError(f"rank 0 sent two units of number {unit.number}")
    return tuple(units)


class _Run(NamedTuple):
    """Blocks `[first, stop)` of a file that just the ranks of a kind want."""

    file: int
    first: int
    stop: int
    kind: Kind


def plan_exchange(
    manifest: Manifest, wants: Sequence[Runs], hosts: Sequence[str], slab_nbytes: int
) -> ExchangePlan:
    """Plan who reads what for whom.

    Args:
        manifest: The checkpoint; with the rank and the host that wrote each file.
        wants: What each rank of the group wants, as `block_runs` gives it.
        hosts: The host of each rank of the group.
        slab_nbytes: The smallest slab of the group; a unit fits in it.

    Raises:
        PlanError: A rank wants blocks that no file has, or `hosts` are not as many as ranks.
    """
    if len(hosts) != len(wants):
        raise PlanError(f"{len(wants)} ranks want something and there are {len(hosts)} hosts")
    block = manifest.block_nbytes
    runs = _runs(manifest, wants, hosts)
    assigned = _assign(manifest, runs, len(wants))
    per_unit = max(1, slab_nbytes // block)
    units: list[tuple[int, int, _Run]] = []
    loads = [0] * len(wants)
    for reader, run in assigned:
        count = -(-(run.stop - run.first) // per_unit)
        edges = [run.first + (run.stop - run.first) * i // count for i in range(count + 1)]
        for first, stop in itertools.pairwise(edges):
            units.append((loads[reader], reader, run._replace(first=first, stop=stop)))
            loads[reader] += stop - first
    units.sort(key=lambda unit: unit[:2])
    numbered = []
    for number, (_, reader, run) in enumerate(units):
        start = run.first * block
        nbytes = min(run.stop * block, manifest.files[run.file].nbytes) - start
        numbered.append(Unit(number, run.file, start, nbytes, reader, run.kind.wanting))
    reasons = tuple(_reason(run.kind, reader) for _, reader, run in units)
    return ExchangePlan(tuple(numbered), reasons, len(wants))


def _runs(manifest: Manifest, wants: Sequence[Runs], hosts: Sequence[str]) -> list[_Run]:
    """Find the runs of blocks that just the same ranks want, by file and first block.

    Ranks are bits of an integer: the set of who wants a block changes by one `xor` at each
    bound, and ranks that want the same of a file, as replicas do, are looked at once.
    """
    by_file: defaultdict[int, defaultdict[tuple[int, ...], int]] = defaultdict(
        lambda: defaultdict(int)
    )
    for rank, want in enumerate(wants):
        for file, bounds in want:
            _check_bounds(manifest, rank, file, bounds)
            by_file[file][bounds] |= 1 << rank
    members: dict[int, tuple[int, ...]] = {}
    runs = []
    for file in sorted(by_file):
        toggles: defaultdict[int, int] = defaultdict(int)
        for bounds, mask in by_file[file].items():
            for bound in bounds:
                toggles[bound] ^= mask
        kinds: dict[int, Kind] = {}
        now = first = 0
        for bound in sorted(toggles):
            if now:
                if now not in kinds:
                    wanting = members.get(now) or members.setdefault(now, _members(now))
                    kinds[now] = _kind(manifest, file, wanting, hosts)
                runs.append(_Run(file, first, bound, kinds[now]))
            first = bound
            now ^= toggles[bound]
    return runs


def _check_bounds(manifest: Manifest, rank: int, file: int, bounds: tuple[int, ...]) -> None:
    """Refuse what cannot be read: it came from another process."""
    if not 0 <= file < len(manifest.files):
        raise PlanError(f"rank {rank} wants blocks of file {file}, which is not in the manifest")
    num_blocks = -(-manifest.files[file].nbytes // manifest.block_nbytes)
    rising = all(a < b for a, b in itertools.pairwise(bounds))
    if not bounds or len(bounds) % 2 or not rising or bounds[0] < 0 or bounds[-1] > num_blocks:
        raise PlanError(
            f"rank {rank} wants blocks that {manifest.files[file].name!r} of {num_blocks} blocks"
            " does not have"
        )


def _members(mask: int) -> tuple[int, ...]:
    """Give the bits that are set."""
    digits = bin(mask)[:1:-1]
    found = []
    rank = digits.find("1")
    while rank >= 0:
        found.append(rank)
        rank = digits.find("1", rank + 1)
    return tuple(found)


def _kind(manifest: Manifest, file: int, wanting: tuple[int, ...], hosts: Sequence[str]) -> Kind:
    """Say who wants blocks of a file, and who of them is near."""
    writer = manifest.files[file].rank
    if not 0 <= writer < len(manifest.hosts):
        return Kind(wanting, -1, ())
    host = manifest.hosts[writer]
    near = tuple(rank for rank in wanting if hosts[rank] == host)
    return Kind(wanting, writer if writer in near else -1, near)


def _assign(manifest: Manifest, runs: Sequence[_Run], num_ranks: int) -> list[tuple[int, _Run]]:
    """Choose a reader for every run, cutting runs where that is needed.

    The short block at the end of a file is not cut and so goes first, by itself; the whole
    blocks, which may be cut anywhere, even out what it leaves.
    """
    block = manifest.block_nbytes
    total = sum(_nbytes(manifest, run) for run in runs)
    limit = limit_for(total, num_ranks)
    loads = [0] * num_ranks
    whole: list[_Run] = []
    tails: list[tuple[int, _Run]] = []
    for run in runs:
        nbytes = _nbytes(manifest, run)
        if len(run.kind.wanting) == 1:
            loads[run.kind.wanting[0]] += nbytes
            whole.append(run)
        elif nbytes % block:
            tails.append((nbytes % block, run._replace(first=run.stop - 1)))
            if run.stop - run.first > 1:
                whole.append(run._replace(stop=run.stop - 1))
        else:
            whole.append(run)
    tails.sort(key=lambda tail: (-tail[0], tail[1].file))
    chosen = [(place_whole(run.kind, nbytes, loads, limit), run) for nbytes, run in tails]
    num_blocks: defaultdict[Kind, int] = defaultdict(int)
    for run in whole:
        if len(run.kind.wanting) > 1:
            num_blocks[run.kind] += run.stop - run.first
    shares = {
        kind: sorted(by_rank.items())
        for kind, by_rank in share_out(num_blocks, loads, limit, block).items()
    }
    for run in whole:
        first = run.first
        left = shares.get(run.kind) or [(run.kind.wanting[0], run.stop - run.first)]
        while first < run.stop:
            rank, count = left[0]
            stop = min(run.stop, first + count)
            chosen.append((rank, run._replace(first=first, stop=stop)))
            count -= stop - first
            left[:1] = [(rank, count)] if count else []
            first = stop
    return _joined(chosen)


def _joined(chosen: Iterable[tuple[int, _Run]]) -> list[tuple[int, _Run]]:
    """Sort runs by place, and join neighbours of one kind that one rank reads."""
    joined: list[tuple[int, _Run]] = []
    for reader, run in sorted(chosen, key=lambda item: item[1][:2]):
        if joined:
            before, last = joined[-1]
            same = (reader, run.file, run.first, run.kind) == (
                before, last.file, last.stop, last.kind,
            )  # fmt: skip
            if same:
                joined[-1] = (reader, last._replace(stop=run.stop))
                continue
        joined.append((reader, run))
    return joined


def _nbytes(manifest: Manifest, run: _Run) -> int:
    block = manifest.block_nbytes
    return min(run.stop * block, manifest.files[run.file].nbytes) - run.first * block


def _reason(kind: Kind, reader: int) -> str:
    """Say why a rank reads what it reads."""
    if reader == kind.own:
        return OWN_FILE
    if len(kind.wanting) == 1:
        return ONLY
    nearest = kind.nearest()
    if reader not in nearest:
        return BALANCE
    return SAME_HOST if kind.near else NO_NEARER
