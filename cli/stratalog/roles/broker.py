"""One stateless broker: Kafka's protocol in front, ledgers and the cold reader behind."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from functools import partial
from pathlib import Path

from stratalog.roles.open_files import connections_within, open_files_max
from stratalog.roles.priority import take_turns
from stratalog.roles.readiness import check_broker
from stratalog.roles.runtime import Node
from stratalog_bookies.client import LedgerClient, LedgerClientSettings
from stratalog_broker.configs.memory import MemoryShares
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.network.message_loading import load_messages
from stratalog_broker.network.server import BrokerServer
from stratalog_broker.partitions.state_uploads import StateUploads
from stratalog_core.ports import Background, Files
from stratalog_core.search_pool import SearchPool
from stratalog_core.system import resident_memory, return_free_memory
from stratalog_metadata.client.api import MetadataClient
from stratalog_tiering.cold.block_source import ColdReaderSettings
from stratalog_tiering.cold.reader import ColdReader
from stratalog_tiering.offload.coordinator_states import CoordinatorStates
from stratalog_tiering.store import ObjectStore, StoreWithCopy, location_url

_THREADS = 2


async def start(node: Node) -> str:
    """Start the broker and register it. Returns the address of its Kafka listener."""
    take_turns(node.settings.turn_us)
    settings = node.configuration.section(BrokerSettings, "broker")
    settings = replace(settings, connections_max=connections_within(settings.connections_max, open_files_max()))
    cache = await cache_files(node)
    await node.serve_http()
    metadata = await node.metadata()
    ledgers = LedgerClient(
        metadata, node.transport, node.clock, node.random, node.configuration.section(LedgerClientSettings, "ledgers")
    )
    node.closing(ledgers.close)
    node.metrics.add_source(ledgers.metrics)
    background = node.background(_THREADS, "broker")
    shares = MemoryShares.of(settings.memory_bytes)
    searches = SearchPool(node.background(_THREADS, "searches"), shares.searches)
    first, second = node.store(), node.second_store()
    reads = first if second is None else StoreWithCopy(first, second, node.clock)
    cold = await cold_reader(node, reads, cache, shares.cold, background, searches)
    node.closing(cold.close)
    node.metrics.add_source(cold.metrics)
    server = BrokerServer(
        settings, metadata, ledgers, cold, searches, node.clock, node.random,
        release_memory=lambda: background.run(return_free_memory), resident_memory=resident_memory,
        store_url=location_url(node.settings.store),
    )  # fmt: skip
    node.metrics.add_source(server.metrics)
    await server.start()
    node.closing(server.close)
    for store in (first,) if second is None else (first, second):
        upload_states(node, settings, server, metadata, store)
    node.serving_when(partial(check_broker, server.listeners, settings.broker_id, node.read_record))
    load_messages_in_background(node)
    return server.kafka_address


def upload_states(
    node: Node, settings: BrokerSettings, server: BrokerServer, metadata: MetadataClient, store: ObjectStore
) -> None:
    """Store the states of coordinators in ``store`` until the node stops, if the settings want it."""
    if not settings.state_upload_interval_ms:
        return
    states = CoordinatorStates(store, metadata, node.clock)
    uploads = StateUploads(server.partitions.all, states, node.clock, settings.state_upload_interval_ms)
    node.metrics.add_source(uploads.metrics)
    uploads.start()
    node.closing(uploads.close)


def load_messages_in_background(node: Node) -> None:
    """Load Kafka's message classes in the background, until the node stops."""
    background = node.background(1, "messages")

    async def load() -> None:
        await load_messages(background)
        # The classes live as long as the process: exclude them from collections.
        gc.freeze()

    loading = asyncio.get_running_loop().create_task(load())

    async def stop() -> None:
        loading.cancel()
        await asyncio.wait((loading,))

    node.closing(stop)


async def cache_files(node: Node) -> Files | None:
    """Lock the directory of the disk cache; None if the settings want none. Raises as ``Node.files`` does."""
    settings = node.configuration.section(ColdReaderSettings, "cold")
    return await node.files(Path(node.settings.cache_dir)) if settings.disk_bytes and node.settings.cache_dir else None


async def cold_reader(
    node: Node, store: ObjectStore, cache: Files | None, memory_bytes: int, background: Background, searches: SearchPool
) -> ColdReader:
    """Return a reader of ``store``, with blocks on the disk in ``cache``."""
    settings = node.configuration.section(ColdReaderSettings, "cold")
    return ColdReader(
        store, settings, node.clock,
        memory_bytes=memory_bytes, files=cache, background=background, searches=searches,
    )  # fmt: skip
