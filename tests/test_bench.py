"""The benches run, check what they measure, and write figures for everything beside ckptio."""

from __future__ import annotations

import filecmp
import importlib.metadata
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bench import device
from bench.__main__ import arguments_of, parse
from bench.background import DcpAsync, Underway
from bench.baselines import DcpPeer, TorchPeer, quiet_dcp
from bench.cases import CASES
from bench.cases.cuda import _dcp as dcp_from_device
from bench.cases.cuda import cuda_load, cuda_save, cuda_stall
from bench.cases.scale import fit_line
from bench.cases.stall import _dcp, ckptio_async
from bench.crew import Crew, CrewError
from bench.harness import Bench, Group, Metric, Row, Subject
from bench.planners import Size, measure_dcp, measure_exchange, measure_replicated, measure_save
from bench.report import make_table, write_readme
from bench.rounds import measure_rounds
from bench.states import Proof, blank, gpt_like, huge_tensors, small_tensors, state_nbytes
from bench.subjects import Loads, Saves
from ckptio import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bench.harness import Case
    from bench.states import State

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SCALE = "0.005"
_TIMEOUT_S = 1200
#: What is a difference, and may be lost in the noise.
_BELOW_ZERO = {"lost_s"}
#: Why a subject may have no figures here.
_EXCUSES = (
    "safetensors is not installed",
    "orbax-checkpoint is not installed",
    "runai-model-streamer is not installed",
    "torch_checkpointing is not installed",
    "torchsnapshot is not installed",
    "s3torchconnector",
    "multi-storage-client is not installed",
    "failed: RuntimeError: S3Exception: Client error",  # s3torchconnector's, with Ceph 16
    "direct I/O is refused",
    "files stay in the page cache",
    "DCP's process wants gloo",
    "shared memory has",
    "there is no shared memory",
    # torch 2.11's stager, when it is used again
    *(["failed: KeyError: <class 'type'>"] if torch.__version__.startswith("2.11.") else []),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every case once, small, in a process of its own; give the results."""
    directory = tmp_path_factory.mktemp("bench")
    out = directory / "results"
    arguments = ["--scale", _SCALE, "--rounds", "1", "--dir", str(directory), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert [path.name for path in directory.iterdir()] == ["results"]  # nothing is left behind
    return out


def needs_device(name: str) -> bool:
    """Whether a case has nothing to measure here, and so leaves what is recorded."""
    return name.startswith("cuda_") and not torch.cuda.is_available()


def subjects_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [subject for group in record["groups"] for subject in group["subjects"]]


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_each_case_has_medians_for_ckptio_and_each_peer(results: Path, name: str) -> None:
    """Every subject has figures, or one of a few reasons to have none."""
    if needs_device(name):
        assert not (results / f"{name}.json").exists()
        pytest.skip("needs a CUDA device")
    record = json.loads((results / f"{name}.json").read_text())
    subjects = subjects_of(record)
    assert {"ckptio", "peer"} <= {subject["kind"] for subject in subjects}
    for subject in subjects:
        if subject["missing"]:
            assert subject["missing"].startswith(_EXCUSES), subject
        else:
            assert subject["metrics"], subject["name"]
            metrics = {key: m for key, m in subject["metrics"].items() if key not in _BELOW_ZERO}
            assert all(figure["median"] >= 0 for figure in metrics.values())


def test_the_tables_tell_of_the_machine_but_not_its_names(results: Path) -> None:
    """README.md has every case and the versions, and neither host name nor paths."""
    text = (results / "README.md").read_text()
    for case in CASES:
        assert (f"## {case.name}\n" in text) is not needs_device(case.name)
    assert "torch: " in text
    assert f"s3fs: {importlib.metadata.version('s3fs')}" in text
    assert os.uname().nodename not in text
    assert str(results) not in text


def test_the_recorded_tables_are_those_of_the_recorded_figures(tmp_path: Path) -> None:
    """The overview in the repository was written after the last case was."""
    recorded = os.path.join(_ROOT, "bench", "results")
    shutil.copytree(recorded, tmp_path / "results")
    write_readme([case.name for case in CASES], str(tmp_path / "results"))
    assert not filecmp.dircmp(recorded, tmp_path / "results").diff_files


def test_benches_need_nothing_of_the_command_line() -> None:
    """A machine with a GPU may have torch, and what ckptio itself needs, and no more."""
    code = "import sys; sys.modules.update(rich=None, typer=None); import bench.__main__"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=_ROOT,
        capture_output=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr.decode()


def test_a_record_says_what_was_measured_and_how_often(results: Path) -> None:
    """The versions of the peers, the commit where git knows it, and each figure's rounds."""
    record = json.loads((results / "save_local.json").read_text())
    assert record["peers"]["s3fs"] == importlib.metadata.version("s3fs")
    assert all(figure["n"] == 1 for s in subjects_of(record) for figure in s["metrics"].values())
    assert all(row[-1] == "1" for row in record["groups"][0]["table"]["body"] if row[-1])
    assert set(record["code"]) in ({"commit", "is_dirty"}, set())


def test_ranks_are_charged_with_what_they_read_where_all_is_read(results: Path) -> None:
    """Of a warm load, whose files may be mapped, nothing is said."""
    groups = json.loads((results / "load_ranks.json").read_text())["groups"]
    for group in groups:
        has_read = any("read_ratio" in subject["metrics"] for subject in group["subjects"])
        is_cold = group["title"].startswith("cold")
        assert has_read is (is_cold and not all(s["missing"] for s in group["subjects"]))


@pytest.mark.parametrize("given", [[], ["--rounds=2", "--dir=/d", "--out=o"]])
def test_a_case_in_a_process_of_its_own_has_the_same_options(given: list[str]) -> None:
    """Whatever the command line says holds for each of its cases."""
    options = parse(["stall", "memory", "--scale=0.5", *given])
    alone = parse(arguments_of("memory", options))
    assert alone.cases == ["memory"]
    assert vars(alone) | {"cases": options.cases} == vars(options)


@pytest.mark.parametrize("make", [gpt_like, small_tensors, huge_tensors])
def test_a_proof_tells_a_state_from_a_blank_one(make: Any) -> None:
    """What was not loaded is noticed."""
    state = make(0.003)
    proof = Proof.of(state)
    proof.check(state)
    blank({"last": list(state.values())[-1]})
    with pytest.raises(AssertionError, match="other bytes"):
        proof.check(state)


def test_states_scale_with_their_bytes() -> None:
    """A state has about as many bytes as its scale says."""
    for make, nbytes in ((gpt_like, 3.42e9), (small_tensors, 0.67e9), (huge_tensors, 3.0e9)):
        assert state_nbytes(make(0.02)) == pytest.approx(nbytes * 0.02, rel=0.3)


def make_bench(tmp_path: Path, *, rounds: int, scale: float = 0.01) -> tuple[Bench, list[str]]:
    said: list[str] = []
    bench = Bench(case="c", scale=scale, rounds=rounds, directory=str(tmp_path), say=said.append)
    return bench, said


def counting(name: str, calls: list[str], **options: Any) -> Subject:
    async def run() -> dict[str, float]:
        calls.append(name)
        return {"elapsed_s": float(len(calls))}

    return Subject(name=name, run=run, **options)


async def test_rounds_are_interleaved_and_each_subject_follows_others(tmp_path: Path) -> None:
    """Each warms up, and then is measured once a round, each time after another one."""
    names = "abcdefghi"
    calls: list[str] = []
    bench, said = make_bench(tmp_path, rounds=5)
    await bench.compare("t", [counting(name, calls) for name in names])
    assert len(said) == len(calls) == 6 * len(names)
    for start in range(0, len(calls), len(names)):
        assert sorted(calls[start : start + len(names)]) == list(names)
    assert [len(row.values["elapsed_s"]) for row in bench.groups[0].rows] == [5] * len(names)
    followed = Counter(itertools.pairwise(calls[len(names) - 1 :]))
    assert max(followed.values()) == 1


async def test_subjects_are_measured_in_the_same_order_each_time(tmp_path: Path) -> None:
    """Whoever runs a case again has it as it was."""
    runs = []
    for _ in range(2):
        calls: list[str] = []
        bench, _ = make_bench(tmp_path, rounds=3)
        await bench.compare("t", [counting(name, calls) for name in "abcdef"])
        runs.append(calls)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("rounds", "measured"), [(1, 1), (3, 3), (5, 3), (9, 4)])
