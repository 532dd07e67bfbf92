"""Sound inputs, damaged: bytes flipped, lengths blown up, cuts, repetitions, and parts of other inputs put in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hypothesis import strategies as st

INTERESTING: Final = (
    b"\x00", b"\xff", b"\x7f", b"\x80", b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\x00\x00\x00",
    b"\x00\x00\x00\x01", b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01", b"\x80" * 11, b"\x7f" + b"\xff" * 7,
    b"\x80" + bytes(7), b"\xff" * 8, b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xa1\xff",
    b"\x91" * 200, b"\x81" * 200, b"\x01\x7f\xff\xff\xff\x07",
)  # fmt: skip
"""Integers at the ends of their ranges, varints that do not end, msgpack headers that promise much, nesting, bad UTF-8."""

OVERWRITE, INSERT, DELETE, CUT, REPEAT, SPLICE = range(6)
Change = tuple[int, int, int, bytes]
"""Operation, position (of 2**16 parts of the input), length, and bytes to use."""


def mutate(content: bytes, changes: Sequence[Change], other: bytes = b"") -> bytes:
    """``content`` after all changes, in order."""
    for kind, place, length, piece in changes:
        at = place * (len(content) + 1) >> 16
        before, after = content[:at], content[at:]
        if kind == OVERWRITE:
            content = before + piece + after[len(piece) :]
        elif kind == INSERT:
            content = before + piece + after
        elif kind == DELETE:
            content = before + after[length:]
        elif kind == CUT:
            content = before
        elif kind == REPEAT:
            content = before + after[:length] * 3 + after[length:]
        else:
            content = before + other[place * len(other) >> 16 :][: length * 4] + after[length:]
    return content


def changes() -> st.SearchStrategy[list[Change]]:
    pieces = st.sampled_from(INTERESTING) | st.binary(min_size=1, max_size=8)
    change = st.tuples(st.integers(0, 5), st.integers(0, 2**16 - 1), st.integers(0, 64), pieces)
    return st.lists(change, min_size=0, max_size=5)


def corrupt(inputs: Sequence[bytes], bytes_max: int) -> st.SearchStrategy[bytes]:
    """One of ``inputs`` with up to five changes, cut to ``bytes_max``."""
    chosen = st.sampled_from(inputs)
    return st.builds(lambda one, done, other: mutate(one, done, other)[:bytes_max], chosen, changes(), chosen)
