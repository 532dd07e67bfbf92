"""Ledger ids, allocated from the quorum in blocks ahead of need.

An id is returned once. Ids of a block that was lost or not used up are never used. Nor are those below the ``lost_below`` of
the quorum's counter: metadata was restored from an old copy, and bookies may know such an id.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from stratalog_core.errors import OutcomeUnknown, Unavailable
from stratalog_core.single_flight import SingleFlight
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import LEDGER_IDS, Counter, counter_key
from stratalog_metadata.state.commands import Allocate, Command

_FIRST_ATTEMPT_S: Final = 3.0
"""Maximum wait for an answer. After a lost answer a second block is allocated, which costs nothing."""


class LedgerIds:
    """Returns each id once. Allocates a new block when half of the last one is used."""

    def __init__(self, metadata: MetadataClient, block: int) -> None:
        self._metadata = metadata
        self._block = block
        self._free: deque[int] = deque()
        self._refills: SingleFlight[str, None] = SingleFlight()

    async def take(self) -> int:
        """The next id. Raises the quorum's error if it cannot be reached."""
        while not self._usable():
            await asyncio.shield(self._refilling())
        if len(self._free) <= self._block // 2:
            self._refilling()
        return self._free.popleft()

    def _usable(self) -> bool:
        """Drop the ids that the quorum no longer accepts; whether any are left."""
        counter = self._metadata.view.find(Counter, counter_key(LEDGER_IDS))
        while self._free and counter is not None and self._free[0] < counter.lost_below:
            self._free.popleft()
        return bool(self._free)

    def _refilling(self) -> asyncio.Task[None]:
        # A block that is fetched ahead and fails is fetched again by the caller that needs it, and raises there.
        return self._refills.start(LEDGER_IDS, self._fetch, keep=True)

    async def _fetch(self) -> None:
        update = Allocate(counter=LEDGER_IDS, count=self._block)
        try:
            applied = await self._metadata.propose(Command(updates=(update,)), _FIRST_ATTEMPT_S)
        except (OutcomeUnknown, Unavailable):
            # At worst one block is never used.
            applied = await self._metadata.propose(Command(updates=(update,)))
        first = applied.allocated[0]
        self._free.extend(range(first, first + self._block))

    async def close(self) -> None:
        await self._refills.close()
