"""The machine and the code, in words that tell how to read the figures and nothing else."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess

import torch

from ckptio.cli.mounts import file_system_of

#: Packages that a peer is made of, or that a store is reached through.
_PEERS = (
    "safetensors",
    "torchsnapshot",
    "torch_checkpointing",
    "orbax-checkpoint",
    "jax",
    "runai-model-streamer",
    "s3fs",
    "obstore",
    "s3torchconnector",
    "multi-storage-client",
)
_NONE = "not installed"
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def describe_machine(directory: str) -> dict[str, str]:
    """Describe the machine, and the file system that `directory` is on. No names, no paths."""
    return {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "file system": file_system_of(directory) or "unknown",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "ckptio": _version("ckptio"),
        **_device(),
    }


def describe_peers() -> dict[str, str]:
    """Give the version of each peer that is installed."""
    versions = {name: _version(name) for name in _PEERS}
    return {name: version for name, version in versions.items() if version != _NONE}


def describe_code() -> dict[str, str | bool]:
    """Give the commit that is measured, and whether there are changes beside it.

    Results are none: a run writes them. Empty where git does not know the files.
    """
    try:
        commit = _git("rev-parse", "HEAD").strip()
        changes = _git("status", "--porcelain", "--", ".", ":!bench/results")
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"commit": commit, "is_dirty": bool(changes)}


def _git(*arguments: str) -> str:
    command = ["git", "-C", _ROOT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _NONE


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.lower().startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _device() -> dict[str, str]:
    return {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
