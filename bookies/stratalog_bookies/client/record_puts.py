"""Changes of ledgers' records: together with others of the same turn where that goes, else alone."""

from __future__ import annotations

from stratalog_bookies.client.ledger_records import change_of, put_ledger
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.shared_commands import SharedCommands
from stratalog_metadata.records import Ledger
from stratalog_metadata.state.commands import Requirement, Update


class RecordPuts:
    """Compare-and-set of many ledgers' records."""

    def __init__(self, metadata: MetadataClient, clock: Clock) -> None:
        self._metadata = metadata
        self._clock = clock
        self._shared = SharedCommands(metadata)

    async def put(
        self,
        record: Ledger,
        version: int,
        *,
        requirements: tuple[Requirement, ...],
        updates: tuple[Update, ...] = (),
        timeout_s: float,
    ) -> int:
        """The record's new version, which its ``updates`` got as well. Raises as ``put_ledger`` does."""
        done = await self._shared.propose(change_of(record, version, requirements, updates))
        if done is not None:
            return done
        return await put_ledger(
            self._metadata, self._clock, record, version, requirements=requirements, updates=updates, timeout_s=timeout_s
        )  # fmt: skip

    async def close(self) -> None:
        """Propose no more together; who waits is cancelled."""
        await self._shared.close()
