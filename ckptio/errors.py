"""Every error ckptio raises on purpose, in one tree.

    CheckpointError
    ├── ConfigError (ValueError)              an option is wrong or would have no effect
    │   └── OutOfStepError                    ranks met in different calls
    ├── EngineClosedError (RuntimeError)      the engine was used outside its `async with`
    ├── SaveAbortedError                      a save was cancelled through its handle or its engine
    ├── StagingError (MemoryError)            the system gives no memory to stage in
    ├── StateError
    │   └── UnsupportedLeafError (TypeError)  a value has no portable form; nothing was written
    ├── TargetError (ValueError)              a target tensor cannot be filled
    │   └── MismatchError                     target and checkpoint differ in names or shapes
    ├── PlanError (ValueError)                shards that cannot be laid out
    │   └── StalePlanError                    a plan that some ranks followed; the next is another
    ├── RankError                             it failed on some rank, so it failed on all
    │   └── PeerLostError (ConnectionError)   a rank died, froze or left, or never joined
    ├── FormatError (ValueError)              bytes that are not a checkpoint of ours
    │   ├── RankFormatError                   some rank found that, so all raise it; a RankError
    │   ├── FormatVersionError                a newer format than this version reads
    │   ├── UnknownFormatError                nothing is wrong with it, and nothing here reads it
    │   └── CorruptionError                   a checksum or a size is not what the manifest says
    └── StorageError (OSError)                the storage said no; `errno` and `filename` are set
        ├── CheckpointNotFoundError (FileNotFoundError)
        ├── CheckpointExistsError (FileExistsError)
        ├── CheckpointChangedError            overwritten or removed while it was being read
        └── CommitConflictError               somebody else committed to the path first

What refines an error of a builtin kind, given here in brackets, is one of that kind, and so
is what is drawn below it: `except OSError` around a save keeps working. Messages say what,
where and what to do. What a caller may want to act on is in attributes too.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from ckptio._texts import some_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class CheckpointError(Exception):
    """Root of every error that ckptio raises on purpose.

    Each can be pickled and copied, with its text and its attributes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Come back with the text and the attributes, whatever a constructor takes."""
        args = self.args
        if isinstance(self, OSError) and self.filename is not None:
            args = (self.errno, self.strerror, self.filename)
        return _remade, (type(self), args, self.__dict__)


def _remade(cls: type[CheckpointError], args: tuple[Any, ...], attributes: Any) -> CheckpointError:
    """Make an error again, from what `__reduce__` gave."""
    # `cls.__new__` would be that of `MemoryError` for some, and Python refuses to call it for them
    error: CheckpointError = (OSError if issubclass(cls, OSError) else Exception).__new__(cls)
    if isinstance(error, OSError):
        OSError.__init__(error, *args)
    else:
        error.args = args
    error.__dict__.update(attributes)
    return error


class ConfigError(CheckpointError, ValueError):
    """An option is wrong, or would have no effect where it was given."""


class OutOfStepError(ConfigError):
    """Ranks met in different calls, or in one call with different options; nothing is committed.

    Among the `causes` of a `RankError` on all of them. The engines begin nothing together after it.
    """


class EngineClosedError(CheckpointError, RuntimeError):
    """The engine is not open: not entered yet, left meanwhile, or the parent's of a forked process.

    Entering raises it where the system gives the engine no thread or no descriptors, and for an
    engine that was entered before.
    """


class SaveAbortedError(CheckpointError):
    """A save was aborted before its commit; what was at the path is untouched."""


class StagingError(CheckpointError, MemoryError):
    """The system gives no memory to stage in. Nothing was committed, and nothing is lost."""


class StateError(CheckpointError):
    """Something outside of the checkpoint keeps a save or load from being done.

    The state was changed before it was copied, or has a part that cannot be saved; a CUDA graph is
    being captured; a device has failed; or somebody cancelled a task of the engine's own.
    """


class UnsupportedLeafError(StateError, TypeError):
    """A value of the state has no portable form, or fails to say what it is. Nothing was written.

    Attributes:
        fqn: Where the value is in the state.
        problem: What is wrong with it.
        way_out: What to do.
    """

    def __init__(self, fqn: str, problem: str, way_out: str) -> None:
        """Say that the value at `fqn` has `problem`, and the `way_out`."""
        super().__init__(f"cannot save {repr(fqn) if fqn else 'the state'}: {problem}; {way_out}")
        self.fqn, self.problem, self.way_out = fqn, problem, way_out


class TargetError(CheckpointError, ValueError):
    """A target of `load` cannot be filled. No target byte was changed, or the message says so."""


class MismatchError(TargetError):
    """Target and checkpoint disagree. No target byte was changed.

    Attributes:
        missing: Names in the target that the checkpoint does not have.
        unexpected: Names in the checkpoint that the target does not have.
        mismatched: One line for each name whose shape, dtype or kind differs.
    """

    def __init__(
        self,
        path: str,
        missing: Sequence[str],
        unexpected: Sequence[str],
        mismatched: Sequence[str],
        hint: str = "",
    ) -> None:
        """List the disagreements between the checkpoint at `path` and a target.

        Args:
            path: The checkpoint.
            missing: As the attribute.
            unexpected: As the attribute.
            mismatched: As the attribute.
            hint: What would make them agree, if that is known.
        """
        self.missing: tuple[str, ...] = tuple(missing)
        self.unexpected: tuple[str, ...] = tuple(unexpected)
        self.mismatched: tuple[str, ...] = tuple(mismatched)
        self._path, self._hint = path, hint
        parts = [
            f"{len(names)} {kind} ({some_of(names)})"
            for kind, names in (
                ("missing from the checkpoint", self.missing),
                ("not in the target", self.unexpected),
                ("mismatched", self.mismatched),
            )
            if names
        ]
        report = "load_with_report(..., strict='report') loads what fits and says what does not"
        ways_out = f"{report}, strict='ignore'"
        if hint:
            ways_out = f"{hint}; {ways_out}"
        elif self.unexpected and not self.missing:
            ways_out = f"select= says what to load, {ways_out}"
        super().__init__(
            f"checkpoint {path!r} does not fit the target: {'; '.join(parts)};"
            f" {ways_out} does so without a word"
        )

    def of_unexpected(self, names: Sequence[str]) -> MismatchError:
        """Give the same error of these names in the checkpoint, and nothing else."""
        return MismatchError(self._path, (), names, (), self._hint)


class PlanError(CheckpointError, ValueError):
    """Shards that cannot be laid out: gaps, overlaps or disagreement."""


class StalePlanError(PlanError):
    """A plan that ranks followed fits no more, as blocks of some changed; the next save makes one.

    The states fit each other: the same state, saved again, is no error.
    """


class RankError(CheckpointError):
    """What ranks did together failed on some of them, and so on all of them.

    Every rank raises it with the same text; one whose own failure it was raises it `from`
    that failure.

    Attributes:
        causes: What went wrong, by rank: an error as `"Class: message"`, or as `"Class"` if it
            has no message. Of some ranks, where very many failed. A rank that was only stopped
            because of another is not among them.
        in_doubt: The coordinator had begun to decide and nobody heard the decision: what
            was being decided (a commit, for one) may have happened.
    """

    def __init__(
        self, message: str, *, causes: Mapping[int, str] | None = None, in_doubt: bool = False
    ) -> None:
        """Say `message`."""
        super().__init__(message)
        self.causes: dict[int, str] = dict(causes or {})
        self.in_doubt = in_doubt

    def was_caused_by(self, *kinds: type[BaseException], rank: int | None = None) -> bool:
        """Whether one of `causes` is an error of one of these classes.

        Errors of other ranks are known by the name of their class only, so subclasses have to
        be given as well.

        Args:
            kinds: The classes.
            rank: Look at the cause on this rank only, rather than on all of them.
        """
        names = {kind.__name__ for kind in kinds}
        found = self.causes.values() if rank is None else [self.causes.get(rank, "")]
        return any(cause.partition(":")[0] in names for cause in found)


class PeerLostError(RankError, ConnectionError):
    """A rank died, froze or closed its engine, or never joined the others.

    A rank that is alive but does not make the call that the others make is not lost: that is a
    plain `RankError`, after `meet_timeout_s`.

    Attributes:
        ranks: Which.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int],
        causes: Mapping[int, str] | None = None,
        in_doubt: bool = False,
    ) -> None:
        """Say `message` about `ranks`."""
        super().__init__(message, causes=causes, in_doubt=in_doubt)
        self.ranks: tuple[int, ...] = tuple(ranks)


