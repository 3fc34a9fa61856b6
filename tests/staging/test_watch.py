from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ckptio.staging.watch import SourceWatch


def test_a_state_is_settled_once() -> None:
    """By the first who asks; what is written afterwards is nobody's business."""
    tensor = torch.zeros(4)
    held = StorageWeakRef(tensor.untyped_storage())
    for is_early in (False, True):
        watch = SourceWatch([tensor])
        if is_early:
            assert watch.settled() is None
            tensor.add_(1)
            watch.copied(is_known=False)
        else:
            watch.copied(is_known=False)
            tensor.add_(1)
        assert watch.settled() == (None if is_early else 0)
        assert watch.settled() == (None if is_early else 0)
        assert not watch.tensors
    known = SourceWatch([tensor])
    known.copied(is_known=True)
    tensor.add_(1)
    assert known.settled() is None
    del tensor
    assert held.expired()


def test_who_looks_while_another_drops_the_tensors_is_told_what_that_one_found() -> None:
    """Several threads may be the first to learn that all is copied; one of them is the last."""

    class Overtaken(SourceWatch):
        """Another thread settles it as soon as this one has begun to look."""

        is_looking = False

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name in ("tensors", "_versions") and self.is_looking:
                self.is_looking = False
                assert self.settled() == 1
            return value

    tensors = [torch.zeros(4), torch.zeros(4)]
    watch = Overtaken(tensors)
    watch.copied(is_known=False)
    tensors[1].add_(1)
    watch.is_looking = True
    assert watch.settled() == 1
    assert not watch.is_looking
    assert not watch.tensors


def test_what_nobody_counts_is_found_from_the_call_on() -> None:
    """A step writes to nearly all of a state; some tensors of all of it are compared."""
    tensors = [torch.zeros(100) for _ in range(1000)]
    watch = SourceWatch(tensors)
    assert watch.changed() is None
    for tensor in tensors[500:600]:
        tensor.numpy()[:] = 1
    found = watch.changed()
    assert found is not None
    assert 500 <= found < 600
    watch.drop()
    assert watch.changed() is None


def test_what_was_copied_is_compared_at_both_ends_and_in_the_middle() -> None:
    """Of each slab: a step that writes to a part of a tensor has begun somewhere in it."""
    tensor = torch.arange(4000).to(torch.uint8)
    slab, watch = tensor.clone(), SourceWatch([tensor])
    watch.sample([(start, 0, start, 1000) for start in range(0, 4000, 1000)], slab.data_ptr())
    for position in (500, 2500, 3500):  # in the middle of the tensor, it is looked at anyway
        assert watch.changed() is None
        tensor.numpy()[position] += 1
        assert watch.changed() == 0
        tensor.numpy()[position] -= 1


def test_what_was_moved_or_written_to_elsewhere_is_found() -> None:
    """Though the bytes that are compared are what they were."""
    for change in ("moved", "written to"):
        tensors = [torch.zeros(1000), torch.zeros(1000)]
        watch = SourceWatch(tensors)
        assert watch.changed() is None
        if change == "moved":
            tensors[1].data = tensors[1].data.clone()
        else:
            tensors[1][0] = 1
        assert watch.changed() == 1
