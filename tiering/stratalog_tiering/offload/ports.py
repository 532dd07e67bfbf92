"""What the parts of one tiering worker share: its borders, settings and limits."""

from __future__ import annotations

from dataclasses import dataclass

from stratalog_core.ports import Background, Clock, Random
from stratalog_metadata.client.api import MetadataClient
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.offload.ledger_source import LedgerSource
from stratalog_tiering.offload.throttle import Throttle
from stratalog_tiering.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPorts:
    """One per worker. ``reading`` limits bytes read from bookies, ``deleting`` objects deleted."""

    settings: TieringSettings
    metadata: MetadataClient
    store: ObjectStore
    source: ManifestSource
    ledgers: LedgerSource
    clock: Clock
    random: Random
    background: Background
    reading: Throttle
    deleting: Throttle

    def random_id(self) -> int:
        return self.random.getrandbits(64)

    async def delete_objects(self, keys: list[str]) -> None:
        """Delete objects, paced, in batches of a second's worth at most."""
        batch = min(self.settings.deletes_per_s, 200)
        for first in range(0, len(keys), batch):
            await self.deleting.take(len(keys[first : first + batch]))
            await self.store.delete(keys[first : first + batch])
