from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ckptio import Checkpointer, Engine, sync
from ckptio.adapters.dcp import StorageReader, StorageWriter
from ckptio.config import CheckpointConfig, KiB, MiB
from ckptio.errors import ConfigError
from tests.rig import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_the_defaults_are_valid() -> None:
    """An engine without options works."""
    assert CheckpointConfig().num_slabs == 15


def test_options_are_frozen() -> None:
    """Nobody changes an engine's options behind its back."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        CheckpointConfig().max_writes = 2  # type: ignore[misc]  # that is what is tested


@pytest.mark.parametrize(
    "name",
    [f.name for f in dataclasses.fields(CheckpointConfig) if isinstance(f.default, int)],
)
@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True, None, 1 << 63])
def test_a_number_that_is_no_positive_int_is_refused(name: str, value: object) -> None:
    """Floats, strings, booleans, zero, negative and endless numbers are named and refused."""
    problem = rf"{name} must be a positive int below 2\*\*63, not {value!r}"
    with pytest.raises(ConfigError, match=problem):
        CheckpointConfig(**{name: value})  # type: ignore[arg-type]  # that is what is tested


@pytest.mark.parametrize(
    "name",
    [f.name for f in dataclasses.fields(CheckpointConfig) if isinstance(f.default, float)],
)
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "4", True, None, 1000000001])
def test_a_deadline_that_is_no_positive_number_is_refused(name: str, value: object) -> None:
    """Zero, negative, endless and undefined times are refused, and what is no number."""
    if name == "cache_ttl_s" and value == 0 and type(value) is int:
        assert CheckpointConfig(cache_ttl_s=0).cache_ttl_s == 0  # trust nothing
        return
    orzero = " or 0" if name == "cache_ttl_s" else ""
    problem = rf"{name} must be a positive number{orzero}, at most 1e\+09, not {value!r}"
    with pytest.raises(ConfigError, match=problem):
        CheckpointConfig(**{name: value})  # type: ignore[arg-type]  # that is what is tested


def test_deadlines_are_floats_or_ints() -> None:
    """Half a second is a deadline, and so is a whole number of them."""
    config = CheckpointConfig(peer_timeout_s=0.5, meet_timeout_s=90)
    assert (config.peer_timeout_s, config.meet_timeout_s) == (0.5, 90)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"durability": "half"}, "durability must be none, file or full, not 'half'"),
        ({"direct_io": "on"}, "direct_io must be auto or off, not 'on'"),
        ({"replicate": "all"}, "replicate must be once or local, not 'all'"),
        ({"replicate": True}, "replicate must be once or local, not True"),
        ({"exchange": "never"}, "exchange must be auto, on or off, not 'never'"),
        ({"exchange": None}, "exchange must be auto, on or off, not None"),
        ({"durability": np.array(["full", "file"])}, "durability must be none, file or full, not"),
        ({"block_nbytes": 5000}, "block_nbytes must be a multiple of 4096"),
        ({"slab_nbytes": 3 * MiB + 4096}, "slab_nbytes must be a multiple of block_nbytes"),
        ({"pool_nbytes": 8 * MiB}, r"pool_nbytes must be at least slab_nbytes \(16777216\)"),
        ({"local_replica_nbytes": 4096}, "no effect without replicate='local'"),
        ({"file_mode": 0o1644}, "file_mode must be permission bits, at most 0o777.* not 0o1644"),
        ({"dir_mode": 0o1755}, "dir_mode must be permission bits, at most 0o777.* not 0o1755"),
        ({"file_mode": 0o444}, r"file_mode must be .*own \(0o600\), not 0o444"),
        ({"file_mode": 0o200}, r"file_mode must be .*own \(0o600\), not 0o200"),
        ({"dir_mode": 0o600}, r"dir_mode must be .*own \(0o700\), not 0o600"),
        ({"dir_mode": 0o555}, r"dir_mode must be .*own \(0o700\), not 0o555"),
        ({"file_mode": 600}, r"not 0o1130; did you mean 0o600\?"),
        ({"file_mode": 0o1644}, "not 0o1644$"),
    ],
)
def test_an_option_that_does_not_fit_the_others_is_refused(
    options: dict[str, Any], problem: str
) -> None:
    """The message says which option, and what it would have to be."""
    with pytest.raises(ConfigError, match=problem):
        CheckpointConfig(**options)


def test_limits_up_to_the_number_of_slabs_are_taken() -> None:
    """As many writers as slabs is the most that has an effect."""
    config = CheckpointConfig(
        pool_nbytes=2 * KiB * 16, slab_nbytes=16 * KiB, block_nbytes=4 * KiB,
        max_writes=2, max_reads=2, max_copies=2,
    )  # fmt: skip
    assert config.num_slabs == 2


def test_options_come_from_the_environment() -> None:
    """Names in capitals behind a prefix; numbers in any base; other variables do not matter."""
    config = CheckpointConfig.from_env(
        {
            "CKPTIO_MAX_WRITES": "3",
            "CKPTIO_FILE_MODE": "0o640",
            "CKPTIO_SLAB_NBYTES": "0x400000",
            "CKPTIO_DURABILITY": "file",
            "CKPTIO_PEER_TIMEOUT_S": "2.5",
            "CKPTIO_MEET_TIMEOUT_S": "90",
            "CKPTIO_REPLICATE": "local",
            "CKPTIO_EXCHANGE": "off",
            "HOME": "/root",
        }
    )
    assert config == CheckpointConfig(
        max_writes=3, file_mode=0o640, slab_nbytes=4 * MiB, durability="file",
        peer_timeout_s=2.5, meet_timeout_s=90.0, replicate="local", exchange="off",
    )  # fmt: skip


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument `os.environ` is read, when it is called and not before."""
    monkeypatch.setenv("CKPTIO_MAX_SAVES", "5")
    assert CheckpointConfig.from_env().max_saves == 5
    assert CheckpointConfig().max_saves == 2


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ("CKPTIO_MAX_SAVES=3", "environ= is a mapping of variables, not 'CKPTIO_MAX_SAVES=3'"),
        ({"CKPTIO_MAX_SAVES": 3}, "environ= has strings alone, not 'CKPTIO_MAX_SAVES': 3"),
        ({"CKPTIO_MAX_WRITERS": "3"}, "CKPTIO_MAX_WRITERS names no option; options are pool_nby"),
        ({"CKPTIO_MAX_WRITES": "many"}, "CKPTIO_MAX_WRITES must be an int, not 'many'"),
        ({"CKPTIO_FILE_MODE": "0640"}, r"must be an int \(octal: 0o640\), not '0640'"),
        ({"CKPTIO_MAX_WRITES": "0"}, "max_writes must be a positive int"),
        ({"CKPTIO_DURABILITY": "FULL"}, "durability must be"),
        ({"CKPTIO_PEER_TIMEOUT_S": "soon"}, "CKPTIO_PEER_TIMEOUT_S must be a number, not 'soon'"),
        ({"CKPTIO_MEET_TIMEOUT_S": "inf"}, "meet_timeout_s must be a positive number"),
        ({"CKPTIO_EXCHANGE": "yes"}, "exchange must be auto, on or off, not 'yes'"),
    ],
)
def test_a_bad_variable_is_refused(environ: dict[str, str], problem: str) -> None:
    """A misspelt option in the environment is an error, not a surprise."""
    with pytest.raises(ConfigError, match=problem):
        CheckpointConfig.from_env(environ)


