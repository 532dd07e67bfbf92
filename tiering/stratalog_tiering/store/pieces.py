"""Reads adjacent ranges with one request, each into memory of its own, so that keeping one does not keep the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol, runtime_checkable


class RangeReader(Protocol):
    """An ``ObjectStore``, or the client that it reads through."""

    async def get_range(self, key: str, start: int, length: int) -> memoryview: ...


@runtime_checkable
class PieceReader(Protocol):
    """A ``RangeReader`` that receives pieces without a copy, or delegates to one that may."""

    async def get_pieces(self, key: str, start: int, lengths: Sequence[int]) -> list[memoryview]: ...


async def get_pieces(source: RangeReader, key: str, start: int, lengths: Sequence[int]) -> list[memoryview]:
    """Adjacent pieces of ``lengths`` bytes each, from ``start`` on. Raises what ``source.get_range`` raises.

    Unless ``source`` is a ``PieceReader``, they are copied out of one range.
    """
    if isinstance(source, PieceReader):
        return await source.get_pieces(key, start, lengths)
    content = await source.get_range(key, start, sum(lengths))
    if len(lengths) == 1:
        return [content]
    return [memoryview(bytes(content[begin:end])) for begin, end in pairwise(accumulate(lengths, initial=0))]