class FormatError(CheckpointError, ValueError):
    """Bytes that are not a checkpoint of this format."""


class RankFormatError(RankError, FormatError):
    """What ranks load together is damaged, or no checkpoint: every rank can go on with another.

    A rank that finds it before it meets the others raises its own `FormatError`.
    """


class FormatVersionError(FormatError):
    """The checkpoint has a format that this version of ckptio does not read."""


class UnknownFormatError(FormatError):
    """What is there is of no format that is read here, or is more than data, or lies elsewhere.

    Nothing says that it is damaged. It is there all the same: a run that would begin anew where
    it finds no checkpoint has to hear of it.
    """


class CorruptionError(FormatError):
    """A checksum or a size is not what the manifest says.

    Attributes:
        path: The checkpoint.
        file: Name of the damaged file inside the checkpoint.
        problem: What is wrong with it.
        start: First byte of the damaged range in that file.
        stop: End of the damaged range, exclusive.
        fqns: Names of tensors that have bytes in the range, a few at most.
    """

    def __init__(
        self,
        problem: str,
        *,
        path: str,
        file: str,
        start: int,
        stop: int,
        fqns: Sequence[str] = (),
    ) -> None:
        """Say that bytes `[start, stop)` of `file` in checkpoint `path` have `problem`."""
        held = f", which holds {some_of(fqns)}" if fqns else ""
        where = f" in bytes [{start}, {stop}) of {file!r}" if start < stop else f": {file!r}"
        super().__init__(f"{path!r} is damaged: {problem}{where}{held}")
        self.path = path
        self.problem = problem
        self.file = file
        self.start = start
        self.stop = stop
        self.fqns: tuple[str, ...] = tuple(fqns)


