"""The commands and their options. What they do is imported when one is run.

Exit codes are part of the interface: a cron job that verifies tells damage (1) from a
wrong path (2). Damage outranks the rest: with several paths, 1 says that at least one is
damaged, whatever the others are.
"""

from __future__ import annotations

from collections.abc import Callable  # noqa: TC003  # typer reads annotations when it runs
from enum import StrEnum
from typing import Annotated

import typer

from ckptio._version import __version__

_INTERRUPTED = 130  # as a shell says of a program that SIGINT ended

app = typer.Typer(
    name="ckptio",
    help=(
        "Look at checkpoints of ckptio, and verify them.\n\n"
        "Exit codes: 0 fine; 1 damage was found; 2 wrong usage, no such path, no checkpoint"
        " there, or it cannot be read; 3 a bug of ckptio; 130 interrupted. With several"
        " checkpoints damage (1) outranks the rest.\n\n"
        "With --json the result is one JSON document on stdout, and messages stay on stderr."
        " Keys are always there; what is not known is null. Sizes are in bytes, and ranges"
        " exclude their stop."
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Order(StrEnum):
    """How `ls` sorts."""

    newest = "newest"
    name = "name"


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def _print_version(wanted: bool) -> None:  # noqa: FBT001  # typer's signature of a callback
    if wanted:
        typer.echo(f"ckptio {__version__}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[  # its callback is all it does
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command. The help is in `app`."""


@app.command()
def ls(
    root: Annotated[str, typer.Argument(help="A directory, or a checkpoint.")] = ".",
    *,
    show_all: Annotated[
        bool,
        typer.Option("--all", help="Also what has no commit, and what is in hidden directories."),
    ] = False,
    sort: Annotated[Order, typer.Option(help="The order.")] = Order.newest,
    depth: Annotated[int, typer.Option(min=0, help="Levels below ROOT to look into.")] = 4,
    as_json: JsonOption = False,
) -> None:
    """List the checkpoints at and below ROOT.

    A link to a directory that is listed anyway is not listed again. A directory that a
    killed save left without a commit, or in which a save is still running, is shown with
    --all. A ROOT without any checkpoint is fine (0).

    JSON: root; checkpoints, a list of path (relative to root), state ("committed",
    "damaged", "unreadable", "no_commit"), committed (ISO 8601, UTC), nbytes and num_files
    (of data), num_tensors, format, writer, save_id, error; error, if ROOT cannot be listed.
    """
    from ckptio.cli.ls import run  # noqa: PLC0415  # only what the command needs

    by_name = sort is Order.name
    _finish(lambda: run(root, show_all=show_all, by_name=by_name, depth=depth, as_json=as_json))


@app.command()
def show(
    path: Annotated[str, typer.Argument(help="A checkpoint.")],
    *,
    select: Annotated[
        list[str],
        typer.Option(
            default_factory=list,
            show_default=False,
            metavar="GLOB",
            help="Only these names: a glob or a dotted prefix; may be given several times.",
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Show the names in a checkpoint, with dtype, shape, bytes and file.

    "= NAME" stands where a tensor is tied to another and stored once; "in NAME" where it
    is a view. Values that are no tensors are shown as short JSON.

    JSON: path; state ("committed", "damaged", "missing", "unreadable"); committed, format,
    writer, save_id; num_tensors and nbytes of what is selected, each stored tensor once;
    files, a list of name and nbytes; entries, a list of name, kind ("tensor", "array",
    "bytes", "value"), dtype, shape, nbytes, stored_as (its name in the files), tied_to,
    is_view, chunks (file, start, stop, global_offset, local_shape), value (as the manifest
    has it); error.
    """
    from ckptio.cli.show import run  # noqa: PLC0415  # only what the command needs

    _finish(lambda: run(path, select=select, as_json=as_json))


@app.command()
def verify(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Checkpoints.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Read every byte of checkpoints and compare it with its checksums.

    A damaged manifest is damage; a checkpoint that is not there is not. CKPTIO_MAX_READS,
    CKPTIO_SLAB_NBYTES and the other options of ckptio.CheckpointConfig are taken from the
    environment.

    JSON: checkpoints, a list of path, state ("whole", "damaged", "missing", "unreadable"),
    save_id, num_files, nbytes (bytes read), damage (a list of file, start, stop, problem,
    tensors), error; error, if an option is wrong. Damage of the manifest itself has no
    start and stop.
    """
    from ckptio.cli.verify import run  # noqa: PLC0415  # only what the command needs

    _finish(lambda: run(paths, as_json=as_json))


def _finish(command: Callable[[], int]) -> None:
    """Run a command and exit with its code."""
    try:
        code = command()
    except KeyboardInterrupt:
        code = _INTERRUPTED
    raise typer.Exit(code)
