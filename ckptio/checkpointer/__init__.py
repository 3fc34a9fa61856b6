"""A run's checkpoints, step by step: save, find, keep, and the last one before the end."""

from ckptio.checkpointer.face import Checkpointer

__all__ = ["Checkpointer"]
