"""Functions on threads that no signal's handler interrupts, and the end of the program.

`run_uninterrupted` waits for its function, `run_aside`, which is for finalizers, does not.
`at_exit` and `never_end_in_child` say what the end of the program, or of a forked child, does with
an engine that is still open.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import multiprocessing
import os
import threading
import weakref
from _thread import start_new_thread
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: How long a thread that was begun may take to come to its function: so many times so long. It has
#: its turn in each, where another one keeps the interpreter for longer, or all were stopped.
_NUM_TURNS, _TURN_S = 50, 0.1
#: What is run aside: a lock of each that is released when it has ended. A forked child has none.
_ASIDE: set[threading.Lock] = set()
os.register_at_fork(after_in_child=_ASIDE.clear)


def run_uninterrupted(function: Callable[[], None], name: str, stop: Callable[[], None]) -> None:
    """Run `function` on a thread that no interrupt reaches, and block until it has ended.

    Args:
        function: What to run.
        name: Of the thread.
        stop: Asks `function` to make haste. Called where an interrupt comes to the caller, who
            still waits for the end and then raises it. A second one is raised at once.

    Raises:
        BaseException: What `function` raised, or the interrupt.
    """
    errors: list[BaseException | None] = []
    claim = threading.Lock()
    # no future: an interrupt can leave its lock locked, for ever
    ended = threading.Lock()
    ended.acquire()

    def run() -> None:
        if not claim.acquire(blocking=False):  # another thread has it
            return
        try:
            function()
        except BaseException as error:  # whoever waits raises it
            errors.append(error)
        else:
            errors.append(None)
        finally:
            ended.release()

    def begin_and_wait() -> None:
        _begin(run, name)
        num_turns = 0
        while not errors:
            is_late = not ended.acquire(timeout=_TURN_S if num_turns < _NUM_TURNS else -1)
            num_turns += is_late
            if is_late and num_turns == _NUM_TURNS:
                run()  # unless a thread does: where memory ends, one may end as it begins

    try:
        begin_and_wait()
    except BaseException:
        stop()
        # The interrupt may have come before or after the thread began. Start another: `claim` lets
        # only one run `function`
        begin_and_wait()
        raise
    if errors[0] is not None:
        raise errors[0]


def _begin(run: Callable[[], None], name: str) -> None:
    """Have a function run on a daemon thread; here where none begins, as the interpreter ends.

    What an interrupt leaves of a `Thread` that is being started may never run, or raise
    `RuntimeError` as well. None comes to a thread that another one starts.
    """
    try:
        start_new_thread(_launch, (run, name))
    except RuntimeError:
        run()


def _launch(run: Callable[[], None], name: str) -> None:
    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:  # the limit of threads is reached
        run()


def run_aside(function: Callable[[], None], name: str) -> None:
    """Run `function` on a thread of its own, and wait for nothing: what a finalizer may do.

    Garbage is collected wherever something is allocated, on a thread that may hold any lock: that
    of all thread pools, say. Whoever waits there for another thread may wait for itself.

    Args:
        function: What to run. The end of the program waits for it; behind that, where no thread
            begins, it is run here; at the limit of threads, not at all.
        name: Of the thread.
    """
    if not threading.main_thread().is_alive():
        function()
        return
    ended = threading.Lock()
    ended.acquire()
    at_end: Finalize | None = None

    def run() -> None:
        try:
            function()
        finally:
            _ASIDE.discard(ended)
            ended.release()
            if at_end is not None:
                at_end.cancel()

    try:
        _ASIDE.add(ended)
        if multiprocessing.parent_process() is not None:  # its end is none that `atexit` knows of
            at_end = Finalize(None, ended.acquire, exitpriority=0)
        start_new_thread(_launch, (run, name))
    except BaseException as error:  # an interrupt, perhaps before the thread: nobody ends this
        _ASIDE.discard(ended)
        if at_end is not None:
            at_end.cancel()
        if not isinstance(error, RuntimeError):
            raise


@atexit.register
def _end_aside() -> None:
    """Wait for what is run aside: `threading` waits for threads that it has begun by then."""
    for ended in list(_ASIDE):
        ended.acquire()


def at_exit(method: Callable[[], object]) -> Callable[[], object]:
    """Have a method called when the program ends, if its object is still there.

    Threads that are daemons, as those of an engine, still run then; soon after they do not,
    and whoever waits for one waits forever. Children that multiprocessing forks have an end
    of their own.

    Returns:
        What calls it off.
    """
    found = weakref.WeakMethod(method)

    def call() -> None:
        still = found()
        if still is not None:
            still()

    if multiprocessing.parent_process() is not None:
        return Finalize(None, call, exitpriority=0).cancel
    atexit.register(call)
    return functools.partial(atexit.unregister, call)


def never_end_in_child(owner: object, block: object) -> None:
    """See to it that a forked child does not finalize what waits for threads of its parent.

    Args:
        owner: Who has it.
        block: What the child keeps for ever when the owner goes; in the parent it just goes.
    """
    weakref.finalize(owner, _keep_in_child, block, os.getpid())


def _keep_in_child(block: object, pid: int) -> None:
    if os.getpid() != pid:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(block))
