from __future__ import annotations

import pytest

from ckptio._threads import Threads
from ckptio.config import CheckpointConfig
from ckptio.errors import ConfigError
from ckptio.storage.keys import join_key, shown_url, split_query
from ckptio.storage.object_place import name_of
from ckptio.storage.resolve import remote_url
from ckptio.storage.stores import Stores


@pytest.mark.parametrize(
    ("prefix", "key"),
    [
        ("", "x"),
        ("a/b", "a/b/x"),
        ("/a?b", "/a?b/x"),
        ("s3://a?b=c", "s3://a?b=c/x"),
        ("http://h/a", "http://h/a/x"),
        ("https://h/a?b=c/d", "https://h/a/x?b=c/d"),
        ("http://h/a/?b=c", "http://h/a/x?b=c"),
        ("http://h/a#b", "http://h/a/x#b"),
    ],
)
def test_a_name_comes_before_what_a_server_is_asked(prefix: str, key: str) -> None:
    """And a question mark is a character like others in keys that are no URLs."""
    assert join_key(prefix, "x") == key
    assert "".join(split_query(prefix)) == prefix


def test_what_a_server_is_asked_is_not_shown() -> None:
    """It may be a signature."""
    assert shown_url("https://h/a?sig=x/y#z") == "https://h/a?..."
    assert shown_url("s3://bucket/a?b") == "s3://bucket/a?b"
    assert name_of("https://h/a/x?sig=b/c") == "x"


def test_slashes_in_a_signature_are_a_part_of_it() -> None:
    """Those at the end of a path are not."""
    assert remote_url("http://h/a?sig=b//") == "http://h/a?sig=b//"
    assert remote_url("http://h/a//") == "http://h/a"
    assert remote_url("s3://bucket/a?b//") == "s3://bucket/a?b"


def test_nothing_is_below_what_a_server_is_asked() -> None:
    """It is refused, and the signature is not shown."""
    threads = Threads(1, "test")
    stores = Stores(CheckpointConfig(), threads)
    with pytest.raises(ConfigError, match=r"'http://h/a\?\.\.\.' asks for one thing"):
        stores.below("http://h/a?sig=b")
    with pytest.raises(ConfigError, match=r"'http://\?\.\.\.' names no bucket"):
        stores.at("http://?sig=b")
    threads.shutdown()
