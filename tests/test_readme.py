"""The README and the pages that it leads to: their code runs, their tables and links are right."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).parent.parent
README = TOP / "README.md"
#: Pages with code, and how many blocks of Python each has at least.
PAGES = {
    "README.md": 8,
    "ckptio/adapters/README.md": 3,
    "ckptio/checkpointer/README.md": 5,
    "ckptio/ranks/README.md": 2,
    "ckptio/state/README.md": 7,
    "ckptio/storage/README.md": 2,
}
#: Pages with tables of figures.
TABLES = (README, TOP / "bench" / "README.md")
#: Commands of the tour, as modules: their scripts need not be on the path.
MODULES = {"ckptio": "ckptio", "torchrun": "torch.distributed.run"}

RESULTS = TOP / "bench" / "results"
#: Rows of the README's tables: each pair of cells after the name is ckptio's figure and the
#: best peer's, divided by it. A case, a part of its group's title, and a metric.
FIGURES = {
    "durable save, 3.4 GB, GPT and optimizer": [("save_local", "durable", "elapsed_s")],
    "the same, nothing synced": [("save_local", "nothing synced", "elapsed_s")],
    "durable save, two tensors, 3.0 GB": [("one_huge", "", "elapsed_s")],
    "durable save, 20,000 small tensors": [("many_small", "save", "elapsed_s")],
    "warm load of them, in place": [("many_small", "tensors, warm", "elapsed_s")],
    "cold load, 3.4 GB, in place": [("load_cold", "", "elapsed_s")],
    "warm load, 1.7 GB, in place": [("load_warm", "", "elapsed_s")],
    "async save, 2.4 GB: stall": [("stall", "", "stall_s")],
    "async save, 2.4 GB: until durable": [("stall", "", "commit_s")],
    "lag of the trainer's loop, 1 GiB saved and loaded, p99": [("loop_lag", "", "p99_s")],
    "training time lost to one save of 2 GB": [("train_slowdown", "", "lost_s")],
    "H200: durable save, 1.7 GB": [("cuda_save", "", "elapsed_s")],
    "H200: cold load, 1.7 GB, in place": [("cuda_load", "cold", "elapsed_s")],
    "H200: warm load, 1.7 GB, in place": [("cuda_load", "warm", "elapsed_s")],
    **{
        f"H200: async save, {state}: {moment}": [("cuda_stall", title, metric)]
        for state, title in (("1.7 GB", "state a"), ("20,000 small", "state b"))
        for moment, metric in (
            ("the call", "call_s"),
            ("may change", "change_s"),
            ("until durable", "commit_s"),
        )
    },
    "Xeon: durable save, 3.4 GB": [("slower/save_local", "durable", "elapsed_s")],
    "Xeon: the same, nothing synced": [("slower/save_local", "nothing synced", "elapsed_s")],
    "Xeon: durable save, 1.7 GB, over a checkpoint": [("slower/save_over", "", "elapsed_s")],
    "Xeon: the same, until the old one's room is free": [("slower/save_over", "", "free_s")],
    "Xeon: durable save, 20,000 small tensors": [("slower/many_small", "save", "elapsed_s")],
    "Xeon: cold load of them, in place": [("slower/many_small", "tensors, cold", "elapsed_s")],
    "Xeon: warm load of them, in place": [("slower/many_small", "tensors, warm", "elapsed_s")],
    "Xeon: cold load, 3.4 GB, in place": [("slower/load_cold", "", "elapsed_s")],
    "Xeon: warm load, 1.7 GB, in place": [("slower/load_warm", "", "elapsed_s")],
    "Xeon: async save, 2.4 GB: stall": [("slower/stall", "", "stall_s")],
    "Xeon: async save, 2.4 GB: until durable": [("slower/stall", "", "commit_s")],
    "Xeon: lag of the trainer's loop, p99": [("slower/loop_lag", "", "p99_s")],
    "Xeon: durable save, two tensors, 3.0 GB": [("slower/one_huge", "", "elapsed_s")],
    "Xeon: training time lost to one save of 2 GB": [("slower/train_slowdown", "", "lost_s")],
    "Xeon: save to S3, 520 MB": [("slower/save_s3", "", "elapsed_s")],
    "Xeon: load of 1.7 GB right after a save": [("slower/load_back", "", "elapsed_s")],
    "save": [("save_s3", "", "elapsed_s")],
    "save: CPU of the client, a GiB": [("save_s3", "", "cpu_s_per_gib")],
    "save: lag of the trainer's loop, p99": [("save_s3", "", "p99_s")],
    "load": [("load_s3", "", "elapsed_s")],
    "load: lag of the trainer's loop, p99": [("load_s3", "", "p99_s")],
    "load of four tensors of 4 MiB": [("partial_s3", "", "elapsed_s")],
    **{
        machine + name: [(directory + case, title.format(n), "elapsed_s") for n in (2, 4)]
        for machine, directory in (("", ""), ("Xeon: ", "slower/"))
        for name, case, title in (
            ("durable save", "save_ranks", "by {} ranks"),
            ("cold load, same layout", "load_ranks", "cold load by {} ranks"),
            ("warm load, same layout", "load_ranks", "warm load by {} ranks"),
            ("rows loaded as columns, cold", "reshard", "columns of {}, cold"),
            ("rows loaded as columns, warm", "reshard", "columns of {}, warm"),
            ("saved by the other number of ranks, cold", "reshard", "rows of {}, cold"),
            (
                "all of it on every rank, cold",
                "replicated_load",
                "cold load of everything by each of {}",
            ),
            (
                "all of it on every rank, warm",
                "replicated_load",
                "warm load of everything by each of {}",
            ),
        )
    },
}


#: What the further cells of a row are of, in their order: a part of a subject's name, or several
#: of which the first counts that was measured.
_ON_S3FS = "FsspecWriter on s3fs (1 thread)"
_DCP_DEFAULT = (("dcp.save (1 thread, default crc32)",), ("limit: direct write",))
_DCP_STAGED = (
    "stager new, 1 thread, default crc32",
    "stager reused, 1 thread, default crc32",
)
BESIDE: dict[str, tuple[tuple[str, ...], ...]] = {
    "durable save, 3.4 GB, GPT and optimizer": _DCP_DEFAULT,
    "the same, nothing synced": (("dcp.save (1 thread",),),
    "durable save, two tensors, 3.0 GB": _DCP_DEFAULT,
    "durable save, 20,000 small tensors": _DCP_DEFAULT,
    "warm load of them, in place": (("dcp.load",), ("limit: sum and copy",)),
    "cold load, 3.4 GB, in place": (("dcp.load",), ("limit: direct read",)),
    "warm load, 1.7 GB, in place": (("dcp.load",), ("limit: sum and copy",)),
    "async save, 2.4 GB: stall": (_DCP_STAGED, ("limit: memmove into touched memory x 2",)),
    "async save, 2.4 GB: until durable": (_DCP_STAGED, ("limit: direct write",)),
    "lag of the trainer's loop, 1 GiB saved and loaded, p99": (
        ("dcp.save, dcp.load in to_thread",),
        ("dcp.async_save; dcp.load",),
    ),
    "training time lost to one save of 2 GB": (("1 thread, default crc32",),),
    "Xeon: durable save, 3.4 GB": _DCP_DEFAULT,
    "Xeon: the same, nothing synced": (("dcp.save (1 thread",),),
    "Xeon: durable save, 1.7 GB, over a checkpoint": (("dcp.save (1 thread",),),
    "Xeon: the same, until the old one's room is free": (("dcp.save (1 thread",),),
    "Xeon: durable save, 20,000 small tensors": _DCP_DEFAULT,
    "Xeon: cold load of them, in place": (("dcp.load",), ("limit: direct read",)),
    "Xeon: warm load of them, in place": (("dcp.load",), ("limit: sum and copy",)),
    "Xeon: cold load, 3.4 GB, in place": (("dcp.load",), ("limit: direct read",)),
    "Xeon: warm load, 1.7 GB, in place": (("dcp.load",), ("limit: sum and copy",)),
    "Xeon: async save, 2.4 GB: stall": (_DCP_STAGED, ("limit: memmove into touched memory x 2",)),
    "Xeon: async save, 2.4 GB: until durable": (_DCP_STAGED, ("limit: direct write",)),
    "Xeon: lag of the trainer's loop, p99": (
        ("dcp.save, dcp.load in to_thread",),
        ("dcp.async_save; dcp.load",),
    ),
    "Xeon: durable save, two tensors, 3.0 GB": _DCP_DEFAULT,
    "Xeon: training time lost to one save of 2 GB": (("1 thread, default crc32",),),
    "Xeon: save to S3, 520 MB": ((_ON_S3FS,), ("limit: PUT of 16 MiB x 8",)),
    "Xeon: load of 1.7 GB right after a save": (("dcp.load",),),
    "H200: durable save, 1.7 GB": (("dcp.save (1 thread",), ("limit: direct write",)),
    "H200: cold load, 1.7 GB, in place": (("dcp.load",), ("limit: direct read",)),
    "H200: warm load, 1.7 GB, in place": (("dcp.load",), ("limit: sum and copy",)),
    "H200: async save, 1.7 GB: the call": (("stager new",),),
    "H200: async save, 1.7 GB: may change": (("stager new",), ("limit: one copy into pinned",)),
    "H200: async save, 1.7 GB: until durable": (("stager new",), ("limit: direct write",)),
    "H200: async save, 20,000 small: the call": (("stager new",),),
    "H200: async save, 20,000 small: may change": (("stager new",), ("limit: copy_ of every",)),
    "H200: async save, 20,000 small: until durable": (("stager new",), ("limit: direct write",)),
    "save": ((_ON_S3FS,), ("limit: PUT of 16 MiB x 8",)),
    "save: CPU of the client, a GiB": ((_ON_S3FS,), ("limit: PUT of 16 MiB x 8",)),
    "save: lag of the trainer's loop, p99": ((_ON_S3FS,),),
    "load": ((_ON_S3FS,), ("limit: GET of 16 MiB x 8",)),
    "load: lag of the trainer's loop, p99": ((_ON_S3FS,),),
    "load of four tensors of 4 MiB": ((_ON_S3FS,),),
}
#: Cells with two figures of one row: of the first time, and of the next.
OPENED = "open 65,536 chunks; again, unchanged"

#: Rows of the table of other peers: a part of the group's title, and a metric.
OTHERS = {
    "durable save of 1.7 GB": ("save of half of state a", "elapsed_s"),
    "durable save of 10,000 small tensors": ("save of half of state b", "elapsed_s"),
    "cold load of 1.7 GB": ("cold", "elapsed_s"),
    "warm load of 1.7 GB": ("warm", "elapsed_s"),
    "async save of 1.7 GB: stall": ("async", "stall_s"),
    "async save of 1.7 GB: until durable": ("async", "commit_s"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is")  # one process is meant
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block, in order: Python in one namespace, scripts by their commands."""
    monkeypatch.chdir(tmp_path)
    text = (TOP / page).read_text()
    if page == README.name:
        text = text.partition("## Tour")[2].partition("## What to rely on")[0]
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert [language for language, _ in blocks].count("python") >= PAGES[page]
    module = types.ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)
    for language, block in blocks:
        if language == "sh":
            for line in block.splitlines():
                run_command(line)
        elif script := re.match(r"# (\w+\.py)\n", block):
            Path(script[1]).write_text(block)
        else:
            code = compile(block, page, "exec", dont_inherit=True)
            exec(code, module.__dict__)  # noqa: S102  # our own page