async def test_slow_subjects_have_fewer_rounds_but_three(
    tmp_path: Path, rounds: int, measured: int
) -> None:
    """A slow peer warms up as the others do, and does not hold them up for long."""
    calls: list[str] = []
    bench, _ = make_bench(tmp_path, rounds=rounds)
    await bench.compare("t", [counting("a", calls), counting("s", calls, is_slow=True)])
    warmups = int(rounds > 1)
    assert (calls.count("a"), calls.count("s")) == (rounds + warmups, measured + warmups)


async def test_pages_are_recycled_before_each_save(tmp_path: Path) -> None:
    """As many bytes as are saved, before the clock; at the size that is reported."""
    written: list[int] = []
    removed: list[list[str]] = []

    async def run() -> dict[str, float]:
        written.append(written_nbytes())
        removed.append(os.listdir(tmp_path))
        return {"elapsed_s": 1.0}

    bench, _ = make_bench(tmp_path, rounds=1, scale=1.0)
    nbytes = (9 << 20) + 1
    before = written_nbytes()
    await bench.compare("t", [Subject(name="a", run=run)], saved_nbytes=nbytes)
    assert nbytes <= written[0] - before < nbytes + (1 << 20)
    assert removed == [[]]


def written_nbytes() -> int:
    with open("/proc/self/io", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("wchar"))


