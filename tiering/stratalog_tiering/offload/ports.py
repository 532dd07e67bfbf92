"""Everything that the parts of one tiering worker share: clients, settings, rate limits, and the border to the ledgers.

``LedgerSource`` is the only way in which tiering reaches the bookies, so that this package does not depend on theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from stratalog_core.ports import Background, Clock, Random
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Ledger
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.core.offload_job import SourceEntry
from stratalog_tiering.metrics import TieringCounters
from stratalog_tiering.offload.commit_markers import RecentCommits
from stratalog_tiering.offload.locks import KnownLocks
from stratalog_tiering.offload.ownership import COMMITS_SHARE_S, BucketOwnership, cluster_id_in
from stratalog_tiering.offload.topic_descriptors import TopicDescriptors
from stratalog_tiering.store import ObjectStore, delete_batches

_BURST_S: Final = 0.25


class EntryHead(Protocol):
    """The first bytes of an entry, as a ledger reader returns them."""

    @property
    def head(self) -> bytes: ...


class LedgerSource(Protocol):
    """Reads confirmed entries of ledgers, and tells the bookies which ledgers were deleted."""

    async def read(self, ledger: Ledger, first: int, last: int, max_bytes: int) -> Sequence[SourceEntry]:
        """Entries from ``first`` on, at least one and none after ``last``, with matching checksums.

        Raises ``NoSuchEntry`` only if every replica reports the entry as absent, else ``Unavailable``.
        """
        ...

    async def read_headers(self, ledger: Ledger, first: int, last: int) -> Sequence[EntryHead]:
        """The first bytes of every entry from ``first`` to ``last``, enough for a batch header. Raises as ``read`` does."""
        ...

    async def read_lac(self, ledger: Ledger) -> int:
        """The last entry of an open ledger that is known to be confirmed, -1 without any. Raises ``Unavailable``."""
        ...

    async def delete(self, ledger_ids: Sequence[int]) -> None:
        """Tell the bookies that these ledgers are no longer in metadata. Their own garbage collection finds any it misses."""
        ...


class HistoryPorts(Protocol):
    """Metadata, the store and the manifests in it, for a worker or a command that reads committed history."""

    @property
    def metadata(self) -> MetadataClient: ...
    @property
    def store(self) -> ObjectStore: ...
    @property
    def source(self) -> ManifestSource: ...
    @property
    def locks(self) -> KnownLocks: ...


class MapSlot:
    """The right to hold a map of keys for compaction, for one holder at a time, until it frees the slot."""

    def __init__(self) -> None:
        self._holder: object | None = None

    def take(self, holder: object) -> bool:
        """Whether ``holder`` has the slot now."""
        if self._holder is None:
            self._holder = holder
        return self._holder is holder

    def free(self, holder: object) -> None:
        if self._holder is holder:
            self._holder = None


class Throttle:
    """Limits a rate shared by several tasks: a token bucket on the monotonic clock that holds a quarter of a second."""

    def __init__(self, per_s: float, clock: Clock) -> None:
        self._per_s = per_s
        self._clock = clock
        self._available = per_s * _BURST_S
        self._filled_at = clock.monotonic()

    async def take(self, units: int) -> None:
        """Return when ``units`` more fit into the rate. More than a burst is granted as well, and later takers pay for it."""
        self._fill()
        self._available -= units
        # Debts queue up in order: each taker sleeps until the bucket, including its own share, is back at zero.
        if self._available < 0:
            await asyncio.sleep(-self._available / self._per_s)

    def _fill(self) -> None:
        now = self._clock.monotonic()
        self._available = min(self._per_s * _BURST_S, self._available + (now - self._filled_at) * self._per_s)
        self._filled_at = now


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPorts:
    """One per worker. Limited per second: by ``reading`` bytes that are read to be written to the store, by ``verifying`` bytes
    read back from it, by ``deleting`` objects.
    """

    settings: TieringSettings
    metadata: MetadataClient
    store: ObjectStore
    bucket: BucketOwnership
    source: ManifestSource
    topics: TopicDescriptors
    commits: RecentCommits
    locks: KnownLocks
    ledgers: LedgerSource
    clock: Clock
    random: Random
    background: Background
    reading: Throttle
    verifying: Throttle
    deleting: Throttle
    map_slot: MapSlot
    counters: TieringCounters
    second_store: ObjectStore | None = None
    """The store of the second copy."""

    @property
    def cluster_id(self) -> str:
        """The id of the worker's cluster. Raises ``Unavailable`` until metadata knows it."""
        return cluster_id_in(self.metadata)

    def random_id(self) -> int:
        """64 random bits for a new object key."""
        return self.random.getrandbits(64)

    def deletable_before_ms(self) -> int:
        """Objects that became garbage before this wall time may be deleted: a grace period ago, none after a takeover."""
        now_ms = self.clock.wall_ms()
        return now_ms - self.settings.grace_ms if now_ms >= self.bucket.deletes_from_ms else 0

    async def delete_objects(self, keys: Sequence[str]) -> None:
        """Delete objects at the configured rate, at most 200 per request. Raises as the store does.

        Raises ``Invalid``, having deleted nothing more, if another cluster has taken the bucket over.
        """

        async def delete(batch: Sequence[str]) -> None:
            await self.deleting.take(len(batch))
            await self.bucket.confirm()
            await self.store.delete(batch)

        await delete_batches(keys, min(self.settings.deletes_per_s, 200), delete)


async def trusted() -> None:
    """Trust the store."""


def worker_ports(
    settings: TieringSettings,
    metadata: MetadataClient,
    store: ObjectStore,
    ledgers: LedgerSource,
    clock: Clock,
    random: Random,
    background: Background,
    *,
    check_store: Callable[[], Awaitable[None]] = trusted,
    second_store: ObjectStore | None = None,
) -> WorkerPorts:
    """The ports of one worker, or of a command that does a worker's work. ``check_store``: see ``BucketOwnership``."""
    bucket = BucketOwnership(store, metadata, clock, settings.grace_ms, check_store)
    return WorkerPorts(
        settings=settings,
        metadata=metadata,
        store=store,
        bucket=bucket,
        source=ManifestSource(store, background=background),
        topics=TopicDescriptors(store, partial(bucket.confirm, COMMITS_SHARE_S)),
        commits=RecentCommits(store, clock, settings.grace_ms),
        locks=KnownLocks(store),
        ledgers=ledgers,
        clock=clock,
        random=random,
        background=background,
        reading=Throttle(settings.read_bytes_per_s, clock),
        verifying=Throttle(settings.verify_bytes_per_s, clock),
        deleting=Throttle(settings.deletes_per_s, clock),
        map_slot=MapSlot(),
        counters=TieringCounters(),
        second_store=second_store,
    )
