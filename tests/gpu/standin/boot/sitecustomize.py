"""Puts the stand-in's operators in wherever torch is imported, in child processes, too.

Python runs this when it starts, if its folder is on the path.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class AfterTorch:
    """Finds torch as it would be found, once, and has more done when it is there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module; see `importlib.abc.MetaPathFinder`."""
        del path, target
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            from tests.gpu.standin.operators import install  # noqa: PLC0415  # needs torch

            install()

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, AfterTorch())
