"""URLs of S3."""

from __future__ import annotations

import re

from ckptio.errors import ConfigError

#: What botocore takes for the name of a bucket, but for ARNs.
_BUCKET = re.compile(r"[a-zA-Z0-9.\-_]{1,255}")


def split_url(url: str) -> tuple[str, str]:
    """Split a URL into its bucket and the prefix in it.

    Raises:
        ConfigError: One of them is missing, or cannot be one.
    """
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if bucket.startswith("arn:"):
        raise ConfigError(
            f"{url!r} has an ARN instead of a bucket; the alias of an access point is taken for"
            " one: s3://NAME-s3alias/PREFIX"
        )
    if not bucket or not prefix:
        raise ConfigError(f"{url!r} has to be s3://BUCKET/PREFIX")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            f"{url!r} has {bucket!r} for a bucket; names of buckets are letters, digits, dots,"
            " hyphens and underscores"
        )
    return bucket, prefix.rstrip("/")
