"""One tiering worker: moves sealed ledgers to the object store. It serves no clients."""

from __future__ import annotations

from functools import partial

from stratalog.roles.priority import give_way
from stratalog.roles.readiness import check_tiering_worker
from stratalog.roles.runtime import Node
from stratalog_bookies.client import LedgerClient, LedgerClientSettings
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.offload.verification import BY_CHECKSUM
from stratalog_tiering.worker.store_probe import StoreCheck
from stratalog_tiering.worker.worker import TieringWorker

_CHECKSUM_THREADS = 2


async def start(node: Node) -> str:
    """Start the worker. Returns its name, since it has no address."""
    settings = node.configuration.section(TieringSettings, "tiering")
    give_way(settings.niceness)
    await node.serve_http()
    metadata = await node.metadata()
    ledgers = LedgerClient(
        metadata, node.transport, node.clock, node.random, node.configuration.section(LedgerClientSettings, "ledgers")
    )
    node.closing(ledgers.close)
    background = node.background(_CHECKSUM_THREADS, "checksums")
    store = node.store()
    by_checksum = settings.verify == BY_CHECKSUM
    check, second = StoreCheck(store, node.clock, node.random, needs_checksums=by_checksum), node.second_store()
    worker = TieringWorker(
        settings, metadata, store, ledgers, node.clock, node.random, background, check_store=check.ensure, second=second,
        check_second=StoreCheck(second, node.clock, node.random).ensure if second is not None else check.ensure,
    )  # fmt: skip
    node.metrics.add_source(worker.metrics)
    await worker.start()
    node.closing(worker.close)
    node.serving_when(partial(check_tiering_worker, settings.worker_id, node.read_record))
    return settings.worker_id
