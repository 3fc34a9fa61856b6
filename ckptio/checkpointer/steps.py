"""How steps are named, and what a checkpoint's manifest says of them.

A step has one name: `step-` and its number with at least eight digits. So names sort as
numbers do, up to a hundred million; and nobody else's directory (`step-9`, `step-9.bak`,
`latest`) is ever listed, loaded or removed.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from ckptio._texts import shown
from ckptio.errors import ConfigError, FormatError
from ckptio.format.summary import decode_summary
from ckptio.plan.retention import StepRecord

if TYPE_CHECKING:
    import numpy as np

    from ckptio.format.manifest import Metadata

MAX_STEP = 10**18
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,18})\Z")
_NUMBERED = re.compile(r"(?<![0-9])[0-9]{1,18}\Z")


def step_name(step: int, option: str = "step=") -> str:
    """Name a step.

    Args:
        step: Its number.
        option: What gave it, for the error.

    Raises:
        ConfigError: It is no number of a step.
    """
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise ConfigError(f"{option} is an int from 0 to 10**18, not {shown(step)}")
    return f"step-{step:08d}"


def parse_name(name: str) -> int | None:
    """Give the step of a name; `None` if it is no step's."""
    match = _NAME.match(name)
    step = int(match[1]) if match else MAX_STEP + 1
    return step if step <= MAX_STEP else None


def is_step(name: str) -> bool:
    """Whether something is called as a step is."""
    return parse_name(name) is not None


def step_meant(name: str) -> int | None:
    """Give the step that something may be meant as that is called otherwise: `step-4`, `iter_80`.

    `None` for a step's own name, and where there is no number at the end.
    """
    match = _NUMBERED.search(name)
    return int(match[0]) if match and not is_step(name) else None


def pack_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float | str]:
    """Write metrics so that JSON carries them: what is not finite as text.

    Raises:
        ConfigError: They are no numbers by name.
    """
    packed: dict[str, float | str] = {}
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics= are numbers by name, not {shown(metrics)}")
    for name, value in (metrics or {}).items():
        try:
            number = float(value.detach() if hasattr(value, "detach") else value)  # a loss
        except (TypeError, ValueError, RuntimeError):  # torch raises the last of a large tensor
            number = None
        except OverflowError:  # of an int
            number = math.inf if value > 0 else -math.inf
        if not _is_text(name) or number is None or not _is_number(value):
            raise ConfigError(f"metrics= are numbers by name, not {shown(name)}: {shown(value)}")
        packed[name] = number if math.isfinite(number) else str(number)
    return packed


def _is_number(value: object) -> bool:
    """Whether something is a number by itself: Python reads one from text, too, and from bytes."""
    if getattr(getattr(value, "dtype", None), "kind", "") in ("O", "S", "T", "U", "V"):
        value = cast("np.ndarray", value).item()  # text, or bytes, or of ml_dtypes: of kind V, too
    return hasattr(type(value), "__float__") or hasattr(type(value), "__index__")


def _is_text(name: object) -> bool:
    """Whether something is text that a manifest takes: no lone surrogates."""
    return isinstance(name, str) and not any("\ud800" <= char <= "\udfff" for char in name)


def unpack_metrics(packed: object) -> dict[str, float]:
    """Read what `pack_metrics` wrote; what is none is left out."""
    metrics = {}
    if isinstance(packed, dict):
        for name, value in packed.items():
            if value in ("nan", "inf", "-inf") or type(value) in (int, float):
                with contextlib.suppress(OverflowError):  # an int that no float is near to
                    metrics[name] = float(value)
    return metrics


def metrics_of(metadata: Mapping[str, Any]) -> dict[str, float | str]:
    """Give the metrics that a manifest has, as JSON carries them."""
    return pack_metrics(unpack_metrics(metadata.get("metrics")))


def metadata_of(step: int, metrics: Mapping[str, Any] | None) -> Metadata:
    """Say in a manifest which step it is and what was measured.

    Raises:
        ConfigError: Metrics are no numbers by name.
    """
    packed = pack_metrics(metrics)
    return {"step": step, "metrics": dict(packed)} if packed else {"step": step}


def record_of(step: int, manifest: bytes) -> tuple[StepRecord, int]:
    """Read a step's record from its manifest, and the bytes of its data files. Blocks.

    Raises:
        FormatError: The manifest is damaged, or of a version that this one does not read.
    """
    summary = decode_summary(manifest)
    try:
        created = dt.datetime.fromisoformat(summary.created)
    except ValueError:
        raise FormatError(f"bad time {summary.created!r} in the manifest") from None
    if created.tzinfo is None:
        created = created.replace(tzinfo=dt.UTC)
    metrics = unpack_metrics(summary.metadata.get("metrics"))
    record = StepRecord(step=step, created=created, metrics=metrics, save_id=summary.save_id)
    return record, summary.nbytes
