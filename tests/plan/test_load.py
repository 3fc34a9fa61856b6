from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from ckptio.config import CheckpointConfig, KiB
from ckptio.format.compose import encode_manifest
from ckptio.format.manifest import Manifest, decode_manifest
from ckptio.plan.load import LoadPlan, Wanted, plan_load
from tests.rig import SMALL

BLOCK = 4 * KiB


def manifest_of(sizes: list[int], block: int = BLOCK) -> Manifest:
    """Give a manifest of files whose checksums say which block of which file they are."""
    files = [
        (f"f{i}", nbytes, [1000 * i + j for j in range(-(-nbytes // block))])
        for i, nbytes in enumerate(sizes)
    ]
    data = encode_manifest(
        writer="1", save_id="0" * 32, created="", block_nbytes=block, files=files,
        tensors=b"[]", tree=json.dumps({}).encode(),
    )  # fmt: skip
    return decode_manifest(data)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], list[Wanted]]:
    """Draw files and ranges of them, some of which overlap."""
    sizes = draw(st.lists(st.integers(1, 40 * KiB), min_size=1, max_size=3))
    wanted = []
    for destination in range(draw(st.integers(0, 8))):
        file = draw(st.integers(0, len(sizes) - 1))
        start = draw(st.integers(0, sizes[file] - 1))
        nbytes = draw(st.integers(1, sizes[file] - start))
        want = Wanted(file, start, nbytes, destination, draw(st.integers(0, 100)))
        if draw(st.booleans()):
            nbytes = draw(st.integers(1, min(nbytes, 6 * KiB)))
            step = nbytes + draw(st.sampled_from([0, 1, 100, 2 * BLOCK]))
            rows = draw(st.integers(1, 1 + (sizes[file] - start - nbytes) // step))
            want = want._replace(nbytes=nbytes, rows=min(rows, 50), step=step, stride=nbytes + 3)
        wanted.append(want)
    return sizes, wanted


def bytes_of(want: Wanted) -> dict[int, tuple[int, int]]:
    """Say for each byte that is wanted where it is."""
    return {
        row.offset + i: (row.file, row.start + i) for row in want.each() for i in range(row.nbytes)
    }


configs = st.builds(
    lambda slab: CheckpointConfig(
        block_nbytes=4 * KiB, slab_nbytes=slab * 4 * KiB, pool_nbytes=slab * 32 * KiB
    ),
    st.integers(1, 6),
)


def landings(plan: LoadPlan, block: int = BLOCK) -> dict[int, dict[int, tuple[int, int]]]:
    """Say for each byte of each destination which byte of which file lands there."""
    found: dict[int, dict[int, tuple[int, int]]] = {}
    for segment in plan.segments:
        for index, pieces in enumerate(segment.pieces):
            for first, destination, to, nbytes, rows in pieces:
                count, step, stride = rows or (1, 0, 0)
                assert rows is None or count > 1
                place = found.setdefault(destination, {})
                for row in range(count):
                    position, offset = first + row * step, to + row * stride
                    start = segment.start + index * block + position
                    assert position + nbytes <= block
                    assert start + nbytes <= segment.start + segment.nbytes
                    for i in range(nbytes):
                        assert offset + i not in place
                        place[offset + i] = (segment.file, start + i)
    return found


@given(request=requests(), config=configs, gap=st.sampled_from([0, 4 * KiB, 1 << 20]))
def test_what_is_wanted_lands_and_nothing_else(
    request: tuple[list[int], list[Wanted]], config: CheckpointConfig, gap: int
) -> None:
    """Every wanted byte lands once, in its place, whatever is read over."""
    sizes, wanted = request
    plan = plan_load(manifest_of(sizes), wanted, config, gap_nbytes=gap)
    assert landings(plan) == {want.destination: bytes_of(want) for want in wanted}


@given(request=requests(), config=configs, gap=st.sampled_from([0, 4 * KiB, 1 << 20]))
def test_each_block_is_read_at_most_once(
    request: tuple[list[int], list[Wanted]], config: CheckpointConfig, gap: int
) -> None:
    """In whole blocks with their own checksums, in order, a slab at most at a time."""
    sizes, wanted = request
    plan = plan_load(manifest_of(sizes), wanted, config, gap_nbytes=gap)
    blocks = []
    for segment in plan.segments:
        assert segment.start % BLOCK == 0
        assert 0 < segment.nbytes <= config.slab_nbytes
        at_end = segment.start + segment.nbytes == sizes[segment.file]
        assert segment.nbytes % BLOCK == 0 or at_end
        first = segment.start // BLOCK
        numbers = range(first, first - (-segment.nbytes // BLOCK))
        assert segment.checksums == tuple(1000 * segment.file + i for i in numbers)
        assert len(segment.pieces) == len(segment.checksums)
        blocks += [(segment.file, i) for i in numbers]
    assert blocks == sorted(set(blocks))
    assert plan.files == tuple(sorted({want.file for want in wanted}))


@given(request=requests(), config=configs)
def test_reads_are_as_long_as_what_is_wanted_and_two_blocks(
    request: tuple[list[int], list[Wanted]], config: CheckpointConfig
) -> None:
    """Nothing is read for nothing: at most a block more at either end of each range."""
    sizes, wanted = request
    plan = plan_load(manifest_of(sizes), wanted, config)
    rows = [row for want in wanted for row in want.each()]
    assert plan.nbytes <= sum(row.nbytes + 2 * (BLOCK - 1) for row in rows)
    for segment in plan.segments:
        assert all(segment.pieces)


@given(request=requests(), config=configs)
def test_whole_files_are_read_whole(
    request: tuple[list[int], list[Wanted]], config: CheckpointConfig
) -> None:
    """For a full load every block is read and verified, those of headers too."""
    sizes, wanted = request
    manifest = manifest_of(sizes)
    plan = plan_load(manifest, wanted, config, whole_files=True)
    assert plan.nbytes == sum(sizes)
    assert landings(plan) == landings(plan_load(manifest, wanted, config))


@given(request=requests(), config=configs, data=st.data())
def test_the_order_of_requests_does_not_matter(
    request: tuple[list[int], list[Wanted]], config: CheckpointConfig, data: st.DataObject
) -> None:
    """A plan is a function of what is wanted."""
    sizes, wanted = request
    manifest = manifest_of(sizes)
    shuffled = data.draw(st.permutations(wanted))
    assert plan_load(manifest, shuffled, config) == plan_load(manifest, wanted, config)


def test_a_gap_worth_reading_over_joins_two_reads() -> None:
    """Two ranges a block apart are one read with a gap of a block, two without."""
    manifest = manifest_of([10 * BLOCK])
    wanted = [Wanted(0, 0, 10, 0, 0), Wanted(0, 2 * BLOCK, 10, 1, 0)]
    assert len(plan_load(manifest, wanted, SMALL).segments) == 2
    (segment,) = plan_load(manifest, wanted, SMALL, gap_nbytes=BLOCK).segments
    assert segment.nbytes == 3 * BLOCK
    assert len(plan_load(manifest, wanted, SMALL, gap_nbytes=BLOCK - 1).segments) == 2
    far = [wanted[0], Wanted(0, 3 * BLOCK, 10, 1, 0)]
    assert len(plan_load(manifest, far, SMALL, gap_nbytes=BLOCK).segments) == 2


def test_blocks_between_rows_are_left_out() -> None:
    """And rows that lie closer are one piece of each block."""
    manifest = manifest_of([10 * BLOCK])
    apart = Wanted(0, 0, BLOCK, 0, 0, rows=3, step=2 * BLOCK, stride=BLOCK)
    assert plan_load(manifest, [apart], SMALL).nbytes == 3 * BLOCK
    inside = Wanted(0, 0, 16, 0, 0, rows=BLOCK // 32, step=32, stride=16)
    assert plan_load(manifest, [inside], SMALL).nbytes == BLOCK
    close = Wanted(0, 5, 10, 0, 0, rows=300, step=20, stride=10)
    (segment,) = plan_load(manifest, [close], SMALL).segments
    assert segment.pieces == (
        ((5, 0, 0, 10, (205, 20, 10)),),
        ((9, 0, 2050, 10, (95, 20, 10)),),
    )


def test_a_checkpoint_may_have_other_blocks_than_the_engine() -> None:
    """Blocks are the manifest's; slabs hold as many whole ones as fit, or one."""
    manifest = manifest_of([100_000], block=12 * KiB)
    plan = plan_load(manifest, [Wanted(0, 5, 99_000, 0, 0)], SMALL)
    assert {s.nbytes for s in plan.segments} == {60 * KiB, 100_000 - 60 * KiB}
    assert len(landings(plan, 12 * KiB)[0]) == 99_000
    plan = plan_load(manifest_of([1000 * KiB], block=400 * KiB), [Wanted(0, 0, 5, 0, 0)], SMALL)
    assert [s.nbytes for s in plan.segments] == [400 * KiB]


def test_nothing_wanted_is_nothing_read() -> None:
    """An empty selection opens no file."""
    plan = plan_load(manifest_of([5]), [], SMALL)
    assert plan.segments == ()
    assert plan.files == ()
