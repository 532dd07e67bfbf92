"""The broker: puts its parts together, listens, registers, and stops in good order.

Starting: listen (so that the port is known), register, take over. Stopping: hand all partitions to others while still serving;
then take no more requests, finish those in progress, seal what nobody took, give the session up, close.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from stratalog_bookies.client import LedgerClient
from stratalog_broker.cluster.advertised_brokers import NamedBrokers
from stratalog_broker.cluster.load_meter import LoadMeter
from stratalog_broker.cluster.partition_rows import PartitionRows
from stratalog_broker.cluster.producer_ids import ProducerIds
from stratalog_broker.cluster.registration import Registration
from stratalog_broker.configs.listeners import Listener, advertised_endpoints, parse_listeners
from stratalog_broker.configs.memory import SESSION_PARTITION_BYTES, MemoryShares, Peaks, within_memory
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.coordination.groups.service import GroupService
from stratalog_broker.handlers import HANDLERS
from stratalog_broker.metrics import BrokerMetrics, MemoryMetrics, RequestMetrics
from stratalog_broker.network.connection import SHARED_BUFFER_BYTES, ClientConnection
from stratalog_broker.network.unsent_responses import UnsentResponses
from stratalog_broker.partitions.handover import leave
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.reads.fetch_sessions import FetchSessions
from stratalog_broker.reads.log_reader import LogReader
from stratalog_broker.reads.pending_reads import PendingReads
from stratalog_broker.requests.context import BrokerServices
from stratalog_broker.requests.deadlines import Deadlines
from stratalog_core.connections.silent_clients import LOOK_S, SilentClients
from stratalog_core.errors import Invalid
from stratalog_core.metrics.groups import MetricGroup
from stratalog_core.ports import Clock, Random
from stratalog_core.search_pool import SearchPool
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Broker, topic_key
from stratalog_tiering.cold.reader import ColdReader

_log = logging.getLogger(__name__)
_REFUSALS_TOLD_S: Final = 10.0


class ConnectionRegistry:
    """All connections, and what their requests and responses make the broker hold."""

    def __init__(self, services: BrokerServices) -> None:
        self.services = services
        self.shared_buffer = memoryview(bytearray(SHARED_BUFFER_BYTES))
        self.is_draining = False
        self.is_full = False
        """Requests fill their share of the memory: no connection begins to read another one."""
        self.responses = UnsentResponses(services.memory.responses)
        self.requests = RequestMetrics({key: info.name for key, info in HANDLERS.items()})
        self._connections: set[ClientConnection] = set()
        self._silent = SilentClients(self._connections, services.settings.connection_idle_ms / 1000)
        self._bytes_held = 0
        self._stalled: dict[ClientConnection, None] = {}
        self._making_room = False
        self._answered = asyncio.Event()
        self.refused = 0
        """Connections that were one too many."""
        self._refusals_told_until_s = 0.0

    @property
    def bytes_held(self) -> int:
        """Bytes of requests that are being read, handled or written."""
        return self._bytes_held

    def __len__(self) -> int:
        return len(self._connections)

    def opened(self, connection: ClientConnection) -> bool:
        """Count a new connection; False if it is one too many."""
        if len(self._connections) >= self.services.settings.connections_max:
            self._count_refused()
            return False
        self._connections.add(connection)
        return True

    def _count_refused(self) -> None:
        """One line in a while, however many come: clients that are refused come again at once."""
        self.refused += 1
        now = self.services.clock.monotonic()
        if now >= self._refusals_told_until_s:
            self._refusals_told_until_s = now + _REFUSALS_TOLD_S
            text = "%d clients are connected, which is connections_max: more are closed at once (%d so far)"
            _log.warning(text, len(self._connections), self.refused)

    def closed(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        self._stalled.pop(connection, None)
        self._answered.set()

    def charge(self, request_bytes: int) -> bool:
        """Hold a request; False if there is no room now. A single one is always let in."""
        if self._bytes_held and self._bytes_held + request_bytes > self.services.memory.requests:
            self._set_full(True)
            return False
        self._bytes_held += request_bytes
        return True

    def charge_more(self, request_bytes: int) -> None:
        """A request that is held turns out to take more."""
        self._bytes_held += request_bytes

    def _set_full(self, is_full: bool) -> None:
        if self.is_full is not is_full:
            self.is_full = is_full
            for connection in list(self._connections):
                connection.regulate()

    def discharge(self, request_bytes: int) -> None:
        self._bytes_held -= request_bytes
        if self.is_full and not self._making_room:
            self._making_room = True
            asyncio.get_running_loop().call_soon(self._make_room)

    def wait_for_room(self, connection: ClientConnection) -> None:
        """``connection.room_made`` is called when there is room again."""
        self._stalled[connection] = None

    def _make_room(self) -> None:
        self._making_room = False
        # Not at each byte that is given back: all connections are told.
        if self._bytes_held > self.services.memory.requests // 4 * 3:
            return
        self._set_full(False)
        stalled, self._stalled = self._stalled, {}
        for connection in stalled:
            connection.room_made()

    def sweep(self) -> None:
        """Close connections that are silent for too long, and those that stopped within a frame."""
        self._silent.look()
        self.responses.look()

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests and wait until those in progress are answered."""
        self.is_draining = True
        for connection in list(self._connections):
            connection.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(not connection.is_idle for connection in self._connections):
                    self._answered.clear()
                    await self._answered.wait()

    def became_idle(self) -> None:
        """A connection has answered everything while the broker stops."""
        self._answered.set()

    def close_all(self) -> None:
        for connection in list(self._connections):
            connection.close("the broker stops")


