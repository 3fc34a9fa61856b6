"""Staging for `async_save` of torch versions that leave it to the writer.

Their own stager, and so their stock writer, hands tensors on the CPU over as they are: what
changes while they are being saved (a step count of an optimizer, say) is saved as changed.
"""

from __future__ import annotations

from typing import Any

from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager


class CopyingStager(BlockingAsyncStager):
    """Copies every tensor before `async_save` returns."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state to the CPU. Blocks."""
        if self.cache_staged_state_dict:
            return super().stage(state_dict)
        return _copy_state_dict(state_dict, _create_cpu_state_dict(state_dict), type_check=False)
