from __future__ import annotations

import mmap

import pytest
import torch

from ckptio.staging.cuda import HostRegistration
from ckptio.staging.pool import Slab


@pytest.fixture(scope="session", autouse=True)
def warm_device() -> None:
    """Let the driver open what it keeps open, before a test looks at what is."""
    if not torch.cuda.is_available():
        return
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream(device)
    slab = Slab(mmap.PAGESIZE)
    registration = HostRegistration(device)
    registration.pin(slab.address, mmap.PAGESIZE)
    with torch.cuda.stream(stream):
        host = torch.frombuffer(slab.view, dtype=torch.uint8)
        torch.ones(mmap.PAGESIZE, dtype=torch.uint8, device=device).copy_(host, non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
    event.synchronize()
    del host
    registration.unpin(slab.address)
    slab.close()
