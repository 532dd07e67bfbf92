"""The tiering worker: a role that offloads, verifies, applies retention and collects garbage for its share of the partitions.

It claims the bucket (``offload/ownership.py``), opens a session, registers and works (``session.py``). When the session ends,
all work stops at once and a new session begins. A worker keeps no state of its own: everything that it must know is in metadata
and in the bucket, so workers can be added and removed at any time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from stratalog_core.errors import Refused, StorageFailed, StratalogError, Unavailable
from stratalog_core.metrics.groups import MetricGroup
from stratalog_core.ports import Background, Clock, Random
from stratalog_core.restarting import restarting
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import TieringWorker as WorkerRecord
from stratalog_metadata.state.commands import Command, Put, SessionAlive
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.copies.copying import CopyLimits
from stratalog_tiering.copies.second import SecondCopy
from stratalog_tiering.metrics import ScrubMetrics, TieringMetrics, tiering_lag
from stratalog_tiering.offload.ownership import BucketOwnership
from stratalog_tiering.offload.ports import LedgerSource, Throttle, WorkerPorts, trusted, worker_ports
from stratalog_tiering.store import ObjectStore
from stratalog_tiering.worker.session import WorkerSession

_PAUSE_S: Final = 1.0
_log = logging.getLogger(__name__)


class TieringWorker:
    """One worker. It works in the background from ``start`` until ``close``.

    ``background`` computes the checksums of offloaded data; the store has its own threads. ``check_store`` is awaited before
    the bucket is claimed, and raises ``Invalid`` if the store is not safe to write to (``store_probe.py``).
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
        *,
        check_store: Callable[[], Awaitable[None]] = trusted,
        second: ObjectStore | None = None,
        check_second: Callable[[], Awaitable[None]] = trusted,
    ) -> None:
        """``second`` is the store of the second copy, if there is to be one."""
        self._settings = settings
        self._metadata = metadata
        self._ports = worker_ports(
            settings, metadata, store, ledgers, clock, random, background, check_store=check_store, second_store=second
        )  # fmt: skip
        self._second = _second_copy(self._ports, second, check_second) if second is not None else None
        self._scrubbed = ScrubMetrics()
        self._session: WorkerSession | None = None
        self._main: asyncio.Task[None] | None = None

    def metrics(self) -> Iterator[MetricGroup]:
        """For a scrape."""
        yield self._ports.counters
        yield self._session.metrics() if self._session is not None else TieringMetrics()
        if self._second is not None:
            yield self._second.counters
        if self._settings.scrub_interval_ms:
            yield self._scrubbed
        yield from tiering_lag(self._metadata.view, self._ports.clock.wall_ms())

    async def start(self) -> None:
        """Claim the bucket and start to work.

        If the store does not answer, or refuses requests, the worker starts all the same. It retries the claim with every step
        that needs the store; until the claim succeeds it only removes expired hot ledgers. Raises ``Invalid`` if another
        cluster owns the bucket, or the store is not safe to write to.
        """
        try:
            await self._ports.bucket.ensure()
        except (Refused, StorageFailed, Unavailable) as failure:
            _log.warning("the worker starts before its bucket is claimed: %s: %s", type(failure).__name__, failure)
        self._main = asyncio.ensure_future(restarting(self._run, "the tiering worker"))

    async def close(self) -> None:
        """Stop and close the session, which releases all leases. Other workers repeat what was in progress."""
        if self._main is not None:
            self._main.cancel()
            await asyncio.gather(self._main, return_exceptions=True)
            self._main = None

    async def _run(self) -> None:
        while True:
            try:
                await self._serve_session()
            except StratalogError as failure:
                _log.warning("the worker's session ended: %s: %s", type(failure).__name__, failure)
            await asyncio.sleep(_PAUSE_S)

    async def _serve_session(self) -> None:
        worker_id, session = self._settings.worker_id, WorkerSession(self._ports, self._second, self._scrubbed)
        session_id = await self._metadata.open_session(
            f"tiering/{worker_id}", self._settings.session_lease_ms, session.expire
        )  # fmt: skip
        self._session = session
        self._ports.counters.sessions += 1
        try:
            record = WorkerRecord(worker_id=worker_id, session_id=session_id)
            alive = SessionAlive(session_id=session_id)
            await self._metadata.propose(Command(updates=(Put(record=record),), requirements=(alive,)))
            await session.run(session_id)
        finally:
            self._session = None
            await self._close_session(session_id)

    async def _close_session(self, session_id: int) -> None:
        try:
            await self._metadata.close_session(session_id)
        except StratalogError as failure:
            _log.info("the session was not closed and will expire: %s", failure)


def _second_copy(ports: WorkerPorts, store: ObjectStore, check_store: Callable[[], Awaitable[None]]) -> SecondCopy:
    settings = ports.settings
    limits = CopyLimits(
        background=ports.background, clock=ports.clock, take=Throttle(settings.copy_bytes_per_s, ports.clock).take,
        part_bytes=settings.upload_part_bytes,
    )  # fmt: skip
    bucket = BucketOwnership(store, ports.metadata, ports.clock, settings.copy_grace_ms, check_store)
    return SecondCopy(store, bucket, limits, settings.copy_grace_ms)
