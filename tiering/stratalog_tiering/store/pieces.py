"""Reads of adjacent ranges by one request, each into memory of its own, so that one is kept without the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol, runtime_checkable


class RangeReader(Protocol):
    """Part of an ``ObjectStore``, or of what one reads through."""

    async def get_range(self, key: str, start: int, length: int) -> memoryview: ...


@runtime_checkable
class PieceReader(Protocol):
    """Receives each piece where it is kept, without a copy."""

    async def get_pieces(self, key: str, start: int, lengths: Sequence[int]) -> list[memoryview]: ...


async def get_pieces(source: RangeReader, key: str, start: int, lengths: Sequence[int]) -> list[memoryview]:
    """The adjacent pieces of ``lengths`` bytes from ``start`` on. Raises as ``ObjectStore.get_range`` does.

    They are copied from one range, unless ``source`` is a ``PieceReader``.
    """
    if isinstance(source, PieceReader):
        return await source.get_pieces(key, start, lengths)
    content = await source.get_range(key, start, sum(lengths))
    if len(lengths) == 1:
        return [content]
    return [memoryview(bytes(content[begin:end])) for begin, end in pairwise(accumulate(lengths, initial=0))]
