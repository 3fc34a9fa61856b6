"""Where a command writes: results to stdout, messages and progress to stderr.

In a pipe there is no colour and no width; on a terminal lines are laid out for its width.
A reader that went away (`ckptio show ... | head`) is no error: what is left goes nowhere
and the command ends with the code it would have had.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ckptio.cli.text import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Takes how much is done, and how much there is to do in all.
Advance = Callable[[int, int], None]
_BATCH = 512
#: Credentials in a URL, which must not get into anybody's log. They end at the last `@` before
#: a slash: whoever typed them may have forgotten to quote one in the password.
_CREDENTIALS = re.compile(r"""://[^/\s"']*@""")


class Terminal:
    """The standard output and error of this process, as they are when it is made."""

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a letter that ASCII lacks is no failure
                stream.reconfigure(errors="backslashreplace")
        self._out = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self._err = Console(file=sys.stderr, highlight=False, markup=False, emoji=False)
        self._closed = False

    @property
    def width(self) -> int | None:
        """Columns of the terminal; `None` in a pipe or a file."""
        return self._out.width if self._out.is_terminal else None

    def lines(self, lines: Iterable[str]) -> None:
        """Print lines of visible text; stop early if nobody reads them."""
        batch: list[str] = []
        for line in lines:
            batch.append(line)
            if len(batch) == _BATCH:
                if self._closed:
                    return
                self._write("\n".join(batch) + "\n")
                batch.clear()
        if batch:
            self._write("\n".join(batch) + "\n")

    def styled(self, line: str, style: str) -> None:
        """Print one line of visible text, in colour where there is any."""
        if not self._out.is_terminal:
            self.lines([line])
            return
        with self._piped():
            self._out.print(Text(without_credentials(line), style), soft_wrap=True)

    def json(self, document: dict[str, Any]) -> None:
        """Print the one document of a command, in ASCII."""
        self._write(json.dumps(document) + "\n")

    def message(self, text: str) -> None:
        """Say something on stderr; `text` may be anybody's."""
        with contextlib.suppress(OSError):  # nobody is left to be told
            sys.stderr.write(f"ckptio: {visible(without_credentials(text))}\n")

    def _write(self, text: str) -> None:
        with self._piped():
            sys.stdout.write(without_credentials(text))
            sys.stdout.flush()

    @contextlib.contextmanager
    def _piped(self) -> Iterator[None]:
        """Let a block write; if the reader of the pipe went away, take note of that instead."""
        try:
            yield
        except BrokenPipeError:
            self._closed = True

    @contextlib.contextmanager
    def progress(self, title: str, *, in_bytes: bool) -> Iterator[Advance | None]:
        """Show progress on stderr while the block runs, if stderr is a terminal.

        Args:
            title: What is going on; may be anybody's text.
            in_bytes: Whether bytes are counted, for a rate.

        Yields:
            Takes the progress, from any thread; `None` where nothing is shown.
        """
        if not self._err.is_terminal:
            yield None
            return
        from ckptio.cli.progress import make_progress  # noqa: PLC0415  # where it is shown

        with make_progress(self._err, in_bytes=in_bytes) as progress:
            task = progress.add_task(visible(without_credentials(title)), total=None)

            def advance(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)

            yield advance


def without_credentials(text: str) -> str:
    """Hide what stands before the host in URLs."""
    return _CREDENTIALS.sub("://***@", text)
