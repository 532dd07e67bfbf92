"""Keeps the broker registered: its record, by which the controller assigns partitions to it, and its session.

When the session ends on the broker's own clock, which is never later than the quorum can end it, ``on_lost`` is called first;
then a new session is opened, and ``on_registered`` is called again. While another process is registered with the broker's id,
registration waits until that session has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from stratalog_core.errors import Conflict, StratalogError
from stratalog_core.ports import Clock
from stratalog_core.restarting import restarting
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.protocol.broker_loads import BrokerLoad
from stratalog_metadata.records import Broker, broker_key
from stratalog_metadata.state.commands import ABSENT, Command, Put, SessionAlive, VersionIs

_log = logging.getLogger(__name__)
_RETRY_S: Final = 0.2


class Registration:
    """``broker`` is the record to register; its session id is filled in."""

    def __init__(
        self,
        metadata: MetadataClient,
        clock: Clock,
        *,
        broker: Broker,
        lease_ms: int,
        grace_ms: int,
        load: Callable[[], BrokerLoad | None] | None = None,
        on_registered: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._metadata = metadata
        self._clock = clock
        self._broker = broker
        self._lease_ms = lease_ms
        self._grace_ms = grace_ms
        self._load = load
        self._on_registered = on_registered
        self._on_lost = on_lost
        self._session_id: int | None = None
        self._registered = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register; return after the first registration has succeeded."""
        self._keeping = asyncio.get_running_loop().create_task(
            restarting(self._keep_registered, "the registration of the broker")
        )
        self._keeping.add_done_callback(lambda _: self._registered.set())
        await self._registered.wait()
        if self._keeping.done():
            await self._keeping

    async def _keep_registered(self) -> None:
        """Open one session after the other, each until it expires."""
        while True:
            expired = asyncio.Event()
            try:
                await self._register(expired)
            except StratalogError as again:
                _log.info("registering broker %d: %s", self._broker.broker_id, again)
                await asyncio.sleep(_RETRY_S)
                continue
            await expired.wait()

    async def _register(self, expired: asyncio.Event) -> None:
        """Open a session and write the record. A failure ends the session: its record would keep the next one out."""
        session_id = await self._open_session(expired)
        try:
            await self._put(session_id)
            if not expired.is_set():
                self._begin()
        except Exception:
            await self._give_up(session_id)
            raise

    def _begin(self) -> None:
        try:
            self._on_registered()
        except Exception:
            self._on_lost()
            raise
        self._registered.set()

    async def _open_session(self, expired: asyncio.Event) -> int:
        def on_expired() -> None:
            if self._session_id is not None:
                _log.warning("broker %d lost its session: it stops serving and registers again", self._broker.broker_id)
                self._on_lost()
            expired.set()

        holder = f"broker {self._broker.broker_id}"
        self._session_id = await self._metadata.open_session(holder, self._lease_ms, on_expired, self._grace_ms, self._load)
        return self._session_id

    async def _put(self, session_id: int) -> None:
        """Write the broker's record. Raises ``Conflict`` while another process is registered with the id."""
        (found,) = await self._metadata.read([broker_key(self._broker.broker_id)])
        if found is not None:
            raise Conflict(f"broker id {self._broker.broker_id} is registered; waiting for that session to end")
        record = msgspec.structs.replace(self._broker, session_id=session_id)
        requirements = (SessionAlive(session_id=session_id), VersionIs(key=record.key(), version=ABSENT))
        await self._metadata.propose(Command(updates=(Put(record=record),), requirements=requirements))

    async def announce_stop(self) -> None:
        """Make the controller reassign this broker's partitions. Raises ``Conflict``, ``SessionExpired``, ``Unavailable``."""
        (found,) = await self._metadata.read([broker_key(self._broker.broker_id)])
        if found is None or not isinstance(found.record, Broker) or found.record.session_id != self._session_id:
            raise Conflict(f"broker {self._broker.broker_id} is not registered by this process")
        change = Put(record=msgspec.structs.replace(found.record, stopping=True))
        requirements = (VersionIs(key=found.record.key(), version=found.version),)
        await self._metadata.propose(Command(updates=(change,), requirements=requirements))

    async def _give_up(self, session_id: int | None) -> None:
        if session_id is not None:
            try:
                await self._metadata.close_session(session_id)
            except StratalogError as failure:
                _log.info("closing session %d: %s", session_id, failure)

    async def close(self) -> None:
        """Close the session, so that other brokers take over now."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        session_id, self._session_id = self._session_id, None
        await self._give_up(session_id)
