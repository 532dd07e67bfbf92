"""Settings of a broker. ``memory_bytes`` bounds its memory; ``memory.py`` divides that budget."""

from __future__ import annotations

from dataclasses import dataclass

from stratalog_core.config import setting
from stratalog_core.partition_state.replay_state import PRODUCERS_MAX

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """Settings of one broker process. Defaults of topic configs are in ``topic_configs.py``."""

    broker_id: int = setting(help="Id that Kafka clients see; unique in the cluster", minimum=0, maximum=2**31 - 1)
    listen: tuple[str, ...] = setting(
        ("127.0.0.1:9092",),
        help="Kafka listeners: HOST:PORT, and NAME=HOST:PORT for each further one; port 0 takes any free port",
    )
    advertised: tuple[str, ...] = setting(
        (), help="Addresses that clients of each listener are told, written as in `listen`; default: the listener's own"
    )
    rack: str = setting("", help="Failure domain of this broker")
    lease_ms: int = setting(3_000, help="Lease of the broker's session: how soon others take over", minimum=200, maximum=60_000)
    grace_ms: int = setting(
        300,
        help="Others take over so long after the broker's connection to the metadata leader broke; 0: only after the lease",
        minimum=0,
        maximum=60_000,
    )

    auto_create_topics: bool = setting(True, help="Create a topic when a client asks for its metadata and allows it")
    default_partitions: int = setting(1, help="Partitions of topics created without a number", minimum=1, maximum=10_000)
    default_replication_factor: int = setting(
        1, help="Copies of each entry (write quorum) of topics created without a number", minimum=1, maximum=15
    )
    topics_max: int = setting(
        10_000, help="Topics of the cluster; a request for more is refused with POLICY_VIOLATION", minimum=1, maximum=1_000_000
    )
    partitions_max: int = setting(
        50_000, help="Partitions of all topics of the cluster; refused likewise", minimum=1, maximum=10_000_000
    )
    request_partitions_max: int = setting(
        10_000, help="Partitions that one request may create; refused likewise", minimum=1, maximum=1_000_000
    )
    offsets_topic_partitions: int = setting(50, help="Partitions of __consumer_offsets", minimum=1, maximum=1_000)
    offsets_topic_replication_factor: int = setting(
        3,
        help="Copies of __consumer_offsets; until so many bookies have registered no group finds its coordinator."
        " 1 for an installation of one bookie, as `stratalog up` sets",
        minimum=1,
        maximum=15,
    )

    memory_bytes: int = setting(
        512 * _MIB,
        help="Budget for all requests, responses, caches and indexes, at their real size; the process takes what it has at its"
        " start and up to 1.25 times this",
        minimum=64 * _MIB,
        maximum=1024 * 1024 * _MIB,
    )
    frame_bytes_max: int = setting(
        100 * _MIB,
        help="Longest request, at most 15/64 of memory_bytes; a longer one closes the connection",
        minimum=1024,
        maximum=1024 * _MIB,
    )
    connections_max: int = setting(10_000, help="Client connections; more are closed at once", minimum=1, maximum=1_000_000)
    connection_requests_max: int = setting(
        200, help="Unanswered requests of one connection before it is no longer read", minimum=1, maximum=100_000
    )
    response_bytes_max: int = setting(
        64 * _MIB,
        help="Fetched bytes in one response, whatever the client asks for, at most 1/8 of memory_bytes",
        minimum=_MIB,
        maximum=1024 * _MIB,
    )
    hot_reads_max: int = setting(
        32, help="Reads from bookies under way, of up to 4 MiB each, within 9/256 of memory_bytes", minimum=1
    )
    cold_reads_max: int = setting(
        32, help="Reads from the object store under way, of up to 4 MiB each, within 9/256 of memory_bytes", minimum=1
    )
    connection_idle_ms: int = setting(600_000, help="A connection silent for so long is closed", minimum=1_000)
    shutdown_ms: int = setting(5_000, help="Time that requests in progress get when the broker stops", minimum=0)

    fetch_sessions_max: int = setting(1_000, help="Incremental fetch sessions (KIP-227) kept", minimum=0, maximum=100_000)
    producers_max: int = setting(
        10_000, help="Idempotent producers remembered per partition; the longest silent is forgotten",
        minimum=1, maximum=PRODUCERS_MAX,
    )  # fmt: skip
    partition_queue_bytes: int = setting(
        32 * _MIB, help="Batches that may wait for a partition's next ledger to open", minimum=_MIB
    )
    ledger_idle_ms: int = setting(
        600_000, help="An open ledger without an append for so long is sealed", minimum=1_000, maximum=7 * 86_400_000
    )
    checkpoint_part_bytes: int = setting(
        _MIB, help="Size of one entry of a ledger's checkpoint; larger state takes several", minimum=64, maximum=16 * _MIB
    )
    append_timeout_ms: int = setting(
        30_000, help="Upper bound on the time in which a batch must reach its quorum", minimum=100, maximum=600_000
    )

    group_session_timeout_min_ms: int = setting(6_000, help="Shortest session.timeout.ms of a group member", minimum=1)
    group_session_timeout_max_ms: int = setting(1_800_000, help="Longest session.timeout.ms of a group member", minimum=1)
    group_initial_rebalance_delay_ms: int = setting(
        500, help="Wait for more members before a new group's first rebalance", minimum=0, maximum=60_000
    )
    group_members_max: int = setting(10_000, help="Members of one group", minimum=1, maximum=1_000_000)
    groups_max: int = setting(
        100_000, help="Consumer groups in each partition of __consumer_offsets", minimum=1, maximum=10_000_000
    )
    group_offsets_max: int = setting(
        1_000_000, help="Committed offsets in each partition of __consumer_offsets", minimum=1, maximum=100_000_000
    )
    offsets_retention_ms: int = setting(
        7 * 86_400_000, help="Committed offsets of an empty group are kept for so long", minimum=1_000
    )
