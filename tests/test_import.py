from __future__ import annotations

import ast
import builtins
import collections.abc
import subprocess
import sys
import types
import typing

import pytest

HEAVY = ("torch", "numpy", "fsspec", "typer", "rich")


def modules_after(code: str) -> set[str]:
    """Run code in an interpreter of its own; give the heavy modules it has then."""
    script = f"import sys\n{code}\nprint('\\nHEAVY', *(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], check=True, capture_output=True, text=True
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    "code",
    [
        "import ckptio",
        "import ckptio; ckptio.errors.CheckpointError; ckptio.CheckpointError",
        "import ckptio; ckptio.verify; ckptio.inspect; ckptio.Engine; ckptio.save",
        "import ckptio; ckptio.CheckpointConfig(); ckptio.sync.Engine(); dir(ckptio)",
        "import ckptio; ckptio.Checkpointer('run'); ckptio.sync.Checkpointer('run')",
        "import ckptio; ckptio.KeepLast(3) | ckptio.KeepSteps(1); ckptio.SaveEvery(steps=9)",
        "import ckptio; ckptio.KeepBest(1, 'loss', 'min')",
        "import ckptio; ckptio.Checkpointer('s3://bucket/run'); ckptio.Checkpointer('memory://run')",
        "from ckptio import CheckpointConfig, SaveHandle, VerifyReport",
        "from ckptio import Manifest, Milestone, Observer, PathLike, RanksLike, Strict",
        "import ckptio.testing",
    ],
)
def test_importing_loads_nothing_heavy(code: str) -> None:
    """Neither torch nor anything else that takes long, until a tensor is touched."""
    assert modules_after(code) == set()


def test_importing_sets_off_no_collection() -> None:
    """But for the one that comes behind it: what is imported stays."""
    script = """
import gc, ckptio
gc.set_threshold(100)
began = []
gc.callbacks.append(lambda phase, info: began.append(phase))
ckptio.Engine
gc.disable()
print(began.count("start"))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) <= 1


def names_in(annotation: object) -> set[str]:
    """Names that an annotation is made of, also inside quotes."""
    if not isinstance(annotation, str):
        return {getattr(annotation, "__name__", "")}
    tree = ast.parse(annotation, mode="eval")
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_every_type_of_an_argument_or_a_result_has_a_public_name() -> None:
    """Whoever wraps a call can annotate the wrapper without importing from our modules."""
    import ckptio.sync  # noqa: PLC0415  # its names are looked at one by one

    members: list[object] = [getattr(ckptio, name) for name in ckptio.__all__]
    members += [getattr(ckptio.sync, name) for name in ckptio.__all__ if name in dir(ckptio.sync)]
    for kind in [member for member in members if isinstance(member, type)]:
        public = [value for name, value in vars(kind).items() if not name.startswith("_")]
        members += [kind.__init__, *public]  # type: ignore[misc]  # of no instance
    wanted: set[str] = set()
    for member in members:
        function = getattr(member, "fget", getattr(member, "__func__", member))
        for annotation in getattr(function, "__annotations__", {}).values():
            wanted |= names_in(annotation)
    theirs = {*dir(builtins), *dir(typing), *dir(collections.abc), *dir(types)}
    theirs |= {"asyncio", "dt", "msgspec", "torch", ""}  # modules, and what is no name
    private = {"Box", "Chunk", "Metadata", "T"}  # parts of a manifest, and a variable
    private |= {"Moment", "SaveMoments"}  # what the engine makes handles of
    assert wanted - theirs - private <= set(ckptio.__all__)


def test_verifying_needs_no_torch(tmp_path: object) -> None:
    """A checkpoint is looked at and verified without torch."""
    import torch  # noqa: PLC0415  # here it is needed, there it is not

    import ckptio.sync  # noqa: PLC0415  # as above

    ckptio.sync.save({"a": torch.ones(10)}, f"{tmp_path}/c")
    found = modules_after(
        f"import ckptio; assert ckptio.sync.verify({f'{tmp_path}/c'!r}).is_whole;"
        f" assert ckptio.sync.inspect({f'{tmp_path}/c'!r}).nbytes"
    )
    assert "torch" not in found


def test_looking_after_steps_needs_no_torch(tmp_path: object) -> None:
    """Finding steps, removing some, and leaving: until a state is saved or loaded."""
    import torch  # noqa: PLC0415  # here it is needed, there it is not

    import ckptio.sync  # noqa: PLC0415  # as above

    with ckptio.sync.Checkpointer(f"{tmp_path}/run") as ckpt:
        for step in (1, 2, 3):
            ckpt.save({"a": torch.ones(10)}, step)
    found = modules_after(
        "import ckptio\n"
        f"with ckptio.sync.Checkpointer({f'{tmp_path}/run'!r}) as ckpt:\n"
        "    assert ckpt.steps() == (1, 2, 3)\n"
        "    assert ckpt.latest() == ckpt.records()[-1].step == 3\n"
        "    assert not ckpt.should_save(1)"
    )
    assert not {"torch", "numpy", "fsspec"} & found


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["ls", "--help"], ["prune", "--help"]]
)
def test_the_command_line_needs_no_torch(arguments: list[str]) -> None:
    """Asking for help does not wait for torch."""
    pytest.importorskip("typer", reason="the command line is an extra")
    found = modules_after(
        f"import runpy\nsys.argv = ['ckptio', *{arguments!r}]\n"
        "try:\n    runpy.run_module('ckptio', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n    assert end.code in (0, None), end.code"
    )
    assert "torch" not in found


def test_every_public_name_is_there() -> None:
    """What `__all__` lists can be had, and nothing that is not there."""
    import ckptio  # noqa: PLC0415  # its names are looked at one by one

    for name in ckptio.__all__:
        assert getattr(ckptio, name) is not None
    assert set(ckptio.__all__) == set(dir(ckptio))
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = ckptio.nothing_of_that_name
