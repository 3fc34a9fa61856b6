from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.format.checksum import crc32c, pack_checksums, unpack_checksums


def test_the_checksum_is_crc32c() -> None:
    """Castagnoli's polynomial, as RFC 3720 (B.4) gives it for known bytes."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43


@given(sums=st.lists(st.integers(0, 2**32 - 1)))
def test_packing_is_undone(sums: list[int]) -> None:
    """Checksums are 4 bytes each, little-endian."""
    packed = pack_checksums(sums)
    assert len(packed) == 4 * len(sums)
    assert unpack_checksums(packed) == tuple(sums)


@pytest.mark.parametrize("flip", range(8 * 9))
def test_every_bit_counts(flip: int) -> None:
    """No single bit can change unseen."""
    data = bytearray(b"123456789")
    data[flip // 8] ^= 1 << flip % 8
    assert crc32c(data) != 0xE3069283