class StorageError(CheckpointError, OSError):
    """The storage refused an operation. `errno` and `filename` say which and where.

    Attributes:
        in_doubt: A save failed during its commit, and the commit may have happened: look
            whether the checkpoint is there. Otherwise the path holds what it held before.
    """

    def __init__(
        self, message: str, *, path: str, code: int = errno.EIO, in_doubt: bool = False
    ) -> None:
        """Say `message` about `path`; `code` is an `errno` value."""
        super().__init__(code, message, path)
        self.in_doubt = in_doubt

    @property
    def message(self) -> str:
        """The text without errno and path."""
        return str(self.strerror)


class CheckpointNotFoundError(StorageError, FileNotFoundError):
    """There is no committed checkpoint at the path."""

    def __init__(self, path: str, hint: str = "there is no committed checkpoint here") -> None:
        """Say that `path` holds no checkpoint."""
        super().__init__(hint, path=path, code=errno.ENOENT)


class CheckpointExistsError(StorageError, FileExistsError):
    """The path holds a committed checkpoint and `overwrite` is off."""

    def __init__(
        self,
        path: str,
        way_out: str = "pass overwrite=True to replace it",
        problem: str = "there is a committed checkpoint here",
    ) -> None:
        """Say that `path` is taken, and what to do about it."""
        super().__init__(
            f"{problem}; {way_out}",
            path=path,
            code=errno.EEXIST,
        )


class CheckpointChangedError(StorageError):
    """The checkpoint was overwritten or removed while it was being read."""

    def __init__(
        self,
        path: str,
        problem: str = "the checkpoint was overwritten or removed while it was being read",
    ) -> None:
        """Say that `path` changed under a reader."""
        super().__init__(
            f"{problem}; load it again",
            path=path,
            code=errno.ESTALE,
        )


class CommitConflictError(StorageError):
    """Another writer committed to the path first; its checkpoint stands.

    If `in_doubt` is set, a request of this save may still take effect, should that be removed.
    """

    def __init__(self, path: str, *, in_doubt: bool = False) -> None:
        """Say that another save won `path`."""
        said = "another save committed a checkpoint here while this one was running"
        if in_doubt:
            said += "; should that be removed just now, nobody knows whether this one's comes"
        super().__init__(said, path=path, code=errno.EEXIST, in_doubt=in_doubt)
