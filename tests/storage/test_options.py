"""Which of the `storage_options` are for a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import botocore.session
import pytest

from ckptio import sync
from ckptio.errors import ConfigError
from ckptio.storage.options import options_for, problem_with
from ckptio.storage.stores import Stores
from tests.rig import config_with

if TYPE_CHECKING:
    from concurrent.futures import Executor


@pytest.mark.parametrize(
    ("protocol", "options"),
    [
        ("s3", {"client_kwargs": {"endpoint_url": "http://a:1"}}),
        ("s3", {"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}}),
        ("gs", {"token": {"type": "service_account", "private_key": "hidden"}}),
        ("s3", {"client_kwargs": {"verify": False}, "config_kwargs": {"s3": {}}}),
        ("dir", {"file": "not a mapping"}),
        ("s3", {}),
    ],
)
def test_options_that_are_mappings_are_options(protocol: str, options: dict[str, Any]) -> None:
    """Their names are no protocols, so nothing of them is left out."""
    assert options_for(options, protocol) == options


@pytest.mark.parametrize(
    ("protocol", "options", "expected"),
    [
        ("s3", {"s3": {"key": "a"}, "gs": {"token": "anon"}}, {"key": "a"}),
        ("s3a", {"s3": {"key": "a"}}, {"key": "a"}),
        ("s3", {"s3a": {"key": "a"}}, {"key": "a"}),
        ("gcs", {"gs": {"token": {"type": "a"}}}, {"token": {"type": "a"}}),
        ("abfss", {"az": {"account_name": "a"}}, {"account_name": "a"}),
        ("s3", {"s3": {"key": "a"}, "s3a": {"key": "a"}}, {"key": "a"}),
        ("memory", {"s3": {"key": "a"}}, {}),
        ("nobodys", {"nobodys": {"key": "a"}, "s3": {"key": "b"}}, {"key": "a"}),
        ("s3", {"s3": {}}, {}),
    ],
)
def test_options_may_be_by_protocol(
    protocol: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    """By any name of it; those of others are for other URLs."""
    assert options_for(options, protocol) == expected


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"s3": {"key": "hidden"}, "secret": "hidden"}, r"\(s3\) with secret;"),
        ({"s3": {"key": "hidden"}, "client_kwargs": {"verify": False}}, "with client_kwargs;"),
        ({"s3": {"key": "hidden"}, "gs": None}, "with gs;"),
        ({"s3": {"key": "hidden"}, "s3a": {"key": "other"}}, "differ for s3 and s3a"),
    ],
)
def test_options_of_both_shapes_are_refused(
    options: dict[str, Any], problem: str, executor: Executor
) -> None:
    """Before anything is opened, and without a value that may be secret."""
    stores = Stores(config_with(storage_options=options), executor)
    with pytest.raises(ConfigError, match=problem) as caught:
        stores.at("s3://bucket/run")
    assert "hidden" not in str(caught.value)


def test_an_option_that_nobody_knows_is_named() -> None:
    """Its value is not, and nothing else of what the client says."""
    pytest.importorskip("s3fs")
    config = config_with(storage_options={"key": "a", "secret": "b", "sekret": "hidden"})
    with pytest.raises(ConfigError) as caught:
        sync.load("s3://bucket/run", config=config)
    assert str(caught.value).endswith(": TypeError, there is no option 'sekret'")
    assert "hidden" not in str(caught.value)


def test_of_what_a_client_says_only_a_name_that_was_given_is_told() -> None:
    """The rest may hold a secret."""
    unknown = TypeError("f() got an unexpected keyword argument 'key'")
    assert problem_with(["key"], unknown) == "TypeError, there is no option 'key'"
    assert problem_with(["token"], unknown) == "TypeError"
    assert problem_with(["key"], TypeError("key='hidden' is wrong")) == "TypeError"
    assert problem_with(["key"], ValueError(*unknown.args)) == "ValueError"


def test_an_endpoint_without_a_scheme_is_told_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="endpoint") as caught:
        botocore.session.get_session().create_client(
            "s3", endpoint_url="localhost:9000", region_name="us-east-1"
        )
    problem = problem_with(["endpoint_url"], caught.value)
    assert problem == "ValueError, endpoint_url is http:// or https:// and a host"
