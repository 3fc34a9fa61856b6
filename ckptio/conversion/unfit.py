"""What is said of a checkpoint that is whole, and that no file of the wanted format can hold."""

from __future__ import annotations

from ckptio.errors import FormatError


class UnfitError(FormatError):
    """Names or types of a checkpoint fit no other format: it is not damaged for that."""
