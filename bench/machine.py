"""The machine, in words that tell how to read the figures and nothing else of it."""

from __future__ import annotations

import importlib.metadata
import os
import platform


def describe_machine(directory: str) -> dict[str, str]:
    """Describe the machine, and the file system that `directory` is on. No names, no paths."""
    return {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "file system": _file_system(directory),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "safetensors": _version("safetensors"),
        "ckptio": _version("ckptio"),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.lower().startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _file_system(directory: str) -> str:
    """Give the type of the file system with the longest mount point above `directory`."""
    path = os.path.realpath(directory)
    best, kind = "", "unknown"
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
            for line in file:
                _, mount, name = line.split()[:3]
                mount = mount.encode().decode("unicode_escape")
                is_above = path == mount or path.startswith(mount.rstrip("/") + "/")
                if is_above and len(mount) >= len(best):
                    best, kind = mount, name
    except OSError:
        pass
    return kind
