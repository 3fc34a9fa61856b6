"""The demo: `python -m bench.demo`.

For each form of the loop, a small GPT is trained on the sources of Python's own standard
library three times: to the end; until it kills itself in the middle of a save; and from
its newest checkpoint to the end again. The two curves and all parameters must be the same
bits. The exit code is 0 if they are and 1 if they are not.

At the default sizes this takes one to two minutes on two cores, and 0.5 GB of disk at a
time below the directory for temporary files (TMPDIR).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bench.demo.driver import DemoError, FormResult, run_form
from bench.demo.report import Screen, make_screen, table_rows
from bench.demo.settings import KiB, Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

_PARTS = ("model", "optimizer", "schedule", "rng", "data")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    settings = _settings(parser, args)
    keep = args.root is not None
    root = Path(args.root if keep else tempfile.mkdtemp(prefix="ckptio-demo-")).absolute()
    if keep and root.exists() and (not root.is_dir() or any(root.iterdir())):
        parser.error(f"--root {args.root!r} must be a new or an empty directory")
    screen = make_screen()
    forms = ("async", "classic") if args.form == "both" else (args.form,)
    try:
        results = [
            run_form(form, root / form, settings, screen, without=args.sabotage, keep=keep)
            for form in forms
        ]
    except DemoError as error:
        screen.close()
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    finally:
        screen.close()
        if not keep:
            shutil.rmtree(root, ignore_errors=True)
    return _conclude(results, screen)


def _conclude(results: Sequence[FormResult], screen: Screen) -> int:
    """Print the table and the verdict; returns the exit code."""
    screen.table("ckptio demo; times are medians (least to most)", table_rows(results))
    failures = [f"{result.form}: {text}" for result in results for text in result.failures]
    first, *others = results
    for other in others:
        same = first.reference.losses == other.reference.losses
        print(f"curves of {first.form} and {other.form} {'equal' if same else 'NOT EQUAL'}")
        if not same:
            failures.append(f"the curves of {first.form} and {other.form} differ")
    for failure in failures:
        print(f"FAILED, {failure}")
    if failures:
        return 1
    print("curves equal: what was killed and resumed ended like what was not, bit for bit")
    return 0


def _parser() -> argparse.ArgumentParser:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--form", choices=("async", "classic", "both"), default="both", help="of the loop")
    add("--root", help="keep checkpoints here; else a temporary directory, removed at the end")
    for name, text in (
        ("steps", "training steps"),
        ("every", "steps between saves"),
        ("layers", "blocks of the model"),
        ("width", "features of a token"),
        ("context", "tokens of a sequence"),
        ("batch", "sequences of a step"),
    ):
        value = getattr(default, name)
        add(f"--{name}", type=_positive, default=value, help=f"{text} (default {value})")
    add("--kill-at", type=_positive, help="step whose save is killed (default: about the middle)")
    add("--slab-kib", type=_positive, default=default.slab_nbytes // KiB, help="KiB of a write")
    add(
        "--sabotage",
        action="append",
        choices=_PARTS,
        default=[],
        help="do not restore this part of the state on resume; the demo then has to fail",
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _settings(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Settings:
    """Make settings of the arguments; ends the process if they leave nothing to show."""
    kill_at = args.kill_at or (args.steps // args.every // 2 + 1) * args.every
    if kill_at % args.every or not args.every < kill_at < args.steps:
        parser.error(
            f"the save of step {kill_at} cannot be killed: saves are at multiples of"
            f" {args.every}, one has to come before it, and a step after it up to {args.steps}"
        )
    settings = Settings(
        steps=args.steps,
        every=args.every,
        kill_at=kill_at,
        layers=args.layers,
        width=args.width,
        context=args.context,
        batch=args.batch,
        slab_nbytes=args.slab_kib * KiB,
    )
    if settings.width % settings.num_heads:
        parser.error(f"--width must be a multiple of {settings.num_heads}")
    try:
        settings.engine_config()
    except ValueError as error:
        parser.error(str(error))
    return settings


if __name__ == "__main__":
    sys.exit(main())
