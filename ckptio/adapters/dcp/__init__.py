"""Plug-ins for torch.distributed.checkpoint (DCP): its planners, and the engine below them.

    dcp.save(state, storage_writer=StorageWriter("run/step-100"))
    dcp.load(state, storage_reader=StorageReader("run/step-100"))

What they write is a checkpoint like any other: `ckptio.load` and the command line read it.
"""

from ckptio.adapters.dcp.reader import StorageReader
from ckptio.adapters.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
