"""`ckptio` and `python -m ckptio`: the command line, if its extra is installed."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_USAGE = 2
_BUG = 3
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; those of the process if not given.

    Returns:
        The exit code: 0 fine, 1 damage found, 2 wrong usage or nothing to read, 3 a bug of
        ckptio, 130 interrupted. A crash must not look like damage, so that no exception gets
        out of here.
    """
    if find_spec("typer") is None or find_spec("rich") is None:
        sys.stderr.write("ckptio: the command line needs: pip install 'ckptio[cli]'\n")
        return _USAGE
    _open_missing()
    code = _USAGE
    args = sys.argv[1:] if argv is None else list(argv)
    try:
        from ckptio.cli.app import app  # noqa: PLC0415  # needs the extra

        _run(app, args)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
        if isinstance(end.__context__, BrokenPipeError):  # of typer's help; typer makes it 1
            code = 0
    except OSError as error:  # commands handle what they read; a full disk under stdout, mostly
        with contextlib.suppress(OSError):
            sys.stderr.write(f"ckptio: {error}\n")
    except KeyboardInterrupt:  # before a command has begun: what is imported takes a while
        code = _INTERRUPTED
    except Exception:
        traceback.print_exc()
        code = _BUG
    return code if _flushed() else _USAGE


def _run(app: Callable[..., object], args: list[str]) -> None:
    """Run a command, and say of wrong usage what is wrong also where a document is waited for.

    Raises:
        SystemExit: Always; its code is the command's.
    """
    try:
        app(args=args, prog_name="ckptio")
    except SystemExit as end:
        wrong = getattr(end.__context__, "format_message", None)  # typer's; said on stderr by now
        if wrong is not None and "--json" in args:
            from ckptio.cli.terminal import Terminal  # noqa: PLC0415  # needs the extra

            Terminal().json({"error": wrong()})
        raise


def _open_missing() -> None:
    """Give a process that was started without stdout or stderr (`>&-`) empty ones."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # for good


def _flushed() -> bool:
    """Write out what is left, so that the interpreter does not fail at it when it ends."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
    except OSError:
        _discard_stdout()
        return False
    return True


def _discard_stdout() -> None:
    """Send what is still in the buffer of the standard output nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


if __name__ == "__main__":
    sys.exit(main())
