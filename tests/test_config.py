from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ckptio.config import CheckpointConfig, KiB, MiB
from ckptio.errors import ConfigError


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
@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True, None])
def test_a_number_that_is_no_positive_int_is_refused(name: str, value: object) -> None:
    """Floats, strings, booleans, zero and negative numbers are named and refused."""
    with pytest.raises(ConfigError, match=f"{name} must be a positive int, not {value!r}"):
        CheckpointConfig(**{name: value})  # type: ignore[arg-type]  # that is what is tested


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"durability": "half"}, "durability must be none, file or full, not 'half'"),
        ({"direct_io": "on"}, "direct_io must be auto or off, not 'on'"),
        ({"block_nbytes": 5000}, "block_nbytes must be a multiple of 4096"),
        ({"slab_nbytes": 3 * MiB + 4096}, "slab_nbytes must be a multiple of block_nbytes"),
        ({"pool_nbytes": 8 * MiB}, "pool_nbytes must hold a slab of 16777216"),
        ({"file_mode": 0o1644}, "permission bits"),
        ({"dir_mode": 0o1755}, "permission bits"),
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
            "HOME": "/root",
        }
    )
    assert config == CheckpointConfig(
        max_writes=3, file_mode=0o640, slab_nbytes=4 * MiB, durability="file"
    )


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument `os.environ` is read, when it is called and not before."""
    monkeypatch.setenv("CKPTIO_MAX_SAVES", "5")
    assert CheckpointConfig.from_env().max_saves == 5
    assert CheckpointConfig().max_saves == 2


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"CKPTIO_MAX_WRITERS": "3"}, "CKPTIO_MAX_WRITERS names no option; options are pool_nby"),
        ({"CKPTIO_MAX_WRITES": "many"}, "CKPTIO_MAX_WRITES must be an int, not 'many'"),
        ({"CKPTIO_MAX_WRITES": "0"}, "max_writes must be a positive int"),
        ({"CKPTIO_DURABILITY": "FULL"}, "durability must be"),
    ],
)
def test_a_bad_variable_is_refused(environ: dict[str, str], problem: str) -> None:
    """A misspelt option in the environment is an error, not a surprise."""
    with pytest.raises(ConfigError, match=problem):
        CheckpointConfig.from_env(environ)
