"""The ports of a command that edits history beside running workers, as ``job erase`` and ``job compact`` do."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from stratalog.hot.session import ledger_session
from stratalog.tier.session import store_session
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.offload.ownership import check_claim, cluster_id_in
from stratalog_tiering.offload.ports import WorkerPorts, worker_ports

_CHECKSUM_THREADS = 2


@asynccontextmanager
async def editing_session(addresses: Sequence[str], store_url: str, writer: str) -> AsyncIterator[WorkerPorts]:
    """Ports that write manifests in the name of ``writer``.

    Raises ``Invalid`` if the store is not the bucket of the cluster, ``Unavailable``.
    """
    background = ThreadBackground(_CHECKSUM_THREADS, "checksums")
    try:
        async with ledger_session(addresses) as (metadata, ledgers), store_session(store_url) as store:
            await check_claim(store, cluster_id_in(metadata))
            settings = TieringSettings(worker_id=writer)
            yield worker_ports(settings, metadata, store, ledgers, SystemClock(), random.SystemRandom(), background)
    finally:
        background.close()
