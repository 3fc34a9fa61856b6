"""What errors of aiohttp mean of which TLS did not begin. It has one for all of that."""

from __future__ import annotations

import re
import ssl

_NO_TLS = "ClientConnectorSSLError"
#: OpenSSL's, of what was garbled as it began, and of a server that is not well.
_GARBLED = re.compile("BAD_RECORD_MAC|DECODE_ERROR|INTERNAL_ERROR")


def is_no_tls(error: object) -> bool:
    """Whether an error is of a connection on which TLS did not begin.

    Certificates that are not trusted are another one.
    """
    return type(error).__name__ == _NO_TLS


def is_garbled(error: object) -> bool:
    """Whether the connection ended, or was garbled, as TLS began: another one may be better.

    Not if the server speaks no TLS, or none that this program speaks.
    """
    is_of_openssl = getattr(error, "errno", None) == ssl.SSL_ERROR_SSL
    return is_no_tls(error) and (not is_of_openssl or _GARBLED.search(str(error)) is not None)
