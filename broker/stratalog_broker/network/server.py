"""The broker: assembles its parts, listens, registers, and shuts down in order.

Start: listen (so that the port is known), register, take over partitions. Controlled shutdown: hand all partitions over while
still serving; stop accepting requests; finish those in progress; seal the partitions that no broker took; end the session;
close.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from stratalog_bookies.client import LedgerClient
from stratalog_broker.admin.config_commands import ConfigCommands
from stratalog_broker.admin.ownership_orders import OwnershipOrders
from stratalog_broker.admin.topics import TopicCommands
from stratalog_broker.cluster.advertised_brokers import AdvertisedBrokers
from stratalog_broker.cluster.load_meter import LoadMeter
from stratalog_broker.cluster.partition_rows import PartitionRows
from stratalog_broker.cluster.producer_ids import ProducerIds
from stratalog_broker.cluster.registration import Registration
from stratalog_broker.configs.listeners import Listener, advertised_endpoints, parse_listeners
from stratalog_broker.configs.memory import SESSION_PARTITION_BYTES, FreeMemory, MemoryShares, within_memory
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.coordination.groups.service import GroupService
from stratalog_broker.coordination.locator import CoordinatorLocator
from stratalog_broker.coordination.offset_transactions import OffsetTransactions
from stratalog_broker.coordination.transaction_verification import TransactionVerifier
from stratalog_broker.coordination.transactions.service import TransactionService
from stratalog_broker.handlers import HANDLERS
from stratalog_broker.handlers.produce import API as PRODUCE
from stratalog_broker.metrics import BrokerMetrics, MemoryMetrics
from stratalog_broker.network.admission import Admission
from stratalog_broker.network.connection import ClientConnection
from stratalog_broker.network.registry import ConnectionRegistry
from stratalog_broker.partitions.handover import leave
from stratalog_broker.partitions.internal_topics import InternalPartitions
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.peers.peers import Peers
from stratalog_broker.reads.aborted_transactions import AbortedTransactions
from stratalog_broker.reads.log_reader import LogReader
from stratalog_broker.reads.offset_lookup import OffsetLookup
from stratalog_broker.reads.pending_reads import PendingReads
from stratalog_broker.reads.replay_pace import ReplayPace
from stratalog_broker.reads.time_searches import TimeSearches
from stratalog_broker.requests.access import OPEN, AccessRules
from stratalog_broker.requests.deadlines import Deadlines
from stratalog_broker.requests.fetch_sessions import FetchSessions
from stratalog_broker.requests.handler_info import HandlerInfo, Services
from stratalog_broker.requests.permissions import Permissions
from stratalog_broker.requests.produced_records import ProducedRecords
from stratalog_broker.requests.replica_reads import ReplicaReads
from stratalog_broker.requests.served_apis import ServedApis
from stratalog_broker.requests.unsent_responses import UnsentResponses
from stratalog_broker.telemetry.service import ClientTelemetry
from stratalog_core.connections.silent_clients import LOOK_S
from stratalog_core.errors import Invalid
from stratalog_core.metrics.groups import Histogram, MetricGroup
from stratalog_core.ports import Clock, Random
from stratalog_core.search_pool import SearchPool
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.records import Broker, topic_key
from stratalog_tiering.cold.reader import ColdReader


def _listeners_of(settings: BrokerSettings) -> tuple[Listener, ...]:
    listeners = parse_listeners(settings.listen, "listen")
    if not listeners:
        raise Invalid("listen is empty; name at least one HOST:PORT")
    return listeners


class BrokerServer:
    """One broker. The clients, clock and random source are passed in; it does not close them.

    ``handlers`` are the APIs to serve. ``internal`` keeps the coordinators' records; None: the broker itself.
    """

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
        rules: AccessRules = OPEN,
        *,
        handlers: Mapping[int, HandlerInfo] = HANDLERS,
        internal: InternalPartitions | None = None,
        store_url: str = "",
        resident_memory: Callable[[], int] = lambda: 0,
    ) -> None:
        """``store_url`` is what clients are told. ``resident_memory`` is that of the process, in bytes; 0 if unknown.

        ``release_memory`` returns the allocator's free memory to the system, in the background.
        """
        self.settings = settings = within_memory(settings)
        self.metadata = metadata
        self.clock = clock
        self.searches = searches
        self._store_url = store_url
        self._shares = shares = MemoryShares.of(settings.memory_bytes)
        self.partitions = Partitions(
            settings=settings, shares=shares, metadata=metadata, ledgers=ledgers, cold=cold, clock=clock, random=random
        )
        self.reader = LogReader(metadata.view, ledgers, cold, clock, self.partitions.memory.indexes)
        self.aborted = AbortedTransactions(self.reader, cold)
        self._replay_pace = ReplayPace(clock, self._produce_seconds, settings.replay_percent_min)
        self.pending_reads = PendingReads(
            self.reader,
            clock,
            self._replay_pace,
            hot_reads_max=settings.hot_reads_max,
            cold_reads_max=settings.cold_reads_max,
            bytes_max=shares.reads,
            # Records may be compacted before a later fetch. Those of other brokers' partitions are cached block by block.
            is_kept=lambda log: isinstance(log, PartitionLog) and not log.configs.is_compacted,
        )
        self._replica_reads = ReplicaReads(settings.broker_id, settings.rack, metadata, self.partitions, clock)
        self.topic_commands = TopicCommands(settings, metadata, clock, random)
        ensure = self.topic_commands.ensure_internal
        self.locator = CoordinatorLocator(settings.broker_id, metadata.view, clock, internal or self.partitions, ensure)
        self.groups = GroupService(settings, metadata, clock, self.locator)
        self.advertised_brokers = AdvertisedBrokers(metadata.view, clock)
        self.peers = Peers(metadata.view, clock)
        self._producer_ids = ProducerIds(metadata, clock)
        self.transactions: TransactionService | None = None
        if internal is None:
            self.transactions = TransactionService(settings, metadata, clock, self.locator, self.peers, self._producer_ids)
        self.verifier = TransactionVerifier(self.locator, self.peers, clock)
        self._partition_rows = PartitionRows(metadata.view)
        self._deadlines = Deadlines(clock)
        self._produced_records = ProducedRecords(searches)
        self._telemetry = ClientTelemetry(metadata.view, searches, clock, random)
        self._responses = UnsentResponses(shares.responses)
        self.apis = ServedApis(handlers.values(), self._services(ledgers, cold, random, rules))
        self.connections = ConnectionRegistry(settings, shares, clock, Admission(self.apis, rules), self._responses)
        self._listeners = _listeners_of(settings)
        self._servers: list[asyncio.Server] = []
        self.load = LoadMeter(settings.broker_id, clock, self.partitions.all, lambda: self.groups.unreadable_records)
        self._registration: Registration | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._free_memory = FreeMemory(settings.memory_bytes, resident_memory())
        self._resident_memory = resident_memory
        self._release_memory = release_memory

    def _services(self, ledgers: LedgerClient, cold: ColdReader, random: Random, rules: AccessRules) -> Services:
        """Return the parts of this broker that handlers may use."""
        settings, metadata, shares = self.settings, self.metadata, self._shares
        own = {} if self.transactions is None else {TransactionService: self.transactions}
        return {
            **own,
            BrokerSettings: settings,
            MetadataView: metadata.view,
            MetadataClient: metadata,
            Clock: self.clock,
            ColdReader: cold,
            Random: random,
            AbortedTransactions: self.aborted,
            AdvertisedBrokers: self.advertised_brokers,
            ConfigCommands: ConfigCommands(settings, self.topic_commands, metadata, self._store_url),
            CoordinatorLocator: self.locator,
            Deadlines: self._deadlines,
            FetchSessions: FetchSessions(settings.fetch_sessions_max, shares.sessions // SESSION_PARTITION_BYTES, random),
            GroupService: self.groups,
            ProducedRecords: self._produced_records,
            OffsetTransactions: OffsetTransactions(self.locator, self.partitions, self.verifier),
            OffsetLookup: OffsetLookup(self.reader, TimeSearches(self.reader, ledgers, cold, self.searches)),
            OwnershipOrders: OwnershipOrders(metadata),
            PartitionRows: self._partition_rows,
            Partitions: self.partitions,
            Peers: self.peers,
            Permissions: Permissions(rules.authorizer),
            PendingReads: self.pending_reads,
            ReplayPace: self._replay_pace,
            ProducerIds: self._producer_ids,
            ReplicaReads: self._replica_reads,
            ClientTelemetry: self._telemetry,
            TopicCommands: self.topic_commands,
            TransactionVerifier: self.verifier,
            UnsentResponses: self._responses,
        }

    def _produce_seconds(self) -> Histogram:
        return self.connections.requests.seconds[PRODUCE.key]

    @property
    def kafka_address(self) -> str:
        """The ``host:port`` to which the first listener is bound."""
        return self.listeners[0].address

    @property
    def listeners(self) -> list[Listener]:
        """The listeners with the ports to which they are bound."""
        assert self._servers, "the broker is started"
        pairs = zip(self._listeners, self._servers, strict=True)
        return [listener._replace(port=server.sockets[0].getsockname()[1]) for listener, server in pairs]

    def metrics(self) -> Iterator[MetricGroup]:
        """Yield the broker's metrics for one scrape."""
        connections, transactions = self.connections, self.transactions
        hot_reads, cold_reads = self.pending_reads.reads_in_progress
        yield BrokerMetrics(
            connections=len(connections),
            connections_refused=connections.refused,
            partitions=len(self.partitions.all()),
            takeovers_waiting=self.partitions.takeovers_waiting,
            hot_reads=hot_reads,
            cold_reads=cold_reads,
            replay_limit_bytes_per_second=int(self._replay_pace.limit),
            unreadable_group_records=self.groups.unreadable_records,
            unreadable_transaction_records=transactions.unreadable_records if transactions is not None else 0,
            transaction_markers=transactions.outstanding_markers if transactions is not None else 0,
        )
        yield self.partitions.takeover_metrics
        yield self._replica_reads.metrics
        yield from connections.requests.metrics()
        yield from self._memory_metrics()
        yield from self._telemetry.metrics()
        yield from self.load.traffic.metrics(lambda topic: self.metadata.view.get(topic_key(topic)) is not None)

    def _memory_metrics(self) -> Iterator[MemoryMetrics]:
        connections, shares, memory = self.connections, self._shares, self.partitions.memory
        yield MemoryMetrics(share="requests", used_bytes=connections.bytes_held, limit_bytes=shares.requests)
        yield MemoryMetrics(share="responses", used_bytes=connections.responses.bytes_held, limit_bytes=shares.responses)
        yield MemoryMetrics(share="tail", used_bytes=memory.tails.bytes_held, limit_bytes=memory.tails.bytes_max)
        yield MemoryMetrics(share="indexes", used_bytes=memory.indexes.bytes_held, limit_bytes=shares.indexes)
        yield MemoryMetrics(share="reads", used_bytes=self.pending_reads.bytes_held, limit_bytes=shares.reads)
        yield MemoryMetrics(share="searches", used_bytes=self.searches.bytes_held, limit_bytes=shares.searches)

    async def bind(self, *, is_serving: bool = False) -> None:
        """Bind the ports; unless ``is_serving``, ``start`` accepts connections. Raises ``OSError`` if a port is in use."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            accept = partial(ClientConnection, self.connections, listener.name)
            host, port = listener.host, listener.port
            self._servers.append(await loop.create_server(accept, host, port, backlog=1024, start_serving=is_serving))
        self.advertised_brokers.answering(self._record())

    async def start(self) -> None:
        """Listen and register. Each partition is served once it is taken over. Raises ``OSError`` if a port is in use."""
        if not self._servers:
            await self.bind(is_serving=True)
        else:
            await asyncio.gather(*(server.start_serving() for server in self._servers))
        self._registration = Registration(
            self.metadata,
            self.clock,
            broker=self._record(),
            lease_ms=self.settings.lease_ms,
            grace_ms=min(self.settings.grace_ms, self.settings.lease_ms),
            load=self.load.report,
            on_registered=self.partitions.resume,
            on_lost=self.partitions.suspend,
        )
        await self._registration.start()
        self.groups.start()
        if self.transactions is not None:
            self.transactions.start()
        self._sweeper = asyncio.get_running_loop().call_later(LOOK_S, self._sweep)

    def _record(self) -> Broker:
        first, *further = advertised_endpoints(self.listeners, self.settings.advertised)
        return Broker(
            broker_id=self.settings.broker_id,
            host=first.host,
            port=first.port,
            session_id=0,
            rack=self.settings.rack,
            endpoints=tuple(further),
        )

    def _sweep(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(LOOK_S, self._sweep)
        self.connections.sweep()
        self.partitions.memory.bound(self.partitions.all())
        if self._free_memory.should_return(self._resident_memory(), self.bytes_held):
            self._release_memory()

    @property
    def bytes_held(self) -> int:
        """Bytes actually held of everything that the memory budget bounds."""
        connections = self.connections
        requests_and_responses = connections.bytes_held + connections.responses.bytes_held
        return requests_and_responses + self.partitions.memory.bytes_held + self.pending_reads.bytes_held

    async def close(self) -> None:
        """Perform a controlled shutdown; see the module header."""
        timeout_s = self.settings.shutdown_ms / 1000
        if self._registration is not None:
            await leave(self.metadata.view, self.settings.broker_id, self._registration.announce_stop, timeout_s)
        self._stop_listening()
        self.partitions.end_waiting()
        await self.connections.drain(timeout_s)
        await self.partitions.seal_all(timeout_s)
        self.partitions.suspend()
        if self._registration is not None:
            await self._registration.close()
        await self._release()

    async def abandon(self) -> None:
        """Stop as in a crash: nothing is sealed and the session expires. For tests and the simulator."""
        self._stop_listening()
        self.connections.close_all()
        self.partitions.suspend()
        await self._release()

    def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def _release(self) -> None:
        self.connections.close_all()
        self._partition_rows.close()
        self.advertised_brokers.close()
        await self.verifier.close()
        self.peers.close()
        await self._produced_records.close()
        await self._replica_reads.close()
        await self.partitions.close()
        self._replay_pace.close()
        await self.pending_reads.close()
        self.groups.close()
        if self.transactions is not None:
            self.transactions.close()
        self._deadlines.close()
        self._telemetry.close()
