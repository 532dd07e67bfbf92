"""SipHash against its authors' vectors, and against what OpenSSL computes."""

from __future__ import annotations

import numpy as np
import pytest

from stratalog_core.compiled.jit import Bytes, Words, compiled
from stratalog_core.compiled.siphash import sip_64, sip_128

KEY = np.frombuffer(bytes(range(16)), np.uint64)
MESSAGE = np.frombuffer(bytes(range(64)), np.uint8)


@compiled
def hash_128(body: Bytes, at: int, length: int, secret: Words, out: Words) -> None:
    out[0], out[1] = sip_128(body, at, length, secret[0], secret[1])


@compiled
def hash_64(body: Bytes, at: int, length: int, secret: Words, out: Words) -> None:
    out[0] = sip_64(body, at, length, secret[0], secret[1])


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, "a3817f04ba25a8e66df67214c7550293"),
        (1, "da87c1d86b99af44347659119b22fc45"),
        (15, "5493e99933b0a8117e08ec0f97cfc3d9"),
        (16, "6ee2a4ca67b054bbfd3315bf85230577"),
    ],
)
def test_128_bits_are_those_of_the_authors_vectors(length: int, expected: str) -> None:
    out = np.zeros(2, np.uint64)
    hash_128(MESSAGE, 0, length, KEY, out)
    assert out.tobytes().hex() == expected


@pytest.mark.parametrize(("length", "expected"), [(0, "dcc40f055801acab"), (1, "93ca577df39bf4c9"), (9, "e43d066cb38ea425")])
def test_64_bits_are_those_of_openssl(length: int, expected: str) -> None:
    """``openssl mac -macopt hexkey:0001…0f -macopt size:8 -macopt c-rounds:1 -macopt d-rounds:3 SIPHASH``."""
    out = np.zeros(1, np.uint64)
    hash_64(MESSAGE, 0, length, KEY, out)
    assert out.tobytes().hex() == expected
