"""Find what a dict of the target has in one of the tree: by keys that are equal."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from ckptio.errors import FormatError, UnsupportedLeafError
from ckptio.format.crowds import Crowd, crowd_error
from ckptio.format.encode import TAG
from ckptio.state.leaves import encode_key
from ckptio.state.tree import children, identity_of, keys_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ckptio.format.encode import Json

#: Bits of a number that Python writes in digits, whatever limit was set: it has 640 of those.
_MAX_BITS = 2048


def identity_of_key(fqn: str, key: object) -> Hashable:
    """Give what tells a key of the target from others, enums and records among them."""
    if type(key) is int or (type(key) is str and key.isascii()):
        return key
    try:
        return identity_of(encode_key(fqn, key))
    except UnsupportedLeafError:
        return None  # no checkpoint has such a key


def members_of(fqn: str, node: dict[str, Json]) -> dict[Hashable, tuple[Json, str, Json]]:
    """Give key, name and node of what a mapping node holds, by what tells its key from others.

    Raises:
        FormatError: Two keys are equal.
    """
    if TAG not in node:  # plain keys stand for themselves
        prefix = f"{fqn}." if fqn else ""
        return {key: (key, prefix + key, item) for key, item in node.items()}
    keys = keys_of(node)
    members: dict[Hashable, tuple[Json, str, Json]] = {}
    crowd = Crowd(len(keys))
    for key, (name, item) in zip(keys, children(fqn, node), strict=True):
        identity = identity_of(key)
        if crowd.is_over(identity):
            raise crowd_error(fqn)
        members[identity] = key, name, item
    if len(members) < len(keys):
        raise FormatError(f"two equal keys in the dict at {fqn!r} in the manifest")
    return members


def fields_in(fqn: str, node: Json) -> Json | None:
    """Give what a dict holds as the fields of a dataclass; `None` if its keys are no names."""
    if type(node) is not dict or node.get(TAG) not in (None, "dict", "odict"):
        return None
    members = [(key, item) for key, _, item in members_of(fqn, node).values()]
    return {"v": members} if all(type(key) is str for key, _ in members) else None


def take_member(
    stored: dict[Hashable, tuple[Json, str, Json]],
    target: dict[Any, Any],
    key: object,
    identity: Hashable,
) -> tuple[Json, str, Json] | None:
    """Take what a key of the target has out of what is stored; `None` if it has nothing.

    A number finds what is stored under its digits, too: torch.distributed.checkpoint keeps keys
    as strings, those of an optimizer's state among them.
    """
    found = stored.pop(identity, None)
    if found is None and type(key) is int and (digits := _as_text(key)) not in target:
        found = stored.pop(digits, None)
    return found


def _as_text(key: Hashable) -> Hashable:
    """Give the digits of a number; one of too many digits, or what is no number, as it is."""
    return str(key) if type(key) is int and key.bit_length() <= _MAX_BITS else key


def updated(target: dict[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
    """Put values into a dict one by one, and give it: a Counter would add them, in an update."""
    for key, value in values.items():
        target[key] = value  # noqa: PERF403
    return target


def arranged(
    fqn: str, target: dict[Any, Any], members: dict[Hashable, tuple[Json, str, Json]]
) -> dict[Any, Any]:
    """Give a dict of the target; bring an OrderedDict into the stored order, part of its value."""
    if isinstance(target, OrderedDict):
        had = dict(target)
        order = in_order(fqn, had, members)
        for key in () if order is had else order:
            target.move_to_end(key)
    return target


def in_order(
    fqn: str, values: dict[Any, Any], members: dict[Hashable, tuple[Json, str, Json]]
) -> dict[Any, Any]:
    """Give values in the order in which they are stored; behind them those that are not."""
    if list(values) == list(members):
        return values
    places = {identity: place for place, identity in enumerate(members)}

    def place_of(key: object) -> int:
        identity = identity_of_key(fqn, key)
        return places.get(identity, places.get(_as_text(identity), len(places)))

    return {key: values[key] for key in sorted(values, key=place_of)}
