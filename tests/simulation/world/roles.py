"""The real roles of a cluster, each as the main program of a simulated machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from simulation.world.loop import CURRENT
from simulation.world.machine import Machine, Ports
from simulation.world.object_store import Bucket, SimulatedStore
from stratalog_bookies.client import LedgerClient, LedgerClientSettings
from stratalog_bookies.config import BookieSettings
from stratalog_bookies.node.server import BookieServer
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.network.server import BrokerServer
from stratalog_broker.partitions.state_uploads import StateUploads
from stratalog_core.search_pool import SearchPool
from stratalog_metadata.client import topic_deletion
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.node.config import MetadataSettings
from stratalog_metadata.node.server import MetadataServer
from stratalog_metadata.storage.state_store import SnapshotFileStore
from stratalog_tiering.cold.block_source import ColdReaderSettings
from stratalog_tiering.cold.reader import ColdReader
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.maintenance import merging
from stratalog_tiering.offload.coordinator_states import CoordinatorStates
from stratalog_tiering.worker.worker import TieringWorker

METADATA_NODES: Final = 3
METADATA_PORT: Final = 9300
BOOKIE_PORT: Final = 9400
BOOKIE_HOSTS: Final = 3
BOOKIE_RACKS: Final = 2
KAFKA_PORT: Final = 9092
RACKS: Final = ("rack-0", "rack-1")
UNDELETE_WINDOW_MS: Final = 3_000
OFFSETS_PARTITIONS: Final = 3
"""Partitions of ``__consumer_offsets``, and of ``__transaction_state``."""
STATE_UPLOAD_INTERVAL_MS: Final = 400
DIRECT_SHARE: Final = 0.75
CLUSTER_ID: Final = "simulated-cluster-0001"
START_TIMEOUT_S: Final = 120.0
MERGE_FAN_IN: Final = 4
HELD_BACK_CHANCE: Final = 0.2
HELD_BACK_RATE: Final = 20_000.0
"""Bytes per second; a response has one or two thousand."""
CHECKPOINT_PART_BYTES: Final = (128, 400, 1024 * 1024)
"""Includes small sizes, so that the small states of short runs need several parts."""

_verify = "read"

Main = Callable[[Machine, Ports], Coroutine[Any, Any, None]]


def metadata_addresses() -> list[str]:
    return [f"metadata-{number}:{METADATA_PORT}" for number in range(1, METADATA_NODES + 1)]


def number_of(machine: Machine) -> int:
    return int(machine.name.rpartition("-")[2])


def metadata_settings(machine: Machine, kind: type[MetadataSettings] = MetadataSettings, **others: Any) -> MetadataSettings:
    """Return settings with small logs and snapshots, so that short runs truncate the log and install snapshots."""
    return kind(
        data_dir="unused",
        node_id=number_of(machine),
        listen=f"{machine.name}:{METADATA_PORT}",
        **{
            "peers": tuple(f"{index}={address}" for index, address in enumerate(metadata_addresses(), 1)),
            "cluster_id": CLUSTER_ID,
            "snapshot_entries": 100,
            "kept_entries": 20,
            "log_segment_bytes": 16_384,
            **others,
        },
    )


async def run_metadata_node(machine: Machine, ports: Ports, settings: MetadataSettings | None = None) -> None:
    """Run one node of the quorum until it fails or crashes."""
    settings = settings or metadata_settings(machine)
    store = SnapshotFileStore(machine.files)
    server = MetadataServer(settings, ports.transport, machine.files, ports.clock, ports.random, ports.background, store)
    await server.start()
    await server.until_takes_part()
    if machine.world.audit is not None:
        assert server._node is not None
        assert server._serving is not None
        machine.world.audit.watch_votes(server._serving, machine.disk)
        machine.world.audit.watch(machine.name, server._node.replica)
        machine.world.audit.on_committed = machine.world.changes.committed
    while server.failure is None:  # noqa: ASYNC110 - the server has no event for it, and needs none
        await asyncio.sleep(0.5)
    raise server.failure


async def connect_metadata(ports: Ports) -> QuorumClient:
    client = QuorumClient(metadata_addresses(), ports.transport, ports.clock, ports.random)
    process = CURRENT.get()
    if ports.audit is not None and process is not None:
        ports.audit.promise_checker.holds_sessions(process, ports.clock, client._sessions)
    await client.start(timeout_s=START_TIMEOUT_S)
    return client


def host_of(bookie: str) -> str:
    """The host of a simulated bookie: bookies with numbers that differ by ``BOOKIE_HOSTS`` share one."""
    return f"host-{int(bookie.rpartition('-')[2]) % BOOKIE_HOSTS}"


async def run_bookie(machine: Machine, ports: Ports, log_file_bytes: int = 256 * 1024, **others: Any) -> None:
    settings = BookieSettings(
        bookie_id=machine.name,
        data_dirs=("disk",),
        listen=f"{machine.name}:{BOOKIE_PORT}",
        host=host_of(machine.name),
        rack=f"rack-{number_of(machine) % BOOKIE_HOSTS % BOOKIE_RACKS}",
        lease_ms=2_000,
        log_file_bytes=log_file_bytes,
        spare_files=1,
        disk_stall_ms=400,
        collect_interval_s=2.0,
        free_bytes_min=0,
        free_bytes_low=1,
        # Entries are small here, and some of them must be read around the page cache.
        direct_read_bytes_min=512,
        # Some bookies log through the page cache, as on a file system without direct I/O.
        direct_io=machine.world.random(f"{machine.name}/direct").random() < DIRECT_SHARE,
        **others,
    )
    metadata = await connect_metadata(ports)
    if machine.world.audit is not None:
        machine.world.audit.copies.comes_back(machine.disk)
    server = BookieServer(
        settings, metadata, ports.transport, [machine.files], ports.clock, ports.random, ports.background
    )  # fmt: skip
    await server.start()
    if machine.world.audit is not None:
        machine.world.audit.copies.watch_deletions(machine.name, server)
    await asyncio.Event().wait()


@contextlib.contextmanager
def merges_of_few_segments() -> Iterator[None]:
    """Merge a few segments at a time while the context lasts: a short run has no sixteen of equal age."""
    fan_in = merging.FAN_IN
    setattr(merging, "FAN_IN", MERGE_FAN_IN)  # noqa: B010 - it is a constant to the type checker
    try:
        yield
    finally:
        setattr(merging, "FAN_IN", fan_in)  # noqa: B010


@contextlib.contextmanager
def deletions_in_steps() -> Iterator[None]:
    """Make a deletion final by a command for each partition while the context lasts: topics are small here."""
    most = topic_deletion.PART_RECORDS_MAX
    setattr(topic_deletion, "PART_RECORDS_MAX", 1)  # noqa: B010 - it is a constant to the type checker
    try:
        yield
    finally:
        setattr(topic_deletion, "PART_RECORDS_MAX", most)  # noqa: B010


@contextlib.contextmanager
def new_segments_verified_by_checksum() -> Iterator[None]:
    """Let every second incarnation of a tiering worker trust the store's checksums while the context lasts."""
    global _verify
    _verify = "checksum"
    try:
        yield
    finally:
        _verify = "read"


