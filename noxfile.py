"""Sessions: `nox -l` lists them, `nox -s tests demo` runs some.

Each sets up an environment of its own. PyTorch is installed first and alone, in one
known version, so that no other package's bounds choose it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
#: One more than there are cores: a test that has started processes waits for them.
WORKERS = min(4, (os.cpu_count() or 1) + 1)
SIDE_BY_SIDE = ("-n", str(WORKERS), "--dist", "loadfile")
#: Hundreds of processes of the tests import the package: each would compile it where a machine
#: says that nobody is to keep what was compiled.
CACHED = {"PYTHONDONTWRITEBYTECODE": None}
#: A test that takes minutes hangs: it ends the run, which names it and what each thread was at.
#: Workers are not started again, as the next one would begin with the file of that test.
LIMITED = (
    *("-o", "faulthandler_timeout=600", "-o", "faulthandler_exit_on_timeout=true"),
    "--max-worker-restart=0",
)
TORCH = os.environ.get("TORCH_SPEC", "torch==2.13.0")
CEPH = ("ceph", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin")
CEPH_INSTALL = (
    "apt-get update && apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd"
)


def install(
    session: nox.Session,
    *groups: str,
    extras: str = "cli,s3",
    torch: str = TORCH,
    compiles: bool = True,
) -> None:
    """Install torch, then the package with extras, and dependency groups.

    Where what is run is `CACHED`, nothing need be compiled before: that takes a minute, and less
    than a third of the modules is imported.
    """
    options = () if compiles else ("--no-compile",)
    session.install(*options, torch)
    needed = [r for group in groups for r in nox.project.dependency_groups(PYPROJECT, group)]
    # torch is named again, or pip takes a later one where it does not fit what others ask for
    session.install("-e", f".[{extras}]", torch, *needed, *options)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the test suite; arguments go to pytest. GPU tests skip where there is no GPU."""
    install(session, "tests", "clouds", compiles=False)
    marks = ("-m", "not stress and not real_s3")
    options = (*SIDE_BY_SIDE, *LIMITED, *marks)
    session.run("python", "-m", "pytest", *options, *session.posargs, env=CACHED)


@nox.session
@nox.parametrize("torch", ["2.6", "2.8", "2.11", "2.15"])
def compat(session: nox.Session, torch: str) -> None:
    """Run the tests of what torch has a part in with other versions of it."""
    install(session, "tests", "clouds", torch=f"torch=={torch}.*")
    parts = ("adapters", "checkpointer", "conversion", "engine", "foreign", "ranks", "staging")
    paths = session.posargs or [f"tests/{part}" for part in (*parts, "state")]
    options = (*SIDE_BY_SIDE, *LIMITED, "-m", "not stress and not real_s3")
    session.run("python", "-m", "pytest", *options, *paths, env=CACHED)


@nox.session
def real_s3(session: nox.Session) -> None:
    """Run the S3 tests against Ceph, SeaweedFS, JuiceFS and Swift; root gets Ceph by apt."""
    need_ceph(session)
    install(session, "tests", "real_s3")
    run_real_s3(session)


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly."""
    install(session, "types", "tests")
    check_types(session)


@nox.session
def beside(session: nox.Session) -> None:
    """Do what `types` and `real_s3` do in one environment, as the gates do beside the tests."""
    install(session, "types", "tests", "real_s3", compiles=False)
    check_types(session)
    need_ceph(session)
    run_real_s3(session)


def need_ceph(session: nox.Session) -> None:
    """Skip the session where Ceph neither is nor can be had."""
    if not all(map(shutil.which, CEPH)) and os.geteuid() == 0 and shutil.which("apt-get"):
        env = {"DEBIAN_FRONTEND": "noninteractive"}
        codes = range(256)  # what matters is whether it is there now
        session.run("sh", "-c", CEPH_INSTALL, external=True, env=env, success_codes=codes)
    if not all(map(shutil.which, CEPH)):
        session.skip(f"needs Ceph: {CEPH_INSTALL}")


def run_real_s3(session: nox.Session) -> None:
    """Run the S3 tests that want a real server."""
    marks = ("-m", "real_s3 and not stress")
    session.run("python", "-m", "pytest", *marks, *session.posargs, env=CACHED)


def check_types(session: nox.Session) -> None:
    """Run mypy, on this file too."""
    session.install("nox")
    session.run("mypy")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and which floor imports which."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "lint"))
    session.install("-e", ".", "--no-deps")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")


@nox.session
def stress(session: nox.Session) -> None:
    """Run what takes long: kills, power cuts; then property tests with new examples."""
    install(session, "tests")
    session.run("python", "-m", "pytest", "-m", "stress", *session.posargs)
    properties = ("-m", "hypothesis and not stress and not real_s3", "--hypothesis-profile=many")
    session.run("python", "-m", "pytest", *SIDE_BY_SIDE, *properties, *session.posargs)


@nox.session(venv_backend="virtualenv", venv_params=["--system-site-packages"])
def gpu(session: nox.Session) -> None:
    """Run the CUDA tests with the torch that is on the machine."""
    session.install("-e", ".[cli,s3]", *nox.project.dependency_groups(PYPROJECT, "tests"))
    session.run("python", "-m", "pytest", "-m", "gpu", *session.posargs)


@nox.session
def standin(session: nox.Session) -> None:
    """Run the CUDA tests on a stand-in for CUDA, without a GPU; downloads 3 GB, needs g++."""
    if shutil.which("g++") is None:
        session.skip("needs a C++ compiler: apt-get install g++")
    install(session, "tests", torch="torch==2.6.0")
    session.install("--no-deps", "nvidia-cuda-nvcc-cu12==12.4.131")  # headers, no compiler
    folder = Path(session.create_tmp()).resolve()
    session.run("python", "-m", "tests.gpu.standin.build", str(folder))
    env = {
        "LD_PRELOAD": str(folder / "libcudart.so.12"),
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join([str(Path("tests/gpu/standin/boot").resolve()), "."]),
    }
    tests = ["tests/gpu", "tests/engine/test_costs.py"]
    session.run("python", "-m", "pytest", "-m", "gpu", *tests, *session.posargs, env=env)


@nox.session
def demo(session: nox.Session) -> None:
    """Train, kill the run in the middle of a save, resume, and compare; about two minutes."""
    install(session)
    session.run("python", "-m", "bench.demo", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure against the peers; arguments name cases. Writes bench/results."""
    install(session, "bench", "peers")
    session.run("python", "-m", "bench", *session.posargs)