@pytest.mark.parametrize("value", ["no", 1, 0, None, np.True_])
async def test_what_is_on_or_off_is_a_bool(value: Any, tmp_path: Path) -> None:
    """At every door: a word for "no" would count as on."""
    sync.save({"a": 1}, tmp_path / "a", config=SMALL)
    calls: dict[str, list[Callable[[], object]]] = {
        "overwrite": [
            lambda: sync.save({"a": 2}, tmp_path / "a", overwrite=value, config=SMALL),
            lambda: sync.convert(
                tmp_path / "a", tmp_path / "b", to="dcp", overwrite=value, config=SMALL
            ),
            lambda: StorageWriter(tmp_path / "b", overwrite=value),
        ],
        "drop_values": [
            lambda: sync.convert(
                tmp_path / "a", tmp_path / "b", to="hf", drop_values=value, config=SMALL
            )
        ],
        "compare_copies": [lambda: sync.verify(tmp_path / "a", compare_copies=value, config=SMALL)],
        "allow_opaque": [lambda: StorageReader(tmp_path / "a", allow_opaque=value)],
        "single_file_per_rank": [lambda: StorageWriter(tmp_path, single_file_per_rank=value)],
        "cache_staged_state_dict": [lambda: StorageWriter(cache_staged_state_dict=value)],
    }
    if value is not None:
        calls["sync_files"] = [lambda: StorageWriter(tmp_path, sync_files=value)]
    for name, doors in calls.items():
        for call in doors:
            with pytest.raises(ConfigError, match=f"{name}= is True or False"):
                call()
    async with Checkpointer(tmp_path / "run", config=SMALL) as ckpt:
        with pytest.raises(ConfigError, match="overwrite= is True or False"):
            ckpt.save({"a": 2}, 1, overwrite=value)
    async with Engine(SMALL) as engine:
        with pytest.raises(ConfigError, match="overwrite= is True or False"):
            engine.save({"a": 2}, tmp_path / "a", overwrite=value)
        with pytest.raises(ConfigError, match="compare_copies= is True or False"):
            await engine.verify(tmp_path / "a", compare_copies=value)
    assert sync.load(tmp_path / "a", config=SMALL) == {"a": 1}
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, True])
async def test_what_is_no_number_of_bytes_is_not_made_warm(nbytes: Any) -> None:
    """Before any is taken. Who asks for more than the pool may have gets all of it."""
    async with Engine(SMALL) as engine:
        with pytest.raises(ConfigError, match="nbytes= is a number of bytes from 1"):
            await engine.prewarm(nbytes)
        assert engine.statistics().taken_nbytes == 0
        await engine.prewarm(SMALL.pool_nbytes + 1)
        assert engine.statistics().taken_nbytes == engine.statistics().budget_nbytes


@pytest.mark.parametrize("at", [123, "", b"c", "s3:/bucket/run", "foo://bucket"])
async def test_a_place_to_prewarm_is_one_to_save_to(at: Any, tmp_path: Path) -> None:
    """What `save` refuses is refused there, too; a path need not exist."""
    async with Engine(SMALL) as engine:
        with pytest.raises(ConfigError):
            engine.save({}, at)
        with pytest.raises(ConfigError):
            await engine.prewarm(1, at=at)
        await engine.prewarm(1, at=tmp_path / "not" / "there")
