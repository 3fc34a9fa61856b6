"""Run what blocks on a thread of its own, and wait for it on a loop that interrupts come to.

A signal's handler runs on the main thread, wherever that is, and may raise there. In Python's own
`threading` and `concurrent.futures` it may be where a lock was just taken, which then stays locked
for ever: a thread that was being started never runs, and the end of the program waits for it; one
that is to say how it ended never gets to. So what an interrupt may come to is done here with what
has no such lock: an `Outcome`, and `start_new_thread`, which is one operation of the interpreter.
What that starts does no more than start the thread proper, where no interrupt comes. If one came
meanwhile, it is done again; who of the two begins, a lock says that nobody waits for.

The thread proper is no daemon. The end of the program waits for it, as it closes an engine, say,
for a coroutine on a loop that has stopped.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from _thread import start_new_thread
from typing import TYPE_CHECKING, Generic, TypeVar

from ckptio._aio import outlive, wait_out
from ckptio._outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def in_own_thread(
    function: Callable[[], T], on_cancel: Callable[[], object] | None = None
) -> T:
    """Run `function` on a thread of its own, which is gone when this returns or raises.

    It sees the caller's context variables, as with `asyncio.to_thread`: torch keeps in one what
    was said of files without a byte order.

    Args:
        function: What to run, once, also where an interrupt comes as it is to begin.
        on_cancel: Asks `function` to stop. Called at the first cancellation or interrupt that
            comes to the caller, and once more at a second interrupt; not at further cancellations.

    Raises:
        BaseException: What `function` raised; or the cancellation, or the interrupt. A second
            interrupt is raised at once.
    """
    if sys.is_finalizing():  # a coroutine that nobody finished ends now, and no thread begins
        raise GeneratorExit
    call = _OwnThread(function)
    stop = on_cancel or _nothing
    try:
        call.begin()
        return await outlive(call.end.wrapped(), stop)
    except GeneratorExit:  # nobody runs the caller any more, and there is no loop to wait on
        if not (sys.is_finalizing() or call.claim()):
            stop()
            call.end.wait()
        raise
    except BaseException:
        if not call.end.done():  # an interrupt that `outlive` did not see, or a second one
            stop()
            call.begin()
            await wait_out(call.end.wrapped())
        raise
    finally:
        call.join()
        del call  # an error that it ended with refers to this frame: no reference cycle


class _OwnThread(Generic[T]):
    """A call on a thread of its own.

    Attributes:
        end: How it ends.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self.end: Outcome[T] = Outcome()
        self._function = function
        self._context = contextvars.copy_context()
        self._claim = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ckptio-wait", daemon=False)

    def claim(self) -> bool:
        """Whether nobody has begun it; then nobody will but who asks."""
        return self._claim.acquire(blocking=False)

    def begin(self) -> None:
        """Have it begun, once. Called again where an interrupt came to the first call.

        Raises:
            RuntimeError: No thread begins.
        """
        start_new_thread(_launch, (self._claim, self._thread))

    def _run(self) -> None:
        try:
            self.end.set_result(self._context.run(self._function))
        except BaseException as error:  # the waiter raises it
            self.end.set_exception(error)
        finally:
            del self  # as above

    def join(self) -> None:
        """Wait until the thread is gone, if the call has ended."""
        if self.end.done() and self._thread.ident is not None and not sys.is_finalizing():
            self._thread.join()


def _launch(claim: threading.Lock, thread: threading.Thread) -> None:
    """Start a thread, or be it, unless somebody has.

    It has nothing else of the call, and may end behind that: an error of it is let go by then.
    """
    if not claim.acquire(blocking=False):
        return
    try:
        thread.start()
    except RuntimeError:  # the limit of threads is reached, or the interpreter ends
        thread.run()


def _nothing() -> None:
    """Nobody has to be asked to stop."""
