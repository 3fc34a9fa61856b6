"""Keys of objects, and URLs that may not be shown as they are.

With HTTP, a key is a whole URL. What stands behind its question mark (a signature, a token)
comes behind every name that is added to it, and is as good as a password: messages do without.
Elsewhere a question mark is a character like others.
"""

from __future__ import annotations

import re

_QUERIED = re.compile(r"(https?://[^?#]*?)(/*[?#].*)", re.DOTALL)


def split_query(key: str) -> tuple[str, str]:
    """Split a key, or a URL, into what names are added to and what comes behind them."""
    found = _QUERIED.fullmatch(key)
    return (key, "") if found is None else (found[1], found[2])


def join_key(prefix: str, name: str) -> str:
    """Give the key of something in a checkpoint."""
    above, query = split_query(prefix)
    return f"{above}/{name}{query.lstrip('/')}" if above else name


def shown_url(url: str) -> str:
    """Give a URL, or a key, as it may be shown."""
    above, query = split_query(url)
    return f"{above}?..." if query else above
