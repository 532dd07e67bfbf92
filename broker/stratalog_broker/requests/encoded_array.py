"""The elements of a response's array, encoded one by one, with the event loop running between pieces of them."""

from __future__ import annotations

from typing import Final

from stratalog_broker.cluster.partition_rows import Pieces

_JOINED: Final = 32


class EncodedArray:
    """Encoded elements, joined to few blocks: joining twenty thousand topics at once takes 10 ms.

    ``cost``: what an element costs to make and encode, as a number of Metadata's partitions (10 to 20 µs).
    """

    def __init__(self, cost: int) -> None:
        self.pieces = Pieces()
        self.count = 0
        self._cost = cost
        self._joined: list[bytes] = []
        self._block: list[bytes] = []

    async def add(self, element: bytes | None) -> None:
        """Add an encoded element; None for one that took work and is not in the response."""
        if element is not None:
            self.count += 1
            self._block.append(element)
            if len(self._block) >= _JOINED:
                self.join()
        await self.pieces.done(self._cost)

    def join(self) -> list[bytes]:
        """Return all elements that were added, in blocks."""
        self._joined.append(b"".join(self._block))
        self._block.clear()
        return self._joined
