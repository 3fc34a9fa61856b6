"""What a caller works on: torch's current device, and the current stream of each.

They belong to a thread, and a call of several steps does not have one for itself: while it
awaits, other tasks choose streams there, and parts of it run on threads of the engine. So what
was current at the call is kept, and made so again for each part that touches the caller's tensors.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class CallerCurrents:
    """The device and the streams that are current when, and where, this is made.

    Nothing is kept, and so nothing changed later, where the program has not used CUDA yet: torch
    is not imported for it, and no driver woken.
    """

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._streams: list[torch.cuda.Stream] = []
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            self._device = torch.device("cuda", torch.cuda.current_device())
            # the first `torch.cuda.device_count()` of older torch counts boards, by the
            # CUDA_VISIBLE_DEVICES of this moment; the runtime keeps to that of its own start
            num_devices = torch._C._cuda_getDeviceCount()  # noqa: SLF001  # as above
            self._streams = [torch.cuda.current_stream(index) for index in range(num_devices)]

    @property
    def use_cuda(self) -> bool:
        """Whether the program had used CUDA."""
        return self._device is not None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Work on them, on whatever thread.

        Devices that are as they were are left alone: entering one makes a context on it, and
        every rank would have one on each.
        """
        if self._device is None:
            yield
            return
        import torch  # noqa: PLC0415  # it is, by now

        others = [each for each in self._streams if torch.cuda.current_stream(each.device) != each]
        with contextlib.ExitStack() as stack:
            # the device first: leaving a stream goes back to the one that was current
            stack.enter_context(torch.cuda.device(self._device))
            for stream in others:
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.cuda.device(self._device))
            yield
