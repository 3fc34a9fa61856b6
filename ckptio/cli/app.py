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
        "Look at checkpoints, verify, compare and convert them, and remove old ones.\n\n"
        "Exit codes: 0 fine; 1 damage was found; 2 wrong usage, no such path, no checkpoint"
        " there, or it cannot be read; 3 a bug of ckptio; 130 interrupted. With several"
        " checkpoints damage (1) outranks the rest.\n\n"
        "With --json the result is one JSON document on stdout, and messages stay on stderr."
        " Every key is always there; what is not known is null. If the arguments cannot be parsed,"
        " error is the only key. Sizes are in bytes. A range ends just before its stop."
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


class Format(StrEnum):
    """What `convert` writes."""

    ckptio = "ckptio"
    safetensors = "safetensors"
    hf = "hf"
    dcp = "dcp"


SelectOption = Annotated[
    list[str],
    typer.Option(
        default_factory=list,
        show_default=False,
        metavar="GLOB",
        help="Only these names: a glob or a dotted prefix; may be given several times.",
    ),
]
StorageOption = Annotated[
    list[str],
    typer.Option(
        "--storage-option",
        default_factory=list,
        show_default=False,
        metavar="KEY=VALUE",
        help="An option of the store at a URL, as fsspec takes it; may be given several times."
        " Better keep secrets in the environment: others can see a command line.",
    ),
]
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


@app.command(short_help="List the checkpoints at and below a directory or URL.")
def ls(
    root: Annotated[str, typer.Argument(help="A directory or URL, or a checkpoint.")] = ".",
    *,
    show_all: Annotated[
        bool,
        typer.Option("--all", help="Also show what has no commit, or is in hidden directories."),
    ] = False,
    sort: Annotated[Order, typer.Option(help="Newest first, or by name.")] = Order.newest,
    depth: Annotated[int, typer.Option(min=0, help="How many levels below ROOT to look into.")] = 4,
    storage_options: StorageOption,
    as_json: JsonOption = False,
) -> None:
    """List the checkpoints of ckptio at and below ROOT; `show` reads those of others, too.

    A link to a directory that is listed anyway is not listed again. A directory that a
    killed save left without a commit, or in which a save is still running, is shown with
    --all. It is not an error if ROOT has no checkpoint (exit code 0). At a URL, nothing is
    looked for below a checkpoint.

    JSON: root; checkpoints, a list of path (relative to root), state ("committed",
    "damaged", "unreadable", "no_commit"), committed (ISO 8601, UTC), nbytes and num_files
    (of data), num_tensors, format, writer, save_id, metrics (of a checkpointer's step), owed
    (whether a copy to a second tier is still to be made), owed_to, error; and error, if ROOT
    cannot be listed.
    """
    from ckptio.cli.ls import run  # noqa: PLC0415  # only what the command needs

    _finish(
        lambda: run(
            root,
            show_all=show_all,
            by_name=sort is Order.name,
            depth=depth,
            storage_options=storage_options,
            as_json=as_json,
        )
    )


@app.command(short_help="Show what is in a checkpoint: names, types, shapes.")
def show(
    path: Annotated[str, typer.Argument(help="A checkpoint.")],
    *,
    select: SelectOption,
    storage_options: StorageOption,
    as_json: JsonOption = False,
) -> None:
    """Show the names in a checkpoint, with dtype, shape, bytes and file.

    "= NAME" marks a tensor that is tied to another and stored once, "in NAME" one that is a
    view of another. The file that has a tensor is followed by "+" and the files that have
    copies of it. Values that are not tensors are shown as short JSON. Where each rank has a
    value of its own, NAME~rank3 is the one of rank 3; a rank without one has no such line.

    JSON: path; state ("committed", "damaged", "missing", "unreadable"); committed, format,
    writer, save_id (format and save_id are null for other programs' checkpoints); metrics (of a
    checkpointer's step); owed (whether a copy to a second tier is still to be made), owed_to;
    num_tensors and nbytes of what is selected (a stored tensor counts once); files, a list of
    name and nbytes; entries, a list of name, kind ("tensor", "array", "bytes", "value"), dtype,
    shape, nbytes, stored_as (its name in the files), tied_to, is_view, chunks (file, start,
    stop, global_offset, local_shape, and copies, a list of file and start), value (as the
    manifest has it); error. The exit code is 2 if no name is selected.
    """
    from ckptio.cli.show import run  # noqa: PLC0415  # only what the command needs

    _finish(lambda: run(path, select=select, storage_options=storage_options, as_json=as_json))


