"""Copies between slabs and CUDA devices: side streams, events, pinned memory.

A copy waits for an event that was recorded on the caller's stream at the call, so it sees
what the caller's kernels had been told to do by then, and nothing later waits for it but
who asks. Slabs are pinned by `cudaHostRegister` in their exact size. The host waits for
events, in threads, never for a device, and so that no capture of a CUDA graph by another thread
notices.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from typing import TYPE_CHECKING, ClassVar, cast

import torch

from ckptio.errors import StateError
from ckptio.staging.far_moves import copy_far
from ckptio.staging.pool import CopiesLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from ckptio.staging.far_moves import FarMove


class PendingCopies:
    """Copies that devices have been told to do.

    Args:
        events: Each device, with what was recorded behind the last copy on it.
    """

    def __init__(self, events: Sequence[tuple[torch.device, torch.cuda.Event]]) -> None:
        self._events = events

    def wait(self) -> None:
        """Block until they are done, all of them even if one fails. Lets the GIL go.

        Raises:
            CopiesLostError: A device has failed; nobody knows how far it came.
        """
        failure: RuntimeError | None = None
        for device, event in self._events:
            try:
                with torch.cuda.device(device), beside_captures():  # see `CallerStreams._queue`
                    event.synchronize()
            except RuntimeError as error:
                failure = failure or error
        if failure is not None:
            raise CopiesLostError(f"a copy from or to a device failed: {failure}") from failure


class SideStreams:
    """The streams for copies in one direction, one a device, made at first use.

    Of the process, not of an engine: torch gives streams from 32 a device and priority, in
    turn, so whoever takes a new one for each save has before long what somebody else works
    or captures on. Ours have the high priority, of which others rarely take any. So they are kept
    by the class, other than all else that is shared here: engines that come and go would each
    take new ones.

    Args:
        saving: The direction.
    """

    _streams: ClassVar[dict[tuple[bool, torch.device], torch.cuda.Stream]] = {}

    def __init__(self, *, saving: bool) -> None:
        self._saving = saving

    def of(self, device: torch.device) -> torch.cuda.Stream:
        """Give the stream for `device`."""
        key = (self._saving, device)
        if key not in self._streams:  # two threads make two, and one of them is used
            self._streams.setdefault(key, torch.cuda.Stream(device, priority=-1))
        return self._streams[key]


class CallerStreams:
    """Orders copies behind what the caller had queued when this was made.

    Args:
        devices: CUDA devices that are copied from or to.
        side: Streams to copy on.
    """

    def __init__(self, devices: Iterable[torch.device], side: SideStreams) -> None:
        self._side = side
        self._turns: dict[torch.device, threading.Lock] = {}
        self._ready: dict[torch.device, torch.cuda.Event] = {}
        self._last: dict[torch.device, torch.cuda.Event] = {}
        self._lock = threading.Lock()
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._ready[device] = event
            self._turns[device] = threading.Lock()

    @property
    def devices(self) -> Collection[torch.device]:
        """The devices that it was made for."""
        return self._turns.keys()

    def copy_views(
        self,
        pairs: Mapping[torch.device, Iterable[tuple[torch.Tensor, torch.Tensor]]],
        pending: list[PendingCopies],
        *,
        is_short: bool,
    ) -> None:
        """Queue copies on the side streams. Does not wait for them.

        If one cannot be queued, those before it are waited for: nobody else knows of them.

        Args:
            pairs: Target and source of each, by the device that one of them is on.
            pending: Takes them.
            is_short: Whether one thread at a time queues them; see `by_torch`.

        Raises:
            StateError: A device has failed, or has no memory left.
        """

        def queue(device: torch.device, stream: torch.cuda.Stream) -> bool:
            turn = self._turns[device] if is_short else contextlib.nullcontext()
            with turn, torch.cuda.stream(stream):
                for target, source in pairs[device]:
                    # torch conjugates and negates on the host, before the copy arrives
                    physical = source.resolve_conj().resolve_neg()
                    target.copy_(physical, non_blocking=True)
            return True

        self._queue(pairs, queue, pending)

    def copy_memory(
        self,
        moves: Mapping[torch.device, Sequence[FarMove]],
        pending: list[PendingCopies],
        *,
        saving: bool,
    ) -> bool:
        """Queue copies from address to address, as `copy_views`, of memory that is pinned.

        Args:
            moves: The copies, by device.
            pending: Takes them.
            saving: Whether they are from the device, or else to it.

        Returns:
            Whether all are queued. If not, all of them are left to `copy_views`.

        Raises:
            StateError: A device has failed.
        """

        def queue(device: torch.device, stream: torch.cuda.Stream) -> bool:
            return copy_far(moves[device], stream.cuda_stream, saving=saving)

        return self._queue(moves, queue, pending)

    def _queue(
        self,
        devices: Iterable[torch.device],
        queue: Callable[[torch.device, torch.cuda.Stream], bool],
        pending: list[PendingCopies],
    ) -> bool:
        """Call `queue` with each device and its side stream, behind the caller's stream there."""
        events: list[tuple[torch.device, torch.cuda.Event]] = []
        is_whole = True
        try:
            for device in devices:
                stream = self._side.of(device)
                # the device first: a thread that never chose one is on the first, and leaving
                # a stream would go back there and make a context on it, on every rank
                with torch.cuda.device(device), beside_captures():
                    event = torch.cuda.Event(blocking=True)  # waiting for it burns no core
                    stream.wait_event(self._ready[device])
                    try:
                        is_whole &= queue(device, stream)
                    finally:
                        with self._lock:  # what is recorded last is the last one here
                            _record(event, stream)
                            self._last[device] = event
                        events.append((device, event))
        except BaseException as error:
            PendingCopies(events).wait()
            if isinstance(error, RuntimeError):
                raise StateError(f"cannot copy from or to a device: {error}") from error
            raise
        pending.append(PendingCopies(events))
        return is_whole

    def fence(self) -> None:
        """Make the calling thread's current streams wait for every copy queued so far."""
        for device, event in self._last.items():
            torch.cuda.current_stream(device).wait_event(event)


