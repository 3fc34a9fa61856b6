"""Things that go wrong on demand, counted by operation.

A fault is a function that looks at each operation before it happens and raises if it
should not happen. Failing the k-th operation for every k is the whole method: nothing
has to be known of the order in which a save does things, and none of it is missed.

`Crash` stands for SIGKILL. It is no `Exception`, and after it every further operation
crashes too, so no clean-up that a dead process could not have done does anything.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass

from ckptio.errors import StorageError


class Crash(BaseException):
    """The process is dead from here on."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Something a storage is about to do.

    Attributes:
        number: How many came before it.
        kind: Name of the method.
        path: What it is done to, if it has a name.
        nbytes: How many bytes it moves.
    """

    number: int
    kind: str
    path: str = ""
    nbytes: int = 0


#: Raises if an operation must not happen.
Fault = Callable[[Operation], None]


def fail_at(number: int, error: BaseException | int = errno.EIO) -> Fault:
    """Fail one operation.

    Args:
        number: Which, counted from 0.
        error: What to raise; for an errno, the `OSError` the system would raise.
    """

    def fault(operation: Operation) -> None:
        if operation.number == number:
            raise as_error(error, operation)

    return fault


def fail_kind(kind: str, error: BaseException | int = errno.EIO) -> Fault:
    """Fail every operation of one kind; see `fail_at`."""

    def fault(operation: Operation) -> None:
        if operation.kind == kind:
            raise as_error(error, operation)

    return fault


def crash_at(number: int) -> Fault:
    """Crash at operation `number` and at every one after it."""

    def fault(operation: Operation) -> None:
        if operation.number >= number:
            raise Crash(operation)

    return fault


def as_error(error: BaseException | int, operation: Operation) -> BaseException:
    """Give the error to raise at an operation; a system's, if only its number is given."""
    if isinstance(error, int):
        return OSError(error, os.strerror(error), operation.path)
    return error


def as_storage_fault(fault: Fault) -> Fault:
    """Turn a fault's `OSError` into the `StorageError` that a storage promises."""

    def typed(operation: Operation) -> None:
        try:
            fault(operation)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"cannot {operation.kind}: {error.strerror or error}",
                path=operation.path,
                code=error.errno or errno.EIO,
            ) from error

    return typed
