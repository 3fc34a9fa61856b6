"""Optimizers of torch's to save and to load into."""

from __future__ import annotations

from typing import Any

import torch


def stepped(name: str, *shape: int, **options: Any) -> torch.optim.Optimizer:
    """Make an optimizer of torch's that has stepped."""
    optimizer = fresh(name, *shape, **options)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def fresh(name: str, *shape: int, **options: Any) -> torch.optim.Optimizer:
    made = getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(shape))], lr=0.1, **options)
    assert isinstance(made, torch.optim.Optimizer)
    return made


NAMES = [
    *("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam"),
    *("ASGD", "Rprop", "Adafactor"),
]
