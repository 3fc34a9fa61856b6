"""Handle signals while a block lasts, and then put the handlers back that were there before.

Blocks may overlap and end in any order, and whoever sets a handler inside one may leave it
there: at its end, a block puts a handler back only where its own one is set. If somebody else calls
its own one after that end, or sets it again, it passes the signal on to what was there before it.

A forked child inherits handlers, and would ignore the signal that is to end it: so it puts the
former ones back when it begins. The parent keeps its own.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from typing import TYPE_CHECKING, Any

from ckptio._texts import shown
from ckptio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType


class SignalWatch:
    """Handlers of some signals, from `start` to `stop`, once. Both on the main thread.

    A `stop` before any `start` does nothing: what could not be opened may be opened again.

    Args:
        signals: Which.
        on_signal: Called on the main thread, between any two instructions of it, with the
            name of a signal; must take no lock.
    """

    def __init__(self, signals: Sequence[int], on_signal: Callable[[str], None]) -> None:
        self._signals = check_signals(signals)
        self._on_signal: Callable[[str], None] | None = on_signal  # `None`: it has stopped
        self._before: dict[int, Any] = {}

    @property
    def names(self) -> list[str]:
        """Names of the signals."""
        return [number.name for number in self._signals]

    def start(self) -> None:
        """Take the signals over.

        Raises:
            ConfigError: This is not the main thread, and so cannot.
        """
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "preempt_signals= needs the main thread: only there does Python take signals;"
                " enter the checkpointer there, or call its preempt() from your own handler"
            )
        if self._signals:
            _started.add(self)
        for number in self._signals:
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._handle)

    def stop(self) -> None:
        """Put former handlers back where this one is set; from now on, pass on what comes here.

        Raises:
            ValueError: This is not the main thread, where no handler can be set. Signals are passed
                on to what was there before all the same.
        """
        if not self._before:
            return
        self._on_signal = None
        _started.discard(self)
        for number in self._before:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, self._to_give_back(number))

    def _to_give_back(self, number: int) -> Any:
        """Give the handler from before `start`, looking through watches that have stopped."""
        before = self._before[number]
        watch = getattr(before, "__self__", None)
        if isinstance(watch, SignalWatch) and watch._on_signal is None:  # noqa: SLF001  # one of us
            return watch._to_give_back(number)  # noqa: SLF001  # as above
        # one that C code had set cannot be put back; the default ends the process, too
        return signal.SIG_DFL if before is None else before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        on_signal = self._on_signal
        if on_signal is not None:
            on_signal(signal.Signals(number).name)
            return
        before = self._to_give_back(number)
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            now = signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)  # which mostly ends the process
            signal.signal(number, now)


#: Watches to be stopped in a forked child. A global, as what is registered for forks is for good.
_started: weakref.WeakSet[SignalWatch] = weakref.WeakSet()


def _stop_in_child() -> None:
    """Give back, in a process that was forked just now, what its parent watches."""
    for watch in list(_started):
        watch.stop()


os.register_at_fork(after_in_child=_stop_in_child)


def check_signals(signals: Sequence[int]) -> tuple[signal.Signals, ...]:
    """Check numbers of signals.

    Raises:
        ConfigError: One is no signal, or cannot be handled here.
    """
    try:
        numbers = tuple(dict.fromkeys(signal.Signals(number) for number in signals))
    except (TypeError, ValueError):
        raise ConfigError(
            f"preempt_signals= are signals, such as (signal.SIGTERM,), not {shown(signals)}"
        ) from None
    if {signal.SIGKILL, signal.SIGSTOP} & {*numbers}:
        raise ConfigError("preempt_signals=: nobody can handle SIGKILL and SIGSTOP")
    if signal.SIGURG in numbers:
        raise ConfigError(
            "preempt_signals=: SIGURG comes whenever somebody waits for a file that is being loaded"
        )
    return numbers