def test_links_lead_somewhere() -> None:
    """To files of the repository and to headings in them; and the README leads to every page."""
    pages = [TOP / page for page in (*PAGES, "bench/README.md", "ckptio/format/README.md")]
    found = set()
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if "://" in target:
                continue
            name, _, heading = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            assert path.exists(), (page, target)
            assert not heading or heading in anchors(path), (page, target)
            found |= {path} if page == README else set()
    assert found >= set(pages) - {README}


def anchors(page: Path) -> set[str]:
    """Give the names by which the headings of a page are linked to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def row_of(name: str) -> str:
    """Find the row of a table that has a name: in one page, once."""
    found = [
        row
        for page in TABLES
        for row in re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", page.read_text(), re.MULTILINE)
    ]
    (row,) = found
    return str(row)


def run_command(line: str) -> None:
    """Run a line of a shell block, in the directory of the tour; it must succeed."""
    command, *arguments = shlex.split(line, comments=True)
    ended = subprocess.run(
        [sys.executable, "-m", MODULES[command], *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"


def test_the_test_command_is_what_ci_runs() -> None:
    """CI runs the command that the README gives."""
    command = "python -m pip install nox && nox -s tests"
    assert command in README.read_text()
    assert command in (TOP / ".ci" / "run").read_text()


@pytest.mark.parametrize("name", FIGURES)
def test_the_tables_say_what_was_measured(name: str) -> None:
    """To the last digit; and bold is what ckptio does not lead in."""
    cells = row_of(name).split(" | ")
    for i, (case, title, metric) in enumerate(FIGURES[name]):
        own, best = measured(case, title, metric)
        shown, peer = cells[2 * i : 2 * i + 2]
        figure, unit = shown.split()
        assert rounds_to(own * {"s": 1, "ms": 1000}[unit], figure), (own, shown)
        found = re.match(r"(\*\*)?([0-9.]+)", peer)
        assert found is not None
        assert rounds_to(best, found[2]), (best, peer)
        assert (found[1] is not None) is (best < 1)


@pytest.mark.parametrize("name", BESIDE)
def test_the_tables_say_what_was_measured_of_dcp_and_of_the_machine(name: str) -> None:
    """Each figure beside the best peer's, of the least that has its name."""
    ((case, title, metric),) = FIGURES[name]
    _, _, *cells = row_of(name).split(" | ")
    shown = re.findall(r"(\*\*)?([0-9.]+)\N{MULTIPLICATION SIGN}", " ".join(cells))
    for (bold, figure), parts in zip(shown, BESIDE[name], strict=True):
        ratio = ratio_of(parts, case, title, metric)
        assert rounds_to(ratio, figure), (parts, ratio, figure)
        assert bool(bold) is (ratio < 1 and not parts[0].startswith("limit")), (parts, ratio)


