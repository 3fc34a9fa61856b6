"""Build the stand-in's libraries: `python -m tests.gpu.standin.build FOLDER`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parent / "runtime"
OPTIONS = ("g++", "-std=c++20", "-O1", "-Wall", "-shared", "-fPIC", "-pthread")


def build(folder: Path) -> None:
    """Make `libcudart.so.12` and `libcuda.so.1` in a folder. Headers come with torch's own."""
    spec = importlib.util.find_spec("nvidia")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("torch's build for CUDA is not installed")
    packages = Path(next(iter(spec.submodule_search_locations)))
    headers = [f"-isystem{packages / name / 'include'}" for name in ("cuda_runtime", "cuda_nvcc")]
    folder.mkdir(parents=True, exist_ok=True)
    runtime, driver = folder / "libcudart.so.12", folder / "libcuda.so.1"
    parts = [SOURCES / f"{name}.cpp" for name in ("world", "memory", "streams", "kernels")]
    names = [f"-Wl,-soname,{runtime.name}", f"-Wl,--version-script={SOURCES / 'cudart.map'}"]
    subprocess.run([*OPTIONS, *headers, *parts, *names, "-o", runtime], check=True)
    last = [str(SOURCES / "driver.cpp"), str(runtime), f"-Wl,-soname,{driver.name}"]
    subprocess.run([*OPTIONS, *last, "-o", driver], check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