async def test_a_peer_is_opened_before_the_clock(tmp_path: Path) -> None:
    """For a save and for a load: no figure has an import in it."""
    bench, _ = make_bench(tmp_path, rounds=1)
    state = gpt_like(0.003)
    peer = Imported()
    await bench.compare("save", [Saves(bench, state).peer(peer)])
    assert peer.calls[:2] == ["open", "save"]
    loads = Loads(bench, state, [peer])
    async with Engine() as engine:
        await loads.save(engine)
        peer.calls.clear()
        await bench.compare("load", loads.subjects(engine, is_cold=False))
    assert peer.calls == ["open", "load"]
    assert all(row.values for group in bench.groups for row in group.rows)


@dataclass(frozen=True, kw_only=True)
class Imported(TorchPeer):
    """A peer with something to import, that says what it does when."""

    calls: list[str] = field(default_factory=list)

    def open(self) -> None:
        self.calls.append("open")

    def save(self, state: State, path: str) -> None:
        self.calls.append("save")
        TorchPeer.save(self, state, path)

    def load(self, path: str, into: State) -> None:
        self.calls.append("load")
        TorchPeer.load(self, path, into)


async def test_a_peer_that_fails_has_the_reason_in_its_row(tmp_path: Path) -> None:
    """The figures of the others stand; a failure of ckptio ends the case."""

    async def wrong() -> None:
        raise AssertionError("other bytes")

    calls: list[str] = []
    bench, _ = make_bench(tmp_path, rounds=1)
    subjects = [counting("a", calls), counting("b", calls, check=wrong)]
    await bench.compare("t", subjects)
    rows = bench.groups[0].rows
    assert rows[0].values
    assert rows[1].missing == "failed: AssertionError: other bytes"
    with pytest.raises(AssertionError, match="other bytes"):
        await bench.compare("t", [counting("a", calls, check=wrong, kind="ckptio")])