def test_the_quiet_loop_is_as_late_as_was_measured() -> None:
    """What the loop's row has in milliseconds."""
    name = "lag of the trainer's loop, 1 GiB saved and loaded, p99"
    ((case, title, metric),) = FIGURES[name]
    own, _ = measured(case, title, metric)
    found = re.search(r"([0-9.]+) ms \(quiet\)", row_of(name))
    assert found is not None
    assert rounds_to(ratio_of(("quiet loop",), case, title, metric) * own * 1000, found[1])


def test_the_row_of_openings_says_what_was_measured() -> None:
    """Of ckptio, of safetensors and of DCP, the first time and again."""
    cells = [re.findall(r"[0-9.,]+", cell) for cell in row_of(OPENED).split(" | ")[:3]]
    for i, (metric, unit) in enumerate((("open_s", 1), ("again_s", 1000))):
        own, *ratios = all_measured("manifest_open", "", metric)
        for value, figures in zip((own * unit, *ratios), cells, strict=True):
            figure = figures[i].replace(",", "")
            tens = 10 if "," in figures[i] else 1  # thousands are shown to the last ten
            assert rounds_to(value / tens, f"{float(figure) / tens:g}"), (metric, value, figures)


def test_what_dcp_takes_without_sums_is_what_was_measured() -> None:
    """In the sentence above the table."""
    text = " ".join(README.read_text().split())
    times = r"([0-9.]+)\S"
    sentence = (
        rf"{times} for the first row and {times} for the third \(with two threads {times} and"
    )
    found = re.search(rf"{sentence} {times}\)", text)
    assert found is not None
    rows = ("durable save, 3.4 GB, GPT and optimizer", "durable save, two tensors, 3.0 GB")
    figures = iter(found.groups())
    for how in ("dcp.save (1 thread, crc32 off)", "dcp.save (2 threads, crc32 off)"):
        for name in rows:
            figure, ratio = next(figures), ratio_of((how,), *FIGURES[name][0])
            assert rounds_to(ratio, figure), (name, how, ratio, figure)


