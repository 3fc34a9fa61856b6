from __future__ import annotations

import builtins
import contextlib
import copy
import errno
import importlib
import inspect
import pickle
import pkgutil
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckptio
from ckptio import errors
from ckptio._texts import shown
from ckptio.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitConflictError,
    CorruptionError,
    FormatError,
    MismatchError,
    PlanError,
    RankError,
    StalePlanError,
    StorageError,
    UnsupportedLeafError,
)
from ckptio.ranks.frames import describe

if TYPE_CHECKING:
    from collections.abc import Iterator

CLASSES = [
    item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, Exception)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_one_of_ours_and_in_the_tree(cls: type[Exception]) -> None:
    """One `except CheckpointError` catches all, and the drawing at the head names it."""
    assert issubclass(cls, CheckpointError)
    line = re.search(rf"^.*\b{cls.__name__}\b.*$", str(errors.__doc__), re.MULTILINE)
    assert line is not None
    builtin = re.search(r"\((\w+)\)", line[0])
    if builtin is not None:
        assert issubclass(cls, getattr(builtins, builtin[1]))


#: What constructors are given; those without one of their own take a text.
ARGUMENTS: dict[str, Any] = {
    "causes": {1: "x"},
    "code": errno.ENOSPC,
    "fqns": ["w"],
    "in_doubt": True,
    "mismatched": ["b: shape"],
    "missing": ["a"],
    "ranks": [1],
    "start": 1,
    "stop": 2,
    "unexpected": [],
}


def subclasses(cls: type[CheckpointError]) -> Iterator[type[CheckpointError]]:
    """Every class below `cls` of which the module is imported, and `cls`."""
    yield cls
    for each in cls.__subclasses__():
        yield from subclasses(each)


def made(cls: type[CheckpointError]) -> CheckpointError:
    """Make an error with a value for every argument that its class takes."""
    if inspect.isfunction(init := cls.__init__):
        names = [*inspect.signature(init).parameters][1:]
        return cls(**{name: ARGUMENTS.get(name, f"the {name}") for name in names})
    return cls("the message")


def test_every_error_can_be_pickled_and_copied() -> None:
    """Also those of private modules: a pool of processes sends whatever a task raises."""
    for module in pkgutil.walk_packages(ckptio.__path__, "ckptio."):
        with contextlib.suppress(ImportError):  # of a package that is not installed
            importlib.import_module(module.name)
    for cls in dict.fromkeys(subclasses(CheckpointError)):
        if not cls.__module__.startswith("ckptio."):
            continue  # of a test
        error = made(cls)
        error.add_note("a note")
        pickled = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own
        for found in (pickled, copy.copy(error), copy.deepcopy(error)):
            assert type(found) is cls
            assert (str(found), found.args) == (str(error), error.args)
            assert vars(found) == vars(error)
            for name in ("errno", "strerror", "filename"):
                assert getattr(found, name, None) == getattr(error, name, None)


@pytest.mark.parametrize(
    ("error", "code", "builtin"),
    [
        (CheckpointNotFoundError("/a"), errno.ENOENT, FileNotFoundError),
        (CheckpointExistsError("/a"), errno.EEXIST, FileExistsError),
        (CheckpointChangedError("/a"), errno.ESTALE, OSError),
        (CommitConflictError("/a"), errno.EEXIST, OSError),
        (StorageError("no", path="/a"), errno.EIO, OSError),
        (StorageError("full", path="/a", code=errno.ENOSPC), errno.ENOSPC, OSError),
    ],
    ids=lambda value: type(value).__name__,
)
def test_storage_errors_are_os_errors(
    error: StorageError, code: int, builtin: type[OSError]
) -> None:
    """`errno`, `filename` and the builtin class say what an `OSError` says."""
    assert isinstance(error, builtin)
    assert (error.errno, error.filename) == (code, "/a")
    assert error.message in str(error)
    assert "/a" in str(error)


def test_a_corruption_says_where_it_is() -> None:
    """File, range and names are in the text and in attributes."""
    error = CorruptionError(
        "checksum 1 instead of 2",
        path="/a",
        file="f",
        start=4,
        stop=8,
        fqns=[f"t{i}" for i in range(7)],
    )
    assert str(error) == (
        "'/a' is damaged: checksum 1 instead of 2 in bytes [4, 8) of 'f', which holds"
        " 't0', 't1', 't2', 't3', 't4' and 2 more"
    )
    missing = CorruptionError("no such file", path="/a", file="f", start=0, stop=0)
    assert str(missing) == "'/a' is damaged: no such file: 'f'"
    assert (error.path, error.problem) == ("/a", "checksum 1 instead of 2")
    assert (error.file, error.start, error.stop, len(error.fqns)) == ("f", 4, 8, 7)


def test_a_rank_error_knows_its_causes_with_and_without_a_message() -> None:
    """By the names of their classes: a subclass is another one, and a message may say anything."""
    causes = (PlanError("no: CorruptionError"), FormatError(), StalePlanError(), OSError(5, "no"))
    error = RankError("no", causes={rank: describe(cause) for rank, cause in enumerate(causes, 1)})
    assert [error.was_caused_by(type(cause)) for cause in causes] == [True] * 4
    assert error.was_caused_by(ValueError, FormatError)
    assert not error.was_caused_by(CorruptionError, CheckpointError)
    assert error.was_caused_by(FormatError, rank=2)
    assert not error.was_caused_by(FormatError, rank=1)
    assert not error.was_caused_by(FormatError, rank=0)
    assert not RankError("no").was_caused_by(PlanError)


def test_a_mismatch_lists_what_disagrees() -> None:
    """Kinds of disagreement that do not occur are not in the text."""
    error = MismatchError("/c", ["a"], [], ["b: shape"])
    assert "1 missing from the checkpoint ('a')" in str(error)
    assert "1 mismatched ('b: shape')" in str(error)
    assert "not in the target" not in str(error)
    assert (error.missing, error.unexpected, error.mismatched) == (("a",), (), ("b: shape",))
    assert "select=" not in str(error)  # leaves nothing out of a target
    assert "select= says what to load" in str(MismatchError("/c", [], ["a"], []))


def test_an_unsupported_leaf_says_what_to_do() -> None:
    """The name, the problem and the way out; the name in an attribute, too."""
    error = UnsupportedLeafError("model.fn", "a function", "save its name")
    assert str(error) == "cannot save 'model.fn': a function; save its name"
    assert error.fqn == "model.fn"
    top = UnsupportedLeafError("", "a function", "save its name")
    assert str(top) == "cannot save the state: a function; save its name"
    assert top.fqn == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("cpu", "'cpu'"),
        (2**63, "9223372036854775808"),
        pytest.param(-(10**5000), "a very large int", id="digits"),  # that Python does not write
        ({"model": {"w": [1, 2]}, "step": 3}, "{'model': {...}, 'step': 3}"),
        (["a" * 1000] * 2, None),
        ({str(i): "x" * 1000 for i in range(1000)}, None),
        (torch.zeros(30, 30), None),
        (torch.nn.Sequential(*[torch.nn.Linear(2, 2)] * 50), None),
    ],
)
def test_a_value_of_a_caller_is_shown_in_a_line(value: object, text: str | None) -> None:
    """However large it is."""
    line = shown(value)
    assert text is None or line == text
    assert len(line) < 500
    assert "\n" not in line


@pytest.mark.parametrize("name", ["array", "deque", "dict", "list", "set", "str", "int"])
def test_a_value_of_a_class_that_is_called_as_one_of_python_is_shown(name: str) -> None:
    """As mlx calls its arrays."""
    assert name in shown(type(name, (), {})())
