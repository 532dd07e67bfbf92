"""One tiering worker: takes sealed ledgers to the object store. It listens on nothing."""

from __future__ import annotations

from stratalog_tiering.config import TieringSettings
from stratalog_tiering.worker import TieringWorker

from stratalog.roles.runtime import Node
from stratalog_bookies.client import LedgerClient, LedgerClientSettings


async def start(node: Node) -> str:
    """Start the worker; its name, since it has no address."""
    settings = node.configuration.section(TieringSettings, "tiering")
    metadata = await node.metadata()
    ledgers = LedgerClient(
        metadata, node.transport, node.clock, node.random, node.configuration.section(LedgerClientSettings, "ledgers")
    )
    node.closing(ledgers.close)
    worker = TieringWorker(settings, metadata, node.store(), ledgers, node.clock, node.random)
    await worker.start()
    node.closing(worker.close)
    return settings.worker_id