def test_what_a_load_right_after_a_save_takes_is_what_was_measured() -> None:
    """In the list of where ckptio does not lead."""
    text = " ".join(README.read_text().split())
    found = re.search(r"1\.7 GB took ([0-9.]+) s, and safetensors ([0-9.]+)\S of that", text)
    assert found is not None
    for value, figure in zip(measured("load_back", "", "elapsed_s"), found.groups(), strict=True):
        assert rounds_to(value, figure), (value, figure)


def test_what_the_page_cache_brings_is_what_was_measured() -> None:
    """In the same list: without a sync, in a load that follows, and with a sync."""
    text = " ".join(README.read_text().split())
    cases = (
        (r"safetensors took ([0-9.]+)\S of its time", ("safetensors",), "save_local", "nothing"),
        (r"as well, and took ([0-9.]+)", ('direct_io="off"',), "save_local", "nothing synced"),
        (r"too, and the load took ([0-9.]+)", ('direct_io="off"',), "load_back", ""),
        (r"3.4 GB then took ([0-9.]+)", ('direct_io="off"',), "save_local", "durable"),
    )
    for pattern, parts, case, title in cases:
        found = re.search(pattern, text)
        assert found is not None, pattern
        assert rounds_to(ratio_of(parts, case, title, "elapsed_s"), found[1]), (pattern, found[1])


