"""What orders copies behind, and before, the work of the caller's devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ckptio.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ckptio.runtime.core import EngineCore
    from ckptio.staging.cuda import CallerStreams


def devices_of(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """Give the CUDA devices that tensors are on."""
    return {tensor.device for tensor in tensors if tensor.is_cuda}


def caller_streams(
    devices: Collection[torch.device], core: EngineCore, *, saving: bool
) -> CallerStreams | None:
    """Record on the caller's current streams what copies have to come after.

    Args:
        devices: CUDA devices that are copied from or to.
        core: The engine; its pool is pinned from the first of them on.
        saving: The direction; each has side streams of its own.

    Raises:
        StateError: A CUDA graph is being captured: what is recorded now happens at its replay.
            Or a device has failed, or the parent's tensors are to be copied in a forked child.
    """
    if not devices:
        return None
    from ckptio.staging.cuda import CallerStreams  # noqa: PLC0415  # only where there is CUDA

    side = core.side_streams(min(devices, key=str), saving=saving)
    try:
        if not any(_captures(device) for device in devices):
            return CallerStreams(devices, side)
    except RuntimeError as error:  # an assertion that failed there, for one: torch says it here
        is_forked = torch.cuda._is_in_bad_fork()  # noqa: SLF001  # then torch says all there is
        what = "" if is_forked else "a device has failed before: "
        raise StateError(f"{what}{error}") from error
    raise StateError("a CUDA graph is being captured; save and load before or after that")


def _captures(device: torch.device) -> bool:
    """Whether the caller's current stream on a device is captured; torch asks one device's."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
