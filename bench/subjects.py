"""Subjects that several cases share: saves, loads and raw limits as the harness wants them."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from bench.baselines import SafetensorsPeer, open_peer
from bench.device import synchronize
from bench.disk import drop_cache, refuses_direct, refuses_drop, tree_nbytes, warm_cache
from bench.harness import Subject, timed
from bench.limits import CopyTarget, MiB, read_blocks, read_verified, write_direct
from bench.states import Proof, as_bytes, blank, state_nbytes
from ckptio import CheckpointConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.baselines import Peer
    from bench.harness import Bench, Figures, Kind, Step
    from bench.states import State
    from ckptio import Engine

_SPARE_SLABS = 8  # the last slab of each file is not full
#: Limits of a disk: bytes of a block, threads.
RAW_SETTINGS = ((4 * MiB, 1), (1 * MiB, 4))


def pool_for(nbytes: int) -> int:
    """Give the size of a pool that holds a state of `nbytes` at once."""
    slab_nbytes = CheckpointConfig().slab_nbytes
    return (-(-nbytes // slab_nbytes) + _SPARE_SLABS) * slab_nbytes


class Saves:
    """Subjects that save one state, check it, and remove it.

    Args:
        bench: Where to.
        state: What to save.
        num_samples: Tensors that are read back after each save.
    """

    def __init__(self, bench: Bench, state: State, *, num_samples: int = 3) -> None:
        self.path = bench.path("saved")
        self.directory = bench.directory
        self.state = state
        self.nbytes = state_nbytes(state)
        self.proof = Proof.of(state)
        self.names = list(self.proof.samples)[-num_samples:]

    async def clean(self) -> None:
        """Remove what was saved."""
        shutil.rmtree(self.path, ignore_errors=True)

    def check_size(self) -> None:
        """Check that the files are as large as the state at least."""
        found = tree_nbytes(self.path)
        assert found >= self.nbytes, f"{found} bytes of {self.nbytes} were written"

    async def check_ckptio(self, engine: Engine) -> None:
        """Check what ckptio saved."""
        self.check_size()
        wanted = frozenset(self.names)
        loaded = await engine.load(self.path, select=lambda name: name in wanted)
        self.proof.check_some(loaded, self.names)

    async def check_peer(self, peer: Peer) -> None:
        """Check what a peer saved."""
        self.check_size()
        self.proof.check_some(peer.read(self.path, self.names, self.state), self.names)

    def ckptio(self, engine: Engine, name: str) -> Subject:
        """Save with an engine, until the commit."""

        async def run() -> Figures:
            figures: dict[str, float] = {}
            with timed(figures):
                await engine.save(self.state, self.path)
            return figures

        async def check() -> None:
            await self.check_ckptio(engine)

        return Subject(name=name, kind="ckptio", run=run, check=check, clean=self.clean)

    def peer(self, peer: Peer) -> Subject:
        """Save with a peer."""

        async def prepare() -> None:
            open_peer(peer)

        async def run() -> Figures:
            figures: dict[str, float] = {}
            with timed(figures):
                peer.save(self.state, self.path)
            return figures

        async def check() -> None:
            await self.check_peer(peer)

        return Subject(
            name=peer.name,
            prepare=prepare,
            run=run,
            check=check,
            clean=self.clean,
            is_slow=peer.is_slow,
            missing=peer.missing,
        )

    def raw(self, key: str = "elapsed_s") -> list[Subject]:
        """Write as many bytes, directly and durably."""
        return [self._raw(key, *setting) for setting in RAW_SETTINGS]

    def _raw(self, key: str, block_nbytes: int, num_threads: int) -> Subject:
        async def run() -> Figures:
            figures: dict[str, float] = {}
            os.mkdir(self.path)
            with timed(figures, key):
                write_direct(
                    os.path.join(self.path, "raw"),
                    self.nbytes,
                    block_nbytes=block_nbytes,
                    num_threads=num_threads,
                )
            return figures

        async def check() -> None:
            self.check_size()

        return Subject(
            name=f"limit: direct write, {block_nbytes // MiB} MiB x {num_threads}",
            kind="limit",
            run=run,
            check=check,
            clean=self.clean,
            missing=refuses_direct(self.directory),
        )


class Loads:
    """Subjects that load one checkpoint, in each format, into the same tensors.

    Args:
        bench: Where the checkpoints are.
        target: What was saved, and what is filled.
        peers: What to compare with.
    """

    def __init__(self, bench: Bench, target: State, peers: Sequence[Peer]) -> None:
        self.target = target
        self.nbytes = state_nbytes(target)
        self._bench = bench
        self._peers = peers
        self._proof = Proof.of(target)
        self._ours = bench.path("load-ckptio")
        self._raw_file = os.path.join(bench.path("load-raw"), "raw")

    async def save(self, engine: Engine) -> None:
        """Save the state in each format, once."""
        await engine.save(self.target, self._ours)
        self._save_peers()

    def _save_peers(self) -> None:
        for peer in self._peers:
            path = self._path(peer)
            if not (peer.missing or os.path.exists(path)):
                self._bench.say(f"{self._bench.case}: writing, for {peer.load_name}")
                peer.save(self.target, path)
        os.mkdir(os.path.dirname(self._raw_file))
        with open(self._raw_file, "wb") as file:
            file.writelines(as_bytes(t).cpu().numpy().data for t in self.target.values())

    def _path(self, peer: Peer) -> str:
        return os.path.join(self._bench.directory, f"load-{type(peer).__name__}")

    def subjects(self, engine: Engine, *, is_cold: bool) -> list[Subject]:
        """Load with ckptio and with each peer, and read as many bytes into a small buffer.

        Args:
            engine: What loads.
            is_cold: Whether files are dropped from the page cache before, or read into it.
        """

        async def ours() -> None:
            await engine.load(self._ours, into=self.target)

        return [
            self._load("ckptio", self._ours, ours, is_cold=is_cold, kind="ckptio"),
            *self._theirs(engine, is_cold=is_cold),
            *(self._peer(peer, is_cold=is_cold) for peer in self._peers),
            *(self._raw(*setting, is_cold=is_cold) for setting in RAW_SETTINGS),
            *([] if is_cold else [self._verified(2)]),
        ]

    def _theirs(self, engine: Engine, *, is_cold: bool) -> list[Subject]:
        """Load with ckptio what safetensors wrote: the same bytes, and no checksums to check."""
        peers = [p for p in self._peers if isinstance(p, SafetensorsPeer) and not p.missing]
        path = self._path(peers[0]) if peers else ""

        async def load() -> None:
            await engine.load(f"{path}/state.safetensors", into=self.target)

        name = "ckptio, the file of safetensors"
        return [self._load(name, path, load, is_cold=is_cold, kind="ckptio")] if path else []

    def _peer(self, peer: Peer, *, is_cold: bool) -> Subject:
        path = self._path(peer)

        async def load() -> None:
            peer.load(path, self.target)

        return self._load(
            peer.load_name,
            path,
            load,
            is_cold=is_cold,
            ready=lambda: open_peer(peer),
            missing=peer.missing,
        )

    def _load(
        self,
        name: str,
        path: str,
        load: Step,
        *,
        is_cold: bool,
        kind: Kind = "peer",
        ready: Callable[[], None] | None = None,
        missing: str = "",
    ) -> Subject:
        async def prepare() -> None:
            if ready is not None:
                ready()
            blank(self.target)
            _bring(path, is_cold=is_cold)

        async def run() -> Figures:
            figures: dict[str, float] = {}
            with timed(figures):
                await load()
                synchronize()
            return figures

        async def check() -> None:
            self._proof.check(self.target)

        return Subject(
            name=name,
            kind=kind,
            prepare=prepare,
            run=run,
            check=check,
            missing=missing or self._refused(is_cold=is_cold),
        )

    def _refused(self, *, is_cold: bool) -> str:
        return refuses_drop(self._bench.directory) if is_cold else ""

    def _raw(self, block_nbytes: int, num_threads: int, *, is_cold: bool) -> Subject:
        async def prepare() -> None:
            _bring(self._raw_file, is_cold=is_cold)

        async def run() -> Figures:
            figures: dict[str, float] = {}
            with timed(figures):
                read_blocks(
                    self._raw_file,
                    block_nbytes=block_nbytes,
                    num_threads=num_threads,
                    is_direct=is_cold,
                )
            return figures

        how = "direct read" if is_cold else "read of the page cache"
        refused = self._refused(is_cold=is_cold)
        return Subject(
            name=f"limit: {how}, {block_nbytes // MiB} MiB x {num_threads}",
            kind="limit",
            prepare=prepare,
            run=run,
            missing=refused or (refuses_direct(self._bench.directory) if is_cold else ""),
        )

    def _verified(self, num_threads: int) -> Subject:
        target = CopyTarget(os.path.getsize(self._raw_file))

        async def prepare() -> None:
            _bring(self._raw_file, is_cold=False)

        async def run() -> Figures:
            figures: dict[str, float] = {}
            with timed(figures):
                read_verified(self._raw_file, target, block_nbytes=MiB, num_threads=num_threads)
            return figures

        return Subject(
            name=f"limit: sum and copy out of a map, 1 MiB x {num_threads}",
            kind="limit",
            prepare=prepare,
            run=run,
        )


def _bring(path: str, *, is_cold: bool) -> None:
    """Bring the files below a path out of the page cache, or into it."""
    if is_cold:
        drop_cache(path)
    else:
        warm_cache(path)