@pytest.mark.parametrize("case", [cuda_save, cuda_stall, cuda_load], ids=lambda case: case.name)
async def test_cases_for_a_device_measure_and_check(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, for nobody is to see first on a device that they fail."""
    monkeypatch.setattr(device, "the_device", lambda: torch.device("cpu"))
    bench, _ = make_bench(tmp_path, rounds=1)
    with quiet_dcp():
        await case.run(bench)
    rows = [row for group in bench.groups for row in group.rows if row.kind != "limit"]
    assert {row.kind for row in rows} == {"ckptio", "peer"}
    assert all(row.values for row in rows), rows


@dataclass(slots=True, kw_only=True)
class FailingLate(DcpAsync):
    """Has staged, it says, and then fails."""

    def start(self, state: State, path: str) -> Underway:
        del state, path
        staged, written = Future[None](), Future[None]()
        staged.set_result(None)
        written.set_exception(KeyError("its stager's"))
        return Underway(staged=staged, written=written)


@pytest.mark.parametrize("save", [_dcp, dcp_from_device], ids=["stall", "cuda_stall"])
async def test_a_peer_that_fails_behind_its_staging_leaves_the_state_as_it_was(
    save: Callable[[Saves, DcpAsync], Subject], tmp_path: Path
) -> None:
    """Else ckptio would be blamed for what it saves next."""
    bench, _ = make_bench(tmp_path, rounds=2)
    saves = Saves(bench, gpt_like(0.003))
    async with Engine() as engine:
        subjects = [save(saves, FailingLate(peer=DcpPeer())), ckptio_async(saves, engine)]
        await bench.compare("t", subjects)
    failed, ours = bench.groups[0].rows
    assert failed.missing.startswith("failed: KeyError")
    assert len(ours.values["commit_s"]) == 2
    saves.proof.check(saves.state)


def test_ratios_above_one_say_that_ckptio_is_faster() -> None:
    """A peer that takes three times as long has the ratio 3."""
    rows = [
        Row(name="ckptio", kind="ckptio", values={"elapsed_s": [1.0, 2.0, 9.0]}),
        Row(name="peer", kind="peer", values={"elapsed_s": [6.0]}),
        Row(name="gone", kind="peer", missing="not installed"),
    ]
    metric = Metric(key="elapsed_s", label="s", digits=1, has_rate=True)
    group = Group(title="t", metrics=[metric], nbytes=4 * 10**9, note="", rows=rows)
    head, body = make_table(group)
    assert head == ["", "s", "GB/s", "/ ckptio", "n"]
    assert body == [
        ["ckptio", "2.0 (1.0 to 9.0)", "2.00", "1.00", "3"],
        ["peer", "6.0", "0.67", "3.00", "1"],
        ["gone", "not installed", "", "", ""],
    ]


OURS = {"by": "ckptio"}
DCP = {"by": "dcp", "num_threads": 2}


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Give a job of two ranks."""
    with Crew(2) as two:
        yield two


@pytest.mark.parametrize("method", [OURS, DCP], ids=["ckptio", "dcp"])
@pytest.mark.parametrize("layout", ["rows", "columns", "whole"])
def test_a_job_loads_what_it_saved_in_any_layout(
    crew: Crew, tmp_path: Path, method: dict[str, Any], layout: str
) -> None:
    """Times and bytes are those of the ranks; every tensor is checked."""
    path = str(tmp_path / "saved")
    crew.tell("make", scale=0.003, layout="rows")
    saved = crew.tell("save", method=method, path=path)
    crew.tell("check_saved", method=method, path=path, count=3)
    made = crew.tell("make", scale=0.003, layout=layout)
    loaded = crew.tell("load", method=method, path=path)
    crew.tell("check")
    for rank in range(2):
        assert made[rank]["own_nbytes"] <= made[rank]["nbytes"] * (0.6 if layout != "whole" else 1)
        assert saved[rank]["elapsed_s"] > 0
        assert saved[rank]["written_nbytes"] >= made[rank]["nbytes"] * 0.4
        assert loaded[rank]["read_nbytes"] > 0


def test_a_rank_that_fails_says_why_and_the_job_goes_on(crew: Crew, tmp_path: Path) -> None:
    """What was not loaded is noticed; what can be loaded afterwards is."""
    path = str(tmp_path / "saved")
    crew.tell("make", scale=0.003, layout="rows")
    crew.tell("save", method=OURS, path=path)
    with pytest.raises(CrewError, match=r"rank 0: CheckpointNotFoundError.*; rank 1: "):
        crew.tell("load", method=OURS, path=str(tmp_path / "nothing"))
    with pytest.raises(CrewError, match=r"rank 1: AssertionError: .* has other bytes"):
        crew.tell("check")
    crew.tell("load", method=OURS, path=path)
    crew.tell("check")


def test_a_rank_that_dies_ends_the_job() -> None:
    """It is named, and nobody waits for the others."""
    with Crew(2) as two:
        two.processes[1].kill()
        with pytest.raises(CrewError, match="rank 1 died"):
            two.tell("make", scale=0.001, layout="rows")
        with pytest.raises(CrewError, match="the job is gone"):
            two.tell("check")


@pytest.mark.parametrize(
    "measure", [measure_save, measure_exchange, measure_replicated, measure_dcp]
)
def test_planners_of_made_up_jobs_have_figures(measure: Any) -> None:
    """Whole and cut blocks of uneven groups of ranks make a plan."""
    figures = measure(Size(70, 9))
    assert min(figures.values()) >= 0
    assert figures["listing_nbytes"] > 0
    assert figures["answer_nbytes"] > 0


async def test_rounds_of_ranks_in_another_process_have_figures() -> None:
    """All ranks meet, do the same rounds, and leave."""
    figures = await measure_rounds(Size(6, 8))
    assert all(value > 0 for value in figures.values())


def test_what_is_extrapolated_is_a_line() -> None:
    """Points on a line give that line."""
    start, slope = fit_line([1, 4, 9], [5.0, 11.0, 21.0])
    assert start == pytest.approx(3)
    assert slope == pytest.approx(2)
