"""Two mounts of one directory of a server: what one does, the other has to see, and at once.

    TEST_MOUNTS=/mnt/1:/mnt/2 python -m pytest -m stress tests/stress/test_mounts.py

Two mounts of NFS on one machine are one client to the server, unless they are made in network
namespaces of their own and under other host names. With an export of 10.9.0.1, in each of two
namespaces that reach it:

    nsenter --net=/run/netns/<n> unshare --uts sh -c 'hostname host<n>;
        mount -t nfs -o vers=4.2 10.9.0.1:/export /mnt/<n>'

Ran so with the client and the server of Linux 6.1, versions 3 and 4.2 of NFS, and one of each; with
CephFS 16, mounted twice by `ceph-fuse`; with a replicated volume of GlusterFS 10, mounted twice;
with two mounts of MooseFS 3; with two of JuiceFS 1.4 (metadata in Redis, objects in a directory),
also with `--writeback`, with `--cache-size 0`, and with names and attributes kept for 5 s; and with
two of SeaweedFS 4.48. sshfs fails: it answers for 20 s from what it knows. So does SMB of Linux
6.1, where tests fail at times: for a second (`actimeo`).
"""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckptio import CheckpointChangedError, CheckpointExistsError, CheckpointNotFoundError, KeepLast
from ckptio.sync import Checkpointer, Engine, load

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.stress
_NUM_ROUNDS = 5


@pytest.fixture
def clients() -> Iterator[tuple[Path, Path]]:
    """Give a path by both clients; nothing is there, and the second client knows it."""
    found = os.environ.get("TEST_MOUNTS", "")
    if not found:
        pytest.skip("TEST_MOUNTS does not name two mounts of one directory of a server")
    name = f"ckptio-{uuid.uuid4().hex}"
    ours, theirs = (Path(mount) / name for mount in found.split(":"))
    assert not theirs.exists()
    yield ours, theirs
    shutil.rmtree(ours, ignore_errors=True)  # on SMB, what was open just now may stay


def state_of(number: int) -> dict[str, Any]:
    return {"n": number, "t": torch.full((100_000,), float(number))}


def assert_is(state: dict[str, Any], number: int) -> None:
    assert state["n"] == number
    assert torch.equal(state["t"], state_of(number)["t"])


def test_what_one_client_overwrites_the_other_loads_at_once(clients: tuple[Path, Path]) -> None:
    """By an engine that has loaded what was there before, and by one that has not."""
    ours, theirs = clients
    with Engine() as saves, Engine() as loads:
        with pytest.raises(CheckpointNotFoundError):
            loads.load(theirs)
        for number in range(_NUM_ROUNDS):
            saves.save(state_of(number), ours, overwrite=True)
            assert_is(loads.load(theirs), number)
            assert_is(load(theirs), number)
            with pytest.raises(CheckpointExistsError):
                loads.save(state_of(number), theirs)
    assert len(list(theirs.iterdir())) == 2  # a manifest, and one data file


def test_what_one_client_lists_as_it_is_saved_it_loads(clients: tuple[Path, Path]) -> None:
    """Whatever it has seen on its way, under names that are gone."""
    ours, theirs = clients
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            for folder in theirs.glob("*"):
                for path in folder.glob("*"):
                    path.exists()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        with Engine() as engine:
            for number in range(4 * _NUM_ROUNDS):
                engine.save(state_of(number), ours / f"step-{number}")
    finally:
        done.set()
        thread.join()
    for number in range(4 * _NUM_ROUNDS):
        assert_is(load(theirs / f"step-{number}"), number)


def test_two_clients_overwrite_in_turns(clients: tuple[Path, Path]) -> None:
    """Each removes what the other left, and nothing else."""
    ours, theirs = clients
    with Engine() as first, Engine() as second:
        for number in range(_NUM_ROUNDS):
            first.save(state_of(number), ours, overwrite=True)
            assert_is(second.load(theirs), number)
            second.save(state_of(-number), theirs, overwrite=True)
            assert_is(first.load(ours), -number)
    assert len(list(ours.iterdir())) == len(list(theirs.iterdir())) == 2


def test_steps_of_one_client_are_found_by_the_other_at_once(clients: tuple[Path, Path]) -> None:
    ours, theirs = clients
    with Checkpointer(ours, keep=KeepLast(2)) as trains, Checkpointer(theirs) as looks:
        assert looks.latest() is None
        new = looks.follow(poll_s=0.1, timeout_s=30.0)
        for step in range(1, _NUM_ROUNDS + 1):
            trains.save(state_of(step), step)
            assert looks.latest() == step == next(new)
            assert looks.steps()[-1] == step
            assert_is(looks.load(), step)
        trains.save(state_of(0), step, overwrite=True)
        assert_is(looks.load(), 0)
        looks.discard_after(step - 1)
        assert trains.latest() == step - 1
        assert_is(trains.load(), step - 1)


def test_a_link_that_one_client_moves_is_followed_by_the_other(clients: tuple[Path, Path]) -> None:
    """At once, also by an engine that followed it before."""
    ours, theirs = clients
    with Engine() as saves, Engine() as loads:
        for number in range(_NUM_ROUNDS):
            saves.save(state_of(number), ours / f"step-{number}")
            (ours / "new").symlink_to(f"step-{number}")
            (ours / "new").rename(ours / "latest")
            assert_is(loads.load(theirs / "latest"), number)


def test_loads_beside_saves_by_another_client_end_well_or_say_so(
    clients: tuple[Path, Path],
) -> None:
    """Whatever the server says of files that have just gone; and no load goes back in time."""
    ours, theirs = clients
    done = threading.Event()

    def save() -> None:
        try:
            with Engine() as engine:
                for number in range(1, 4 * _NUM_ROUNDS):
                    engine.save(state_of(number), ours, overwrite=True)
        finally:
            done.set()

    with Engine() as engine:
        engine.save(state_of(0), ours)
        thread = threading.Thread(target=save)
        thread.start()
        seen = num_loads = 0
        while not done.is_set():
            try:
                state = engine.load(theirs)
            except CheckpointChangedError:
                continue
            assert_is(state, state["n"])
            assert state["n"] >= seen
            seen, num_loads = state["n"], num_loads + 1
        thread.join()
        assert num_loads
        assert_is(engine.load(theirs), 4 * _NUM_ROUNDS - 1)
