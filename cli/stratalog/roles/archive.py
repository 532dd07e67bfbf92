"""The role behind ``stratalog serve-archive``: a broker over one bucket, without bookies, quorum and tiering worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from stratalog.roles.broker import cache_files, cold_reader, load_messages_in_background
from stratalog.roles.open_files import connections_within, open_files_max
from stratalog.roles.readiness import check_broker
from stratalog.roles.runtime import Node
from stratalog_bookies.client import LedgerClient, LedgerClientSettings
from stratalog_broker.cluster.archived_topics import ArchivedTopics
from stratalog_broker.configs.memory import MemoryShares
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.coordination.positions_file import PositionsFile
from stratalog_broker.handlers import READ_ONLY_HANDLERS
from stratalog_broker.network.server import BrokerServer
from stratalog_broker.partitions.internal_topics import CONSUMER_OFFSETS, INTERNAL_TOPICS
from stratalog_core.errors import Invalid, Refused, StorageFailed, StratalogError
from stratalog_core.restarting import restarting
from stratalog_core.search_pool import SearchPool
from stratalog_core.system import resident_memory, return_free_memory
from stratalog_metadata.client.memory_metadata import MemoryMetadata
from stratalog_metadata.records import Cluster, Partition, Topic
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.cold.archive import Archive, read_owner
from stratalog_tiering.cold.lease import DURATION_MS, SharedLease, holder_name
from stratalog_tiering.format.descriptor import ReaderLease
from stratalog_tiering.format.object_keys import lease_key
from stratalog_tiering.store import ObjectStore, location_url

BROKER_ID: Final = 1
_THREADS: Final = 2
_TAKEOVER_CHECK_S: Final = 0.02
_NO_CLUSTER: Final = "archive"
_log = logging.getLogger("stratalog")


def archive_overrides(*, store: str, listen: str) -> dict[str, dict[str, Any]]:
    """Return the settings of the command line, which override file and environment."""
    return {
        "node": {"store": store},
        "broker": {"broker_id": BROKER_ID, "listen": listen, "auto_create_topics": False},
    }


async def start(node: Node, *, positions: Path, follow_s: float, with_deleted: bool, leased: bool = True) -> str:
    """Serve the bucket of ``[node] store``; return the address of the Kafka listener.

    ``follow_s``: interval in seconds at which new history is loaded; 0: only at the start. ``leased``: a lease in the bucket
    keeps what is served from being deleted.
    """
    settings = node.configuration.section(BrokerSettings, "broker")
    settings = replace(settings, connections_max=connections_within(settings.connections_max, open_files_max()))
    position_files, cache = await node.file(positions), await cache_files(node)
    await node.serve_http()
    shares = MemoryShares.of(settings.memory_bytes)
    background = node.background(_THREADS, "archive")
    searches = SearchPool(node.background(_THREADS, "searches"), shares.searches)
    metadata = MemoryMetadata()
    ledgers = LedgerClient(metadata, node.transport, node.clock, node.random, LedgerClientSettings())
    node.closing(ledgers.close)
    store = node.store()
    cold = await cold_reader(node, store, cache, shares.cold, background, searches)
    node.closing(cold.close)
    node.metrics.add_source(cold.metrics)
    positions_file = PositionsFile(position_files, positions.name, background)
    server = BrokerServer(
        settings, metadata, ledgers, cold, searches, node.clock, node.random,
        release_memory=lambda: background.run(return_free_memory), resident_memory=resident_memory,
        store_url=location_url(node.settings.store),
        handlers=READ_ONLY_HANDLERS, internal=positions_file,
    )  # fmt: skip
    node.metrics.add_source(server.metrics)
    # Closed after the server, which finishes the commits in progress.
    node.closing(positions_file.close)
    node.closing(server.close)
    await server.bind()
    await positions_file.load()
    await _put_own_records(metadata, store)
    topics = ArchivedTopics(
        Archive(store), metadata, BROKER_ID, hidden=INTERNAL_TOPICS, with_deleted=with_deleted
    )  # fmt: skip
    lease = _Lease(node, store) if leased else None
    partitions = await _load(topics, lease)
    await server.start()
    while server.partitions.takeovers_waiting:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(_TAKEOVER_CHECK_S)
    _log.info("serving %d partitions of %s, read-only", partitions, store.url)
    if follow_s:
        _follow(node, topics, lease, follow_s)

    async def read_record(key: str, _: float) -> object:
        found = metadata.get(key)
        return found.record if found is not None else None

    node.serving_when(partial(check_broker, server.listeners, BROKER_ID, read_record))
    load_messages_in_background(node)
    return server.kafka_address


async def _put_own_records(metadata: MemoryMetadata, store: ObjectStore) -> None:
    """Put the cluster's id and the internal topic of the groups, of which the positions file is the only partition."""
    owner = await read_owner(store)
    cluster_id = owner.cluster_id if owner is not None else _NO_CLUSTER
    topic = Topic(name=CONSUMER_OFFSETS, topic_id=UUID(int=1), partition_count=1, replication_factor=1, internal=True)
    records = (Cluster(cluster_id=cluster_id), topic, Partition(topic_id=topic.topic_id, index=0, owner=BROKER_ID))
    await metadata.propose(Command(updates=tuple(Put(record=record) for record in records)))


