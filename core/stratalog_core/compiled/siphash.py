"""SipHash (Aumasson, Bernstein 2012), a keyed pseudo-random function that is fast for short inputs, in compiled code.

``sip_128`` is SipHash-2-4 with 128 bits of output, ``sip_64`` the shorter SipHash-1-3 that Python hashes its bytes with. Inputs
and outputs are in the machine's byte order; nothing of them is stored.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from stratalog_core.compiled.jit import Bytes, Int, inlined, load_word

Word: TypeAlias = np.uint64
State: TypeAlias = tuple[Word, Word, Word, Word]


@inlined
def _rotated(word: Word, bits: int) -> Word:
    return (word << np.uint64(bits)) | (word >> np.uint64(64 - bits))


@inlined
def _round(a: Word, b: Word, c: Word, d: Word) -> State:
    a += b
    b = _rotated(b, 13) ^ a
    a = _rotated(a, 32)
    c += d
    d = _rotated(d, 16) ^ c
    a += d
    d = _rotated(d, 21) ^ a
    c += b
    b = _rotated(b, 17) ^ c
    c = _rotated(c, 32)
    return a, b, c, d


@inlined
def _start(first: Word, second: Word) -> State:
    return (
        first ^ np.uint64(0x736F6D6570736575),
        second ^ np.uint64(0x646F72616E646F6D),
        first ^ np.uint64(0x6C7967656E657261),
        second ^ np.uint64(0x7465646279746573),
    )


@inlined
def _last_word(body: Bytes, at: Int, length: Int) -> Word:
    """The bytes after the last whole word, and the length in the highest byte."""
    word = np.uint64(length) << np.uint64(56)
    for index in range(length & 7):
        word |= np.uint64(body[at + index]) << np.uint64(8 * index)
    return word


@inlined
def sip_128(body: Bytes, at: Int, length: Int, first: Word, second: Word) -> tuple[Word, Word]:
    """The hash of ``length`` bytes from ``at`` on, with the secret ``first``, ``second``. The caller checked the bounds."""
    a, b, c, d = _start(first, second)
    b ^= np.uint64(0xEE)
    for index in range(length >> 3):
        word = load_word(body, at + 8 * index)
        d ^= word
        a, b, c, d = _round(a, b, c, d)
        a, b, c, d = _round(a, b, c, d)
        a ^= word
    word = _last_word(body, at + (length & -8), length)
    d ^= word
    a, b, c, d = _round(a, b, c, d)
    a, b, c, d = _round(a, b, c, d)
    a ^= word
    c ^= np.uint64(0xEE)
    for _ in range(4):
        a, b, c, d = _round(a, b, c, d)
    low = a ^ b ^ c ^ d
    b ^= np.uint64(0xDD)
    for _ in range(4):
        a, b, c, d = _round(a, b, c, d)
    return low, a ^ b ^ c ^ d


@inlined
def sip_64(body: Bytes, at: Int, length: Int, first: Word, second: Word) -> Word:
    """As :func:`sip_128`, with 64 bits of output and fewer rounds: for checks that nobody attacks."""
    a, b, c, d = _start(first, second)
    for index in range(length >> 3):
        word = load_word(body, at + 8 * index)
        d ^= word
        a, b, c, d = _round(a, b, c, d)
        a ^= word
    word = _last_word(body, at + (length & -8), length)
    d ^= word
    a, b, c, d = _round(a, b, c, d)
    a ^= word
    c ^= np.uint64(0xFF)
    for _ in range(3):
        a, b, c, d = _round(a, b, c, d)
    return a ^ b ^ c ^ d
