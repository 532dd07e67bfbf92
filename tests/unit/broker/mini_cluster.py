"""A whole cluster in one event loop, on real sockets and files: one metadata node, bookies, brokers, a directory store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from uuid import UUID

from support.embedded_quorum import embedded_quorum
from unit.broker.raw_client import RawClient
from unit.metadata.watching import until

from stratalog_bookies.client import LedgerClient, LedgerClientSettings
from stratalog_bookies.config import BookieSettings
from stratalog_bookies.node.server import BookieServer
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.coordination.groups.application import KEY_TYPE
from stratalog_broker.network.server import BrokerServer
from stratalog_broker.requests.access import OPEN
from stratalog_core.errors import StratalogError
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.search_pool import SearchPool
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import CLUSTER_KEY, Partition
from stratalog_tiering.cold.block_source import ColdReaderSettings
from stratalog_tiering.cold.reader import ColdReader
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.store import ObjectStore, open_store
from stratalog_tiering.worker.worker import TieringWorker

Result = TypeVar("Result")
WAIT_S = 60.0
PATIENT = LedgerClientSettings(bookie_silence_ms=30_000)
"""A slow disk of the machine fails no bookie; one that is closed loses its connections, which does."""


@dataclass(slots=True, kw_only=True)
class RunningBroker:
    """A broker with its own metadata client, ledger client and transport, as its own process would have."""

    server: BrokerServer
    metadata: QuorumClient
    ledgers: LedgerClient
    stack: AsyncExitStack

    async def stop(self) -> None:
        """In good order; then all views show what it has written."""
        await self.server.close()
        await self.stack.aclose()
        await _refresh_all()

    async def kill(self) -> None:
        """As a crash: nothing is sealed or given up; its session has to expire."""
        await self.server.abandon()
        await self.stack.aclose()


@dataclass(slots=True, kw_only=True)
class MiniCluster:
    path: Path
    metadata: QuorumClient
    addresses: tuple[str, ...]
    store: ObjectStore
    stack: AsyncExitStack
    brokers: dict[int, RunningBroker] = field(default_factory=dict)
    bookies: dict[str, BookieServer] = field(default_factory=dict)

    @property
    def bootstrap(self) -> str:
        return ",".join(broker.server.kafka_address for broker in self.brokers.values())

    @property
    def broker(self) -> BrokerServer:
        """The only broker, or the first."""
        return next(iter(self.brokers.values())).server

    async def refresh(self) -> None:
        """Bring all views up to what has been committed: each broker has its own, and the broker that answered is ahead."""
        views = [self.metadata, *(broker.metadata for broker in self.brokers.values())]
        for outcome in await asyncio.gather(*(view.refresh() for view in views), return_exceptions=True):
            # A broker may be stopped meanwhile.
            if isinstance(outcome, Exception) and not isinstance(outcome, StratalogError):
                raise outcome

    async def connect(self) -> RawClient:
        """A client of the first broker that is closed with the cluster at the latest."""
        client = await RawClient.connect(self.broker.kafka_address)
        self.stack.push_async_callback(client.close)
        return client

    async def start_bookie(self, name: str) -> BookieServer:
        """All views know its address then, which is another one than it had before."""
        directory = self.path / name
        settings = BookieSettings(
            bookie_id=name, data_dirs=(str(directory),), log_file_bytes=8 * 1024 * 1024, spare_files=0, free_bytes_min=0,
            lease_ms=60_000,
        )  # fmt: skip
        background = ThreadBackground(settings.threads, name)
        self.stack.callback(background.close)
        transport = TcpTransport()
        self.stack.push_async_callback(transport.close)
        server = BookieServer(settings, self.metadata, transport, [SystemFiles(directory)], SystemClock(), Random(), background)
        await server.start()
        self.stack.push_async_callback(server.close)
        self.bookies[name] = server
        await self.refresh()
        return server

    async def start_broker(self, broker_id: int, **changes: Any) -> RunningBroker:
        """``changes`` are as the settings of ``run_cluster``, and ``registers``: if False, it only listens.

        The other brokers know of it then: one that stopped before it does would hand nothing over.
        """
        stack = AsyncExitStack()
        transport, clock, random = TcpTransport(), SystemClock(), Random()
        stack.push_async_callback(transport.close)
        metadata = QuorumClient(self.addresses, transport, clock, random)
        await metadata.start()
        stack.push_async_callback(metadata.close)
        ledgers = LedgerClient(metadata, transport, clock, random, PATIENT)
        stack.push_async_callback(ledgers.close)
        background = ThreadBackground(2, "searches")
        stack.callback(background.close)
        searches = SearchPool(background, 16 * 1024 * 1024)
        cold = ColdReader(self.store, ColdReaderSettings(), clock, searches=searches)
        stack.push_async_callback(cold.close)
        defaults: dict[str, Any] = {
            "broker_id": broker_id,
            "listen": ("127.0.0.1:0",),
            "offsets_topic_partitions": 2,
            "offsets_topic_replication_factor": min(3, len(self.bookies)),
            "transaction_state_log_num_partitions": 2,
            "transaction_state_log_replication_factor": min(3, len(self.bookies)),
            "group_initial_rebalance_delay_ms": 0,
            # A machine that stands still for seconds ends no session; a broker that is killed loses its connection, which does.
            "lease_ms": 60_000,
            "shutdown_ms": 2000,
        }
        rules = changes.pop("rules", OPEN)
        registers = changes.pop("registers", True)
        prepare: Callable[[BrokerServer], None] | None = changes.pop("prepare", None)
        settings = BrokerSettings(**{**defaults, **changes})
        server = BrokerServer(settings, metadata, ledgers, cold, searches, clock, random, rules=rules)
        if prepare is not None:
            prepare(server)
        await (server.start() if registers else server.bind(is_serving=True))
        running = RunningBroker(server=server, metadata=metadata, ledgers=ledgers, stack=stack)
        self.brokers[broker_id] = running
        await _refresh_all()
        return running

    async def start_tiering(self) -> TieringWorker:
        transport, clock, random = TcpTransport(), SystemClock(), Random()
        self.stack.push_async_callback(transport.close)
        ledgers = LedgerClient(self.metadata, transport, clock, random, PATIENT)
        self.stack.push_async_callback(ledgers.close)
        background = ThreadBackground(2, "checksums")
        self.stack.callback(background.close)
        settings = TieringSettings(worker_id="tiering-1", deletion_lag_ms=0)
        worker = TieringWorker(settings, self.metadata, self.store, ledgers, clock, random, background)
        await worker.start()
        self.stack.push_async_callback(worker.close)
        return worker


_running = list[tuple[asyncio.AbstractEventLoop, MiniCluster]]()


@asynccontextmanager
async def run_cluster(
    path: Path, *, bookies: int = 1, brokers: int = 1, balance_interval_s: float = 10.0, **settings: Any
) -> AsyncIterator[MiniCluster]:
    """Run a cluster; ``settings`` are fields of ``BrokerSettings`` for all brokers, ``rules``, their ``AccessRules``,
    and ``prepare``, which is called with each broker before it starts."""
    async with AsyncExitStack() as stack:
        transport = TcpTransport()
        stack.push_async_callback(transport.close)
        quorum = await stack.enter_async_context(
            embedded_quorum(path / "metadata", transport, balance_interval_s=balance_interval_s)
        )
        await until(quorum.client, lambda: quorum.client.view.get(CLUSTER_KEY) is not None, WAIT_S)
        background = ThreadBackground(2, "store")
        stack.callback(background.close)
        store = open_store(str(path / "store"), background=background, clock=SystemClock(), random=Random())
        cluster = MiniCluster(path=path, metadata=quorum.client, addresses=tuple(quorum.addresses), store=store, stack=stack)
        for number in range(1, bookies + 1):
            await cluster.start_bookie(f"bookie-{number}")
        running = (asyncio.get_running_loop(), cluster)
        _running.append(running)
        try:
            for number in range(1, brokers + 1):
                await cluster.start_broker(number, **settings)
            yield cluster
        finally:
            _running.remove(running)
            for broker in list(cluster.brokers.values()):
                with contextlib.suppress(asyncio.CancelledError):
                    await broker.stop()


async def until_served(broker: BrokerServer, topic_id: UUID, partition: int = 0) -> None:
    """Wait until the broker has taken the partition over."""
    async with asyncio.timeout(WAIT_S):
        while broker.partitions.find_by_id(topic_id.bytes, partition) is None:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.005)


async def until_all_served(cluster: MiniCluster) -> None:
    """Wait until each partition is served: when a topic's creation is answered, its partitions have owners that take over."""

    def is_served(partition: Partition) -> bool:
        owner = cluster.brokers.get(partition.owner)
        return owner is not None and owner.server.partitions.find_by_id(partition.topic_id.bytes, partition.index) is not None

    await cluster.refresh()
    await until(cluster.metadata, lambda: all(map(is_served, cluster.metadata.view.all(Partition))), WAIT_S)


async def until_coordinated(cluster: MiniCluster, group_id: str) -> None:
    """Wait until the group's coordinator is loaded: librdkafka's commit fails until then."""
    await cluster.broker.locator.created_partition(KEY_TYPE, group_id)
    await until_all_served(cluster)


async def in_thread(call: Callable[[], Result]) -> Result:
    """Run a blocking Kafka client beside the cluster's loop. Brokers know of all that was committed before, and all views show
    what the client has changed.
    """
    await _refresh_all()
    result = await asyncio.wait_for(asyncio.to_thread(call), WAIT_S * 3)
    await _refresh_all()
    return result


async def _refresh_all() -> None:
    here = asyncio.get_running_loop()
    await asyncio.gather(*(cluster.refresh() for loop, cluster in _running if loop is here))
