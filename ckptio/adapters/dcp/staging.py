"""Staging for `async_save` of torch versions that leave it to the writer: up to 2.8.

Their own stager, and so their stock writer, hands some tensors over as they are: in 2.6 those
on the CPU and DTensors, in 2.8 DTensors that are scalars. What changes while they are being
saved (a step count of an optimizer, say) is saved as changed; and a cache of 2.6 that holds
a DTensor of the trainer's copies the next one into it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed._state_dict_utils import _iterate_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager

if TYPE_CHECKING:
    import torch


class CopyingStager(BlockingAsyncStager):
    """Copies every tensor before `async_save` returns."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state to the CPU. Blocks."""
        if not self.cache_staged_state_dict:
            return _iterate_state_dict(
                state_dict, _own, _own, _own, cpu_offload=True, type_check=False
            )
        # what the cache may hold instead of a copy of it; a second copy, where it does not
        ours = _iterate_state_dict(state_dict, _own_on_cpu, _own_on_cpu, _same, type_check=False)
        return super().stage(ours)


def _own(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    """Copy a tensor on the CPU. One that is elsewhere is copied when it is brought there."""
    return tensor.detach().clone() if tensor.device.type == "cpu" else tensor


def _own_on_cpu(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return _own(tensor).to("cpu")


def _same(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor
