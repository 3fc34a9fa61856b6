"""The command line of the benches: `python -m bench [CASE ...]`.

Where figures count, each case is a process of its own, which begins with memory in one piece
and without what others have imported and started. Small runs, which only show that all works,
are one process: most of their time would be imports.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from typing import TYPE_CHECKING

from bench.baselines import quiet_dcp
from bench.cases import CASES
from bench.harness import QUIET_SCALE, Bench, Clock
from bench.machine import describe_code, describe_machine, describe_peers
from bench.report import case_record, print_group, write_readme, write_record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.harness import Case

#: What a full run needs on the disk, at scale 1.
_DISK_NBYTES = 20 * 10**9


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases; gives 1 if one failed."""
    options = parse(arguments)
    cases = {case.name: case for case in CASES}
    if options.list:
        for case in CASES:
            print(f"{case.name:16} {case.doc.splitlines()[0]}")
        return 0
    chosen = [cases[name] for name in options.cases] or list(CASES)
    parent = options.dir or _default_directory()
    free = shutil.disk_usage(parent).free
    needed = _DISK_NBYTES * options.scale
    if free < needed:
        told = f"{needed / 1e9:.0f} GB are needed on the disk, {free / 1e9:.0f} are free"
        print(f"{told}; give --dir or --scale", file=sys.stderr)
        return 2
    num_failed = 0
    clock = Clock()
    is_apart = len(chosen) > 1 and options.scale >= QUIET_SCALE
    for case in chosen:
        if is_apart:
            num_failed += not _run_apart(case, options)
            continue
        with tempfile.TemporaryDirectory(prefix="ckptio-bench-", dir=parent) as directory:
            num_failed += not _run(case, options, directory, clock)
    write_readme([case.name for case in CASES], options.out)
    print(f"{len(chosen)} cases in {clock.elapsed_s():.0f} s, {num_failed} failed")
    return 1 if num_failed else 0


def _run(case: Case, options: argparse.Namespace, directory: str, clock: Clock) -> bool:
    """Run a case, print and write its figures; whether it went well."""

    def say(line: str) -> None:
        print(f"[{clock.elapsed_s():6.1f} s] {line}", file=sys.stderr, flush=True)

    bench = Bench(
        case=case.name,
        scale=options.scale,
        rounds=options.rounds or case.rounds,
        directory=directory,
        say=say,
    )
    print(f"\n{case.name}: {case.doc}\n", flush=True)
    try:
        with quiet_dcp():
            asyncio.run(case.run(bench))
    except Exception:  # the other cases have their turn
        traceback.print_exc()
        return False
    for group in bench.groups:
        print_group(group)
    if not any(row.values for group in bench.groups for row in group.rows):
        say(f"{case.name}: nothing was measured, and what is recorded stays")
        return True
    machine = describe_machine(directory)
    record = case_record(case, bench, machine, peers=describe_peers(), code=describe_code())
    write_record(record, options.out)
    return True


def _run_apart(case: Case, options: argparse.Namespace) -> bool:
    """Do the same in a process of its own."""
    command = [sys.executable, "-m", "bench", *arguments_of(case.name, options)]
    return subprocess.run(command, check=False).returncode == 0


def arguments_of(name: str, options: argparse.Namespace) -> list[str]:
    """Give the arguments that run one case as `options` say."""
    given = {"--scale": options.scale, "--out": options.out, "--rounds": options.rounds}
    given["--dir"] = options.dir
    return [name, *(f"{option}={value}" for option, value in given.items() if value is not None)]


def _default_directory() -> str:
    """Choose a directory on a disk: /tmp may be in memory, /var/tmp hardly ever is."""
    usual = "/var/tmp"  # noqa: S108  # a directory of our own is made in it
    return usual if os.access(usual, os.W_OK) else tempfile.gettempdir()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(names)}; all")
    parser.add_argument("--rounds", type=int, help="rounds; each case has a number of its own")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the sizes of states")
    parser.add_argument("--dir", help="write checkpoints in a new directory in this one")
    parser.add_argument("--out", default=os.path.join("bench", "results"), help="results go here")
    parser.add_argument("--list", action="store_true", help="list the cases")
    options = parser.parse_args(arguments)
    for name in options.cases:
        if name not in names:
            parser.error(f"there is no case {name!r}; see --list")
    if options.scale <= 0 or (options.rounds is not None and options.rounds < 1):
        parser.error("--scale and --rounds are positive")
    return options


if __name__ == "__main__":
    sys.exit(main())
