"""Producer ids for this broker, from blocks that the metadata quorum allocates, each once."""

from __future__ import annotations

import asyncio
from typing import Final

from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import PRODUCER_IDS
from stratalog_metadata.state.commands import Allocate, Command

BLOCK: Final = 1000


class ProducerIds:
    """The ids left in a block when the broker stops are never used."""

    def __init__(self, metadata: MetadataClient) -> None:
        self._metadata = metadata
        self._next = 0
        self._end = 0
        self._allocating = asyncio.Lock()

    async def take(self) -> int:
        """Return an unused id. Raises what proposing raises; an allocation with unknown outcome only wastes a block."""
        async with self._allocating:
            if self._next == self._end:
                applied = await self._metadata.propose(Command(updates=(Allocate(counter=PRODUCER_IDS, count=BLOCK),)))
                self._next = applied.allocated[0]
                self._end = self._next + BLOCK
            self._next += 1
            return self._next - 1
