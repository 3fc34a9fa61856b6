"""One training process: `python -m bench.demo.worker`, started by the driver."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import TYPE_CHECKING

from bench.demo import classic, train
from bench.demo.diary import Diary
from bench.demo.settings import Settings
from bench.demo.trainee import Trainee

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and tell on the standard output; what libraries print goes to stderr."""
    parser = argparse.ArgumentParser(prog="bench.demo.worker", description=main.__doc__)
    parser.add_argument("--form", choices=("async", "classic"), required=True)
    parser.add_argument("--root", required=True, help="directory of the run's checkpoints")
    parser.add_argument("--settings", type=Settings.from_json, required=True, help="as JSON")
    parser.add_argument("--kill", action="store_true", help="die in the save of settings.kill_at")
    parser.add_argument("--without", action="append", default=[], help="leave out on resume")
    args = parser.parse_args(argv)
    settings: Settings = args.settings
    fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    diary = Diary(fd, kill_at=settings.kill_at if args.kill else None)
    trainee = Trainee(settings)
    if args.form == "async":
        asyncio.run(train.train(trainee, settings, args.root, diary, without=args.without))
    else:
        classic.train(trainee, settings, args.root, diary, without=args.without)
    diary.tell(
        "result",
        losses=[loss.hex() for loss in trainee.losses],
        digests=trainee.digests(),
        num_parameters=trainee.num_parameters(),
        stalls_s=diary.stalls_s,
    )


if __name__ == "__main__":
    main()