@pytest.mark.parametrize("name", OTHERS)
def test_the_table_of_others_says_what_was_measured(name: str) -> None:
    """Of each peer that does it, in one order."""
    shown, *cells = (cell.strip() for cell in row_of(name).split("|"))
    title, metric = OTHERS[name]
    (own, *ratios) = all_measured("other_peers", title, metric)
    assert rounds_to(own, shown.removesuffix(" s")), (own, shown)
    for ratio, cell in zip(ratios, filter(None, cells), strict=True):
        assert rounds_to(ratio, cell.removesuffix("\N{MULTIPLICATION SIGN}")), (ratio, cell)


def all_measured(case: str, title: str, metric: str) -> list[float]:
    """Give ckptio's figure, and those of its peers divided by it."""
    groups = json.loads((RESULTS / f"{case}.json").read_text())["groups"]
    group = next(group for group in groups if title in group["title"])
    found: list[dict[str, Any]] = [s for s in group["subjects"] if metric in s["metrics"]]
    own, *others = (
        subject["metrics"][metric]["median"]
        for kind in ("ckptio", "peer")
        for subject in found
        if subject["kind"] == kind
    )
    return [own, *(other / own for other in others)]


def measured(case: str, title: str, metric: str) -> tuple[float, float]:
    """Give ckptio's figure, and the least of a peer's divided by it."""
    groups = json.loads((RESULTS / f"{case}.json").read_text())["groups"]
    (group,) = (group for group in groups if title in group["title"])
    subjects: list[dict[str, Any]] = [s for s in group["subjects"] if metric in s["metrics"]]
    own = next(s for s in subjects if s["kind"] == "ckptio")["metrics"][metric]["median"]
    peers = [s["metrics"][metric]["median"] for s in subjects if s["kind"] == "peer"]
    return own, min(peers) / own


def ratio_of(parts: tuple[str, ...], case: str, title: str, metric: str) -> float:
    """Give the least figure of subjects with a name, divided by ckptio's."""
    groups = json.loads((RESULTS / f"{case}.json").read_text())["groups"]
    (group,) = (group for group in groups if title in group["title"])
    subjects: list[dict[str, Any]] = [s for s in group["subjects"] if metric in s["metrics"]]
    own = next(s for s in subjects if s["kind"] == "ckptio")["metrics"][metric]["median"]
    for part in parts:
        found = [s["metrics"][metric]["median"] for s in subjects if part in s["name"]]
        if found:
            return float(min(found) / own)
    raise AssertionError(f"nothing named {parts} was measured")


def rounds_to(value: float, text: str) -> bool:
    """Whether a text is a value with fewer digits."""
    _, _, digits = text.partition(".")
    return abs(value - float(text)) <= 0.5001 / float(10 ** len(digits))