class BrokerServer:
    """One broker. Everything it needs is handed in; it owns none of it."""

    def __init__(
        self,
        settings: BrokerSettings,
        metadata: MetadataClient,
        ledgers: LedgerClient,
        cold: ColdReader,
        searches: SearchPool,
        clock: Clock,
        random: Random,
        release_memory: Callable[[], object] = lambda: None,
    ) -> None:
        """``release_memory`` returns free memory to the system; it is called when a peak is over, and must not block."""
        settings = within_memory(settings)
        memory = MemoryShares.of(settings.memory_bytes)
        services = BrokerServices(
            settings=settings, memory=memory, metadata=metadata, ledgers=ledgers, cold=cold, searches=searches, clock=clock,
            random=random,
        )  # fmt: skip
        self._settings = settings
        self._services = services
        services.deadlines = Deadlines(clock)
        services.partitions = Partitions(services)
        services.partition_rows = PartitionRows(metadata.view)
        services.named_brokers = NamedBrokers(metadata.view, clock)
        services.reader = LogReader(services, services.partitions.memory.indexes)
        services.pending_reads = PendingReads(
            services.reader,
            clock,
            hot_reads_max=settings.hot_reads_max,
            cold_reads_max=settings.cold_reads_max,
            bytes_max=memory.reads,
        )
        services.fetch_sessions = FetchSessions(
            settings.fetch_sessions_max, memory.sessions // SESSION_PARTITION_BYTES, random
        )  # fmt: skip
        services.producer_ids = ProducerIds(metadata)
        services.groups = GroupService(services)
        self.connections = services.connections = ConnectionRegistry(services)
        self._listeners = parse_listeners(settings.listen, "listen")
        if not self._listeners:
            raise Invalid("listen is empty; name at least one HOST:PORT")
        self._servers: list[asyncio.Server] = []
        self.load = LoadMeter(services)
        self._registration: Registration | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._peaks = Peaks(settings.memory_bytes)
        self._release_memory = release_memory

    @property
    def services(self) -> BrokerServices:
        """The parts, for tests and for the node that runs several roles in one process."""
        return self._services

    @property
    def kafka_address(self) -> str:
        """``host:port`` that the first listener is bound to."""
        return self.listeners[0].address

    @property
    def listeners(self) -> list[Listener]:
        """The listeners with their real ports."""
        assert self._servers, "the broker is started"
        pairs = zip(self._listeners, self._servers, strict=True)
        return [listener._replace(port=server.sockets[0].getsockname()[1]) for listener, server in pairs]

    def metrics(self) -> Iterator[MetricGroup]:
        """For a scrape."""
        services, connections = self._services, self.connections
        hot_reads, cold_reads = services.pending_reads.reads_in_progress
        yield BrokerMetrics(
            connections=len(connections),
            connections_refused=connections.refused,
            partitions=len(services.partitions.all()),
            takeovers_waiting=services.partitions.takeovers_waiting,
            hot_reads=hot_reads,
            cold_reads=cold_reads,
            unreadable_group_records=services.groups.unreadable_records,
        )
        yield services.partitions.takeover_metrics
        yield from connections.requests.metrics()
        yield from self._memory_metrics()
        yield from self.load.traffic.metrics(lambda topic: services.view.get(topic_key(topic)) is not None)

    def _memory_metrics(self) -> Iterator[MemoryMetrics]:
        services, connections, shares = self._services, self.connections, self._services.memory
        partitions = services.partitions.memory
        yield MemoryMetrics(share="requests", used_bytes=connections.bytes_held, limit_bytes=shares.requests)
        yield MemoryMetrics(share="responses", used_bytes=connections.responses.bytes_held, limit_bytes=shares.responses)
        yield MemoryMetrics(share="tail", used_bytes=partitions.tails.bytes_held, limit_bytes=partitions.tails.bytes_max)
        yield MemoryMetrics(share="indexes", used_bytes=partitions.indexes.bytes_held, limit_bytes=shares.indexes)
        yield MemoryMetrics(share="reads", used_bytes=services.pending_reads.bytes_held, limit_bytes=shares.reads)
        yield MemoryMetrics(share="searches", used_bytes=services.searches.bytes_held, limit_bytes=shares.searches)

    async def start(self) -> None:
        """Listen and register. Partitions are served as they are taken over. Raises ``OSError`` if a port is taken."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            accept = partial(ClientConnection, self.connections, listener.name)
            self._servers.append(await loop.create_server(accept, listener.host, listener.port, backlog=1024))
        partitions = self._services.partitions
        self._registration = Registration(
            self._services.metadata,
            self._services.clock,
            broker=self._record(),
            lease_ms=self._settings.lease_ms,
            grace_ms=min(self._settings.grace_ms, self._settings.lease_ms),
            load=self.load.report,
            on_registered=partitions.resume,
            on_lost=partitions.suspend,
        )
        await self._registration.start()
        self._services.groups.start()
        self._sweeper = loop.call_later(LOOK_S, self._sweep)

    def _record(self) -> Broker:
        first, *further = advertised_endpoints(self.listeners, self._settings.advertised)
        return Broker(
            broker_id=self._settings.broker_id,
            host=first.host,
            port=first.port,
            session_id=0,
            rack=self._settings.rack,
            endpoints=tuple(further),
        )

    def _sweep(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(LOOK_S, self._sweep)
        self.connections.sweep()
        self._services.partitions.memory.bound(self._services.partitions.all())
        if self._peaks.has_ended(self.bytes_held):
            self._release_memory()

    @property
    def bytes_held(self) -> int:
        """Real size of everything that the budget bounds."""
        services, connections = self._services, self.connections
        requests_and_responses = connections.bytes_held + connections.responses.bytes_held
        return requests_and_responses + services.partitions.memory.bytes_held + services.pending_reads.bytes_held

    async def close(self) -> None:
        """Stop in good order; see the module's header."""
        timeout_s = self._settings.shutdown_ms / 1000
        if self._registration is not None:
            await leave(self._services, self._registration, timeout_s)
        self._stop_listening()
        self._services.is_stopping = True
        self._services.partitions.wake_all()
        await self.connections.drain(timeout_s)
        await self._services.partitions.seal_all(timeout_s)
        self._services.partitions.suspend()
        if self._registration is not None:
            await self._registration.close()
        await self._release()

    async def abandon(self) -> None:
        """Stop as a crash would: nothing is sealed, the session is left to expire. For tests and the simulator."""
        self._stop_listening()
        self.connections.close_all()
        self._services.partitions.suspend()
        await self._release()

    def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def _release(self) -> None:
        self.connections.close_all()
        self._services.partition_rows.close()
        self._services.named_brokers.close()
        await self._services.partitions.close()
        await self._services.pending_reads.close()
        self._services.groups.close()
        self._services.deadlines.close()