@app.command(short_help="Read every byte, and compare it with its checksums.")
def verify(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Checkpoints.")],
    *,
    copies: Annotated[
        bool,
        typer.Option("--copies", help="Also compare the copies of a tensor that ranks wrote."),
    ] = False,
    storage_options: StorageOption,
    as_json: JsonOption = False,
) -> None:
    """Read every byte of checkpoints, and compare it with its checksums.

    Values that are not tensors are also rebuilt once; one that no save can have written counts
    as damage of the manifest. Anything that depends on the loader is not checked: classes, time
    zones, and what types and devices torch has.

    A damaged manifest counts as damage, and with --copies so does a copy that differs. A missing
    checkpoint does not, nor does another program's manifest.json. CKPTIO_MAX_READS,
    CKPTIO_SLAB_NBYTES and the other options of ckptio.CheckpointConfig are taken from the
    environment.

    JSON: checkpoints, a list of path, state ("whole", "damaged", "missing", "unreadable"),
    save_id, num_files, nbytes (bytes read), damage (a list of file, start, stop, problem,
    tensors), error; and error, if an option is wrong. Damage of the manifest itself has no
    start and stop.
    """
    from ckptio.cli.verify import run  # noqa: PLC0415  # only what the command needs

    _finish(
        lambda: run(paths, compare_copies=copies, storage_options=storage_options, as_json=as_json)
    )


@app.command(short_help="Say how two checkpoints differ.")
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, of any known format.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    *,
    select: SelectOption,
    strip_a: Annotated[
        str,
        typer.Option(metavar="NAME", help="Of A, take what is below NAME; drop that prefix."),
    ] = "",
    strip_b: Annotated[str, typer.Option(metavar="NAME", help="The same for B.")] = "",
    storage_options: StorageOption,
    as_json: JsonOption = False,
) -> None:
    """Say how two checkpoints differ: in names, kinds, types, shapes, bits and values.

    Kinds of containers and of keys are not compared: not every format keeps them.

    Exit codes: 0 equal; 1 different; 2 one of them cannot be read, or is damaged.

    JSON: a; b; equal; only_a and only_b, lists of names; different, a list of name, reason
    (the first of "kind", "dtype", "shape", "bits", "value"), a and b (in words; not for
    bits), and for bits num_elements, num_different and largest (the largest absolute
    difference; "nan" and "inf" are strings); num_same; nbytes (compared, counted on one side);
    notes (what lies beside a checkpoint and was not compared); error.
    """
    from ckptio.cli.diff import run  # noqa: PLC0415  # only what the command needs

    strips = strip_a, strip_b
    _finish(lambda: run(a, b, select, strips, storage_options=storage_options, as_json=as_json))


@app.command(short_help="Convert a checkpoint to another format.")
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint, of any format.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="What to write.")],
    *,
    to: Annotated[Format, typer.Option("--to", help="The format to write.")],
    select: SelectOption,
    strip: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Take only what is below NAME, and drop that prefix; --select then uses the"
            " shortened names.",
        ),
    ] = "",
    drop_values: Annotated[
        bool, typer.Option("--drop-values", help="Leave out what safetensors cannot hold.")
    ] = False,
    max_shard_nbytes: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, help="Most bytes of an hf file; 5 GB if not given."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE", help="The type of all floats in safetensors or hf: bfloat16, say."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    storage_options: StorageOption,
    as_json: JsonOption = False,
) -> None:
    """Convert a checkpoint of any known format to another, in bounded memory.

    SRC is a checkpoint of ckptio, a safetensors file, a Hugging Face folder, a directory of
    torch.distributed.checkpoint, or a file of torch.save; nothing in it is run. --to says what
    DST is: ckptio; safetensors, one file; hf, a folder of files with an index; dcp, a directory
    of torch.distributed.checkpoint. A conversion that was stopped goes on when it is run again:
    safetensors and hf with the files that are missing, ckptio and dcp with the bytes that are
    not there yet. In an object store it begins anew.

    JSON: source; path; to; state ("converted", "failed"); num_tensors; nbytes (of tensors);
    files, a list of name, nbytes and was_there; notes (what the format does not keep, and
    what lies beside the source); error.
    """
    from ckptio.cli.convert import run  # noqa: PLC0415  # only what the command needs

    _finish(
        lambda: run(
            source,
            target,
            to=to.value,
            select=select,
            strip=strip,
            overwrite=overwrite,
            drop_values=drop_values,
            max_shard_nbytes=max_shard_nbytes,
            dtype=dtype,
            storage_options=storage_options,
            as_json=as_json,
        )
    )


