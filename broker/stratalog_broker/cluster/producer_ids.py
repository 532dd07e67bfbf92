"""Producer ids for this broker, from blocks that the metadata quorum allocates, each once.

No block begins below the time of its allocation in seconds, times ``IDS_PER_S``. So ids stay unique after metadata was restored
from an old copy, whose counter is behind: partitions still have the state of producers whose ids were allocated after the copy,
and would take the first batch of a new producer with such an id for a duplicate. Wall clocks may differ by less than the time
from the loss of the quorum to its restart.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.guarded_updates import decide_again
from stratalog_metadata.records import PRODUCER_IDS, Counter, counter_key
from stratalog_metadata.state.commands import ABSENT, Allocate, Command, Put, VersionIs

BLOCK: Final = 1000
IDS_PER_S: Final = 2**20
"""More than a cluster allocates per second. The greatest id stays below 2**53 until 2242, so any JSON parser reads it."""


class ProducerIds:
    """The ids left in a block when the broker stops are never used."""

    def __init__(self, metadata: MetadataClient, clock: Clock) -> None:
        self._metadata = metadata
        self._clock = clock
        self._next = 0
        self._end = 0
        self._allocating = asyncio.Lock()

    async def take(self) -> int:
        """Return an unused id. Raises what proposing raises; an allocation with unknown outcome only wastes a block."""
        async with self._allocating:
            if self._next == self._end:
                self._next = await decide_again("the counter of producer ids", self._allocate)
                self._end = self._next + BLOCK
            self._next += 1
            return self._next - 1

    async def _allocate(self) -> int:
        """Return the first id of a new block. Raises ``Conflict`` if another broker has raised the counter meanwhile."""
        key, floor = counter_key(PRODUCER_IDS), self._clock.wall_ms() // 1000 * IDS_PER_S
        (found,) = await self._metadata.read([key])
        counter = found.record if found is not None and isinstance(found.record, Counter) else Counter(name=PRODUCER_IDS)
        allocate = Allocate(counter=PRODUCER_IDS, count=BLOCK)
        command = Command(updates=(allocate,))
        if counter.next_value < floor:
            unchanged = VersionIs(key=key, version=found.version if found is not None else ABSENT)
            raised: Counter = msgspec.structs.replace(counter, next_value=floor)
            command = Command(updates=(Put(record=raised), allocate), requirements=(unchanged,))
        return (await self._metadata.propose(command)).allocated[0]