class _Lease:
    """The lease under which the archive is served, until the node stops."""

    def __init__(self, node: Node, store: ObjectStore) -> None:
        self._clock = node.clock
        self._random = node.random
        self._store = store
        self._held: list[tuple[SharedLease, asyncio.Task[None]]] = []
        self._is_refused = False
        node.closing(self._close)

    async def begin(self) -> bool:
        """Acquire another lease. On a failure, log it (only once if the store refuses) and return False."""
        now_ms = self._clock.wall_ms()
        document = ReaderLease(holder=holder_name("serve-archive"), began_at_ms=now_ms, duration_ms=DURATION_MS)
        lease = SharedLease(key=lease_key(self._random.getrandbits(64)), lease=document, begun_ms=now_ms)
        try:
            await lease.write(self._store)
        except StratalogError as failure:
            if not self._is_refused:
                _log.warning("serving without a lease, so objects may be deleted while they are served: %s", failure.message)
            self._is_refused = isinstance(failure, Invalid | Refused | StorageFailed)
            return False
        keeping = asyncio.get_running_loop().create_task(
            restarting(partial(lease.keep, self._store, self._clock), "the lease of the archive")
        )
        self._held.append((lease, keeping))
        return True

    async def end(self, *, newest: bool) -> None:
        """Release the newest lease, or all others."""
        await self._release(self._held[-1:] if newest else self._held[:-1])

    async def _release(self, ending: Sequence[tuple[SharedLease, asyncio.Task[None]]]) -> None:
        for lease, keeping in ending:
            keeping.cancel()
            await asyncio.wait((keeping,))
            self._held.remove((lease, keeping))
            try:
                await self._store.delete([lease.key])
            except StratalogError as failure:
                _log.info("a lease was not deleted and will expire: %s", failure.message)

    async def _close(self) -> None:
        await self._release([*self._held])


async def _load(topics: ArchivedTopics, lease: _Lease | None) -> int:
    """Load the topics under a new lease, then release the older leases. Without a new lease, keep the older ones."""
    if lease is None:
        return await topics.load()
    has_begun = await lease.begin()
    try:
        partitions = await topics.load()
    except StratalogError:
        if has_begun:
            await lease.end(newest=True)
        raise
    if has_begun:
        await lease.end(newest=False)
    return partitions


def _follow(node: Node, topics: ArchivedTopics, lease: _Lease | None, interval_s: float) -> None:
    """Load new history every ``interval_s``, until the node stops."""

    async def follow() -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await _load(topics, lease)
            except StratalogError as failure:
                _log.warning("the bucket could not be read again: %s", failure.message)

    following = asyncio.get_running_loop().create_task(restarting(follow, "the search for more history"))

    async def stop() -> None:
        following.cancel()
        await asyncio.wait((following,))

    node.closing(stop)