@app.command(short_help="Remove the steps of a run that no option keeps.")
def prune(
    root: Annotated[str, typer.Argument(help="The directory or URL of a run.")],
    *,
    last: Annotated[
        int | None,
        typer.Option("--keep-last", min=1, metavar="K", help="Keep the K highest steps."),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option("--keep-every", min=1, metavar="N", help="Keep multiples of N."),
    ] = None,
    best: Annotated[
        list[str],
        typer.Option(
            "--keep-best",
            default_factory=list,
            show_default=False,
            metavar="METRIC[:K]:min|max",
            help="Keep the K steps with the lowest (with max: the highest) METRIC; may be given"
            " several times.",
        ),
    ],
    pins: Annotated[
        list[int],
        typer.Option(
            "--pin",
            default_factory=list,
            show_default=False,
            metavar="STEP",
            help="Keep this step, which has to be there; may be given several times.",
        ),
    ],
    even_owed: Annotated[
        bool,
        typer.Option("--even-owed", help="Also remove steps whose copy to a second tier is owed."),
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="Only say what would be removed.")] = False,
    storage_options: StorageOption,
    as_json: JsonOption = False,
) -> None:
    """Remove the steps of a run that no option keeps. A run is what a Checkpointer saves.

    At least one --keep option is needed. A step stays if any of these options, or --pin, keeps
    it. The highest step and the one committed last always stay. Without --even-owed, a step
    whose copy to a second tier is still owed stays, too: it is the only one there is. Steps
    whose manifests make no sense count for nothing and stay, as does everything that is not
    called like step-00000004. Reading a step while it is removed ends with an error.

    The exit code is 2 if something could not be removed; and nothing is removed if a manifest
    cannot be read now, no step has a METRIC, or a step to pin is not there.

    JSON: root; dry_run; removed, a list of step, path (relative to root), nbytes, error
    (why it is still there); owed, a list of step, path and owed_to (null if the note that
    says so cannot be read); kept and unreadable, lists of step and path; error.
    """
    from ckptio.cli.prune import run  # noqa: PLC0415  # only what the command needs

    _finish(
        lambda: run(
            root,
            last=last,
            every=every,
            best=best,
            pins=pins,
            even_owed=even_owed,
            dry_run=dry_run,
            storage_options=storage_options,
            as_json=as_json,
        )
    )


@app.command(short_help="Say what a file system or store can do for saves.")
def doctor(
    path: Annotated[str, typer.Argument(help="A directory that is there, or a URL.")] = ".",
    *,
    storage_options: StorageOption,
    as_json: JsonOption = False,
) -> None:
    """Say what the file system or store at PATH can do for saves, and what dead saves left.

    That is tried in a directory (or under a prefix) that is made at PATH and removed again;
    nothing else is written. Exit codes: 0 fine; 2 saves cannot rely on it, or PATH cannot
    be written.

    JSON: path; file_system (for a URL, its protocol); free_nbytes (null for a URL); findings, a
    list of name, state ("yes", "slow" if a save does without it, "no") and detail; leftovers,
    a list of path, names and nbytes; error.
    """
    from ckptio.cli.doctor import run  # noqa: PLC0415  # only what the command needs

    _finish(lambda: run(path, storage_options=storage_options, as_json=as_json))


def _finish(command: Callable[[], int]) -> None:
    """Run a command and exit with its code."""
    try:
        code = command()
    except KeyboardInterrupt:
        code = _INTERRUPTED
    raise typer.Exit(code)