def ledger_client(metadata: QuorumClient, ports: Ports) -> LedgerClient:
    return LedgerClient(metadata, ports.transport, ports.clock, ports.random, LedgerClientSettings())


def broker(bucket: Bucket, **others: Any) -> Main:
    """Return a broker's main program. ``others`` are settings."""

    async def run(machine: Machine, ports: Ports) -> None:
        metadata = await connect_metadata(ports)
        store = SimulatedStore(bucket, ports.loop, ports.random, is_of_broker=True)
        searches = SearchPool(ports.background, 1024 * 1024)
        cold = ColdReader(store, ColdReaderSettings(), ports.clock, background=ports.background, searches=searches)
        settings = BrokerSettings(
            broker_id=number_of(machine),
            listen=(f"{machine.name}:{KAFKA_PORT}",),
            rack=RACKS[number_of(machine) % len(RACKS)],
            lease_ms=1_500,
            auto_create_topics=False,
            append_timeout_ms=5_000,
            checkpoint_part_bytes=machine.world.random("checkpoint parts").choice(CHECKPOINT_PART_BYTES),
            undelete_window_ms=UNDELETE_WINDOW_MS,
            offsets_topic_partitions=OFFSETS_PARTITIONS,
            transaction_state_log_num_partitions=OFFSETS_PARTITIONS,
            group_session_timeout_min_ms=1_000,
            group_consumer_session_timeout_ms=3_000,
            group_consumer_heartbeat_interval_ms=300,
            group_consumer_assignment_interval_ms=200,
            **{"group_initial_rebalance_delay_ms": 200, **others},
        )
        server = BrokerServer(settings, metadata, ledger_client(metadata, ports), cold, searches, ports.clock, ports.random)
        if machine.world.random(f"{machine.name}/{machine.starts}/pace").random() < HELD_BACK_CHANCE:
            _hold_history(server)
        await server.start()
        uploads = state_uploads(machine, ports, bucket, server)
        uploads.start()
        await machine.terminated.wait()
        await server.close()
        await uploads.close()

    return run


def _hold_history(server: BrokerServer) -> None:
    """Have history held back from the start, as if acknowledgements took much longer than usual."""
    rate = server._replay_pace._rate
    rate.limit = HELD_BACK_RATE
    rate._full, rate._usual_s = rate.limit / rate._share, 1e-6


def state_uploads(machine: Machine, ports: Ports, bucket: Bucket, server: BrokerServer) -> StateUploads:
    """Return what stores the states of a broker's coordinators. It draws from a randomness of its own."""
    randomness = machine.world.random(f"{machine.name}/{machine.starts}/states")
    states = CoordinatorStates(SimulatedStore(bucket, ports.loop, randomness), server.metadata, ports.clock)
    return StateUploads(server.partitions.all, states, ports.clock, STATE_UPLOAD_INTERVAL_MS)


def tiering_worker(bucket: Bucket) -> Main:
    async def run(machine: Machine, ports: Ports) -> None:
        metadata = await connect_metadata(ports)
        settings = TieringSettings(
            worker_id=f"{machine.name}-{machine.starts}",
            session_lease_ms=2_000,
            deletion_lag_ms=500,
            block_bytes=4096,
            grace_ms=4_000,
            retention_interval_ms=1_000,
            sweep_interval_ms=2_000,
            retry_ms_max=1_000,
            verify=_verify if machine.starts % 2 else "read",
        )
        store = SimulatedStore(bucket, ports.loop, ports.random)
        worker = TieringWorker(
            settings, metadata, store, ledger_client(metadata, ports), ports.clock, ports.random, ports.background
        )
        await worker.start()
        await asyncio.Event().wait()

    return run
