"""Which of the `storage_options` are for a URL.

fsspec takes them in two shapes: the options themselves, or a mapping of protocols to options,
of which one serves several stores. An option may be a mapping, too (`client_kwargs`, the
`token` of Google's), so it is the names that tell the shapes apart, not the values.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Collection, Mapping
from importlib.metadata import EntryPoints, entry_points
from typing import Any

from ckptio.errors import ConfigError

_ENTRY_POINTS = "ckptio.backends"
#: Names of one file system.
_ALIASES = (("s3", "s3a"), ("gs", "gcs"), ("az", "abfs", "abfss"), ("sftp", "ssh"))
#: How Python says that a function has no such parameter.
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


def problem_with(options: Collection[str], error: Exception) -> str:
    """Say why options make no client: the kind of an error, and which of them nobody knows.

    Args:
        options: Their names, which may be shown.
        error: What else it says may hold their values.
    """
    problem = type(error).__name__
    if "Invalid endpoint" in str(error):  # botocore's words
        return f"{problem}, endpoint_url is http:// or https:// and a host"
    unknown = _UNEXPECTED.search(str(error)) if isinstance(error, TypeError) else None
    if unknown is None or unknown[1] not in options:
        return problem
    return f"{problem}, there is no option {unknown[1]!r}"


def options_for(storage_options: Mapping[str, Any], protocol: str) -> Mapping[str, Any]:
    """Give what is for a protocol.

    Options are by protocol if each name is a protocol and each value a mapping. Then those of
    other protocols are for other URLs, and a URL of none of them has no options.

    Args:
        storage_options: As they were given.
        protocol: Of a URL.

    Raises:
        ConfigError: They are neither or both. Names are shown, values are not.
    """
    mappings = [name for name, value in storage_options.items() if isinstance(value, Mapping)]
    known = _protocols(protocol) if mappings else set()
    nested = [name for name in mappings if name in known]
    if not nested:
        return storage_options
    if others := sorted(str(name) for name in storage_options if name not in nested):
        raise ConfigError(
            f"storage_options mix options of protocols ({', '.join(sorted(nested))}) with"
            f" {', '.join(others)}; give the options themselves, or a mapping of protocols to"
            " options"
        )
    found = [name for name in _names_of(protocol) if name in nested]
    if any(storage_options[name] != storage_options[found[0]] for name in found):
        raise ConfigError(
            f"storage_options differ for {' and '.join(found)}, which are one file system;"
            " give one of them"
        )
    own: Mapping[str, Any] = storage_options[found[0]] if found else {}
    return own


def other_backends() -> EntryPoints:
    """Give the entry points of packages that open stores; see `stores.Backend`.

    They are looked for once, as fsspec does with its own: the metadata of all that is installed
    are read for that, which took 13 ms or more of the engine's loop for each checkpoint.
    """
    return _found(tuple(sys.path))


@functools.lru_cache(maxsize=1)
def _found(path: tuple[str, ...]) -> EntryPoints:
    """Look for entry points, anew where the path to modules is another one."""
    del path
    return entry_points(group=_ENTRY_POINTS)


def _names_of(protocol: str) -> tuple[str, ...]:
    """Give a protocol, and what else it is called."""
    return next((names for names in _ALIASES if protocol in names), (protocol,))


def _protocols(protocol: str) -> set[str]:
    """Name the protocols there are, that of a URL among them."""
    import fsspec  # noqa: PLC0415  # 50 ms that whoever gives no mapping does not need

    ours = {entry.name for entry in other_backends()}
    aliases = {name for names in _ALIASES for name in names}
    return {*fsspec.available_protocols(), *ours, *aliases, protocol}