def _record(event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
    """Record an event behind copies; wait for the copies where that cannot be done.

    Raises:
        CopiesLostError: Nor can that.
    """
    try:
        event.record(stream)
    except RuntimeError as error:
        try:
            stream.synchronize()
        except RuntimeError:
            raise CopiesLostError(f"copies from or to a device are lost: {error}") from error
        raise


class HostRegistration:
    """Pins memory with `cudaHostRegister`, in its exact size; see `pool.SupportsPinning`.

    Args:
        device: Whose context to use; memory pinned in one is pinned in all. A thread that
            never chose a device would make a context on the first one, on every rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, address: int, nbytes: int) -> None:
        """Pin a range. Blocks."""
        portable = 1  # cudaHostRegisterPortable
        with torch.cuda.device(self._device), beside_captures():
            _check(
                torch.cuda.cudart().cudaHostRegister(address, nbytes, portable),
                "cudaHostRegister",
            )

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        with torch.cuda.device(self._device), beside_captures():
            _check(torch.cuda.cudart().cudaHostUnregister(address), "cudaHostUnregister")


_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread do what another thread's capture of a CUDA graph would not let it.

    `torch.cuda.graph` captures in the mode "global": while it lasts, any thread that waits for
    an event, takes device memory or pins host memory gets an error, and the capture is lost
    with it. A thread whose own mode is "thread local" does neither, and it hides nothing: what
    is done here is not what is captured. torch's own watchdog of NCCL does the same (pytorch
    #148594). The device has to be chosen before, as changing the mode makes a context.
    """
    exchange = _exchange_capture_mode()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_THREAD_LOCAL)
    exchange(ctypes.byref(mode))  # its code may be that of an earlier call, and says nothing
    try:
        yield
    finally:
        if mode.value != _THREAD_LOCAL:
            exchange(ctypes.byref(mode))  # what it was


#: Who changes the mode: the runtime that torch is linked with, whatever that is called (a search
#: goes on in what a library needs); or the driver, which keeps it, where torch has the runtime
#: within itself. The runtime first, as it makes the device's context the thread's.
_EXCHANGES = (
    (torch._C.__file__, "cudaThreadExchangeStreamCaptureMode"),  # noqa: SLF001  # its file alone
    ("libcuda.so.1", "cuThreadExchangeStreamCaptureMode"),
)


@functools.cache
def _exchange_capture_mode() -> Callable[..., int] | None:
    """Find what changes the mode of a thread, which torch does not hand on.

    Returns:
        `None` where torch is made for another maker's devices.
    """
    for library, name in _EXCHANGES:
        try:  # only what is loaded
            found = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            return cast("Callable[..., int]", getattr(found, name))
        except (OSError, AttributeError):
            continue
    return None


def _check(code: object, what: str) -> None:
    number = int(code)  # type: ignore[call-overload]  # an enum of the runtime's, 0 is success
    if number != 0:
        raise StateError(f"{what} failed: {torch.cuda.cudart().cudaGetErrorString(code)}")
