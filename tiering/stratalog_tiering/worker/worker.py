"""The tiering worker: a role that offloads, verifies, trims and collects garbage, for all partitions that fall to it.

Life: claim the bucket, open a session, register, work (``worker_session.py``). When the session ends, everything stops at
once and begins anew with another session. A worker owns no partition and keeps no state of its own: what it must know
stands in metadata and in the bucket, so any number of workers may come and go.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from stratalog_core.errors import OutcomeUnknown, StratalogError, Unavailable
from stratalog_core.ports import Background, Clock, Random
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import CLUSTER_KEY, Cluster
from stratalog_metadata.records import TieringWorker as WorkerRecord
from stratalog_metadata.state.commands import Command, Put, SessionAlive
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.offload.ledger_source import LedgerSource
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.offload.publish import claim_bucket
from stratalog_tiering.offload.throttle import Throttle
from stratalog_tiering.store import ObjectStore
from stratalog_tiering.worker.session import WorkerSession

_START_ATTEMPTS: Final = 15
_PAUSE_S: Final = 1.0
_log = logging.getLogger(__name__)


class TieringWorker:
    """``start`` returns when the bucket is claimed; work goes on in the background until ``close``.

    ``background`` runs the checksums of what is offloaded; the store has threads of its own.
    """

    def __init__(
        self,
        settings: TieringSettings,
        metadata: MetadataClient,
        store: ObjectStore,
        ledgers: LedgerSource,
        clock: Clock,
        random: Random,
        background: Background,
    ) -> None:
        self._settings = settings
        self._metadata = metadata
        self._ports = WorkerPorts(
            settings=settings,
            metadata=metadata,
            store=store,
            source=ManifestSource(store, background=background),
            ledgers=ledgers,
            clock=clock,
            random=random,
            background=background,
            reading=Throttle(settings.read_bytes_per_s, clock),
            deleting=Throttle(settings.deletes_per_s, clock),
        )
        self._main: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises ``Invalid`` if it is another cluster's, ``Unavailable`` or ``OutcomeUnknown`` if it does not answer."""
        await self._claim_bucket()
        self._main = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Stop, and give leases up, so that others can go on at once. What was under way is begun anew by them."""
        if self._main is not None:
            self._main.cancel()
            await asyncio.gather(self._main, return_exceptions=True)
            self._main = None

    async def _claim_bucket(self) -> None:
        for attempt in range(_START_ATTEMPTS):
            try:
                cluster = self._metadata.view.find(Cluster, CLUSTER_KEY)
                if cluster is None:
                    raise Unavailable("the cluster has no identity yet")
                await claim_bucket(self._ports.store, cluster.cluster_id)
                return
            except (Unavailable, OutcomeUnknown) as failure:
                # A claim whose outcome is unknown is made again: it takes effect once, and what stands there is read after it.
                if attempt + 1 == _START_ATTEMPTS:
                    raise
                _log.info("waiting for store and cluster: %s", failure)
                await asyncio.sleep(_PAUSE_S)

    async def _run(self) -> None:
        while True:
            try:
                await self._serve_session()
            except StratalogError as failure:
                _log.warning("the worker's session ended: %s: %s", type(failure).__name__, failure)
            await asyncio.sleep(_PAUSE_S)

    async def _serve_session(self) -> None:
        worker_id, session = self._settings.worker_id, WorkerSession(self._ports)
        session_id = await self._metadata.open_session(
            f"tiering/{worker_id}", self._settings.session_lease_ms, session.expire
        )  # fmt: skip
        try:
            record = WorkerRecord(worker_id=worker_id, session_id=session_id)
            alive = SessionAlive(session_id=session_id)
            await self._metadata.propose(Command(updates=(Put(record=record),), requirements=(alive,)))
            await session.run(session_id)
        finally:
            await self._close_session(session_id)

    async def _close_session(self, session_id: int) -> None:
        try:
            await self._metadata.close_session(session_id)
        except StratalogError as failure:
            _log.info("the session is left to expire: %s", failure)
