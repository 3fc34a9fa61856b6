"""Run functions on threads that no signal's handler interrupts, and at the end of the program.

`run_uninterrupted` waits for its function; `run_aside`, which is for finalizers, does not.
`at_exit` and `never_end_in_child` settle what becomes of an engine that is still open when the
program, or a forked child, ends.
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

#: How long a new thread may take to begin its function, as a number of waits and the seconds of
#: each. One long wait could be over before the thread ever ran, if all threads were stopped.
_NUM_TURNS, _TURN_S = 50, 0.1
#: A lock for each function that is run aside; it is released when that has ended. A forked child
#: has none.
_ASIDE: set[threading.Lock] = set()
os.register_at_fork(after_in_child=_ASIDE.clear)


def run_uninterrupted(function: Callable[[], None], name: str, stop: Callable[[], None]) -> None:
    """Run `function` on a thread that no interrupt reaches, and block until it has ended.

    If no thread can begin, or none does within `_NUM_TURNS * _TURN_S` seconds, it runs here.

    Args:
        function: What to run, once.
        name: Of the thread.
        stop: Asks `function` to end soon. Called if an interrupt comes to the caller, which is
            raised when `function` has ended. A second interrupt is raised at once.

    Raises:
        BaseException: The interrupt; without one, what `function` raised.
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
    """Have a function run on a daemon thread; or run it here, if no thread can begin.

    A `Thread` whose `start` is interrupted may never run. So another thread, to which no interrupt
    comes, starts it.
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
    """Run `function` on a thread of its own, without waiting for it, as a finalizer has to.

    A finalizer may run wherever something is allocated, on a thread that holds any lock. If it
    waited for another thread, that might wait for the lock.

    Args:
        function: What to run. The end of the program waits for it. Once the main thread has ended
            and no thread begins any more, it is run here; at the limit of threads, not at all.
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
    """Have a method called when the program ends, if its object still exists by then.

    Daemon threads, as those of an engine, still run at that time; soon after, whoever waits for
    one waits for ever. `atexit` is not run in children of multiprocessing; its `Finalize` is.

    Returns:
        A function that cancels this.
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
    """Keep a forked child from finalizing an object that would wait for threads of the parent.

    Args:
        owner: The object's only owner.
        block: The object. In a child it is never freed, also when `owner` is; in the parent it is
            freed as usual.
    """
    weakref.finalize(owner, _keep_in_child, block, os.getpid())


def _keep_in_child(block: object, pid: int) -> None:
    if os.getpid() != pid:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(block))
