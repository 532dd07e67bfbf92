"""Settings of a broker. ``memory_bytes`` bounds its memory; ``memory.py`` divides that budget."""

from __future__ import annotations

from dataclasses import dataclass

from stratalog_core.config import setting
from stratalog_core.partition_state.replay_state import PRODUCERS_MAX

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """Settings of one broker process. Defaults of topic configs are in ``topic_configs.py``."""

    broker_id: int = setting(help="Broker id, as Kafka clients see it; unique in the cluster", minimum=0, maximum=2**31 - 1)
    listen: tuple[str, ...] = setting(
        ("127.0.0.1:9092",),
        help="Kafka listeners: HOST:PORT, and NAME=HOST:PORT for each further one; port 0 takes any free port",
    )
    advertised: tuple[str, ...] = setting(
        (), help="Addresses advertised to the clients of each listener, written as in `listen`; default: the listener's own"
    )
    rack: str = setting("", help="Failure domain of this broker")
    lease_ms: int = setting(
        3_000, help="Lease of the broker's session; other brokers take over when it expires", minimum=200, maximum=60_000
    )
    grace_ms: int = setting(
        300,
        help="Other brokers take over this long after the connection to the metadata leader is lost; 0: only after the lease",
        minimum=0,
        maximum=60_000,
    )

    auto_create_topics: bool = setting(True, help="Create a topic when a client asks for its metadata and allows it")
    default_partitions: int = setting(
        1, help="Partitions of a topic that is created without a number of partitions", minimum=1, maximum=10_000
    )
    default_replication_factor: int = setting(
        1, help="Replication factor (write quorum) of a topic that is created without one", minimum=1, maximum=15
    )
    topics_max: int = setting(
        10_000,
        help="Maximum number of topics in the cluster; a request for more fails with POLICY_VIOLATION",
        minimum=1,
        maximum=1_000_000,
    )
    partitions_max: int = setting(
        50_000,
        help="Maximum number of partitions in the cluster; a request for more fails with POLICY_VIOLATION",
        minimum=1,
        maximum=10_000_000,
    )
    request_partitions_max: int = setting(
        10_000,
        help="Maximum number of partitions that one request creates; more fail with POLICY_VIOLATION",
        minimum=1,
        maximum=1_000_000,
    )
    undelete_window_ms: int = setting(
        86_400_000,
        help="Time for which a deleted topic can be restored, and its records keep their space; 0: every deletion is final",
        minimum=0,
        maximum=365 * 86_400_000,
    )
    offsets_topic_partitions: int = setting(50, help="Partitions of __consumer_offsets", minimum=1, maximum=1_000)
    offsets_topic_replication_factor: int = setting(
        3,
        help="Copies of __consumer_offsets; no group finds its coordinator until this many bookies have registered."
        " Set 1 if there is only one bookie, as `stratalog up` does",
        minimum=1,
        maximum=15,
    )
    transaction_state_log_num_partitions: int = setting(50, help="Partitions of __transaction_state", minimum=1, maximum=1_000)
    transaction_state_log_replication_factor: int = setting(
        3,
        help="Copies of __transaction_state; no transactional producer finds its coordinator until this many bookies have"
        " registered. Set 1 if there is only one bookie, as `stratalog up` does",
        minimum=1,
        maximum=15,
    )
    transaction_max_timeout_ms: int = setting(
        900_000, help="Maximum transaction.timeout.ms of a producer; more fails with INVALID_TRANSACTION_TIMEOUT", minimum=1
    )
    transactional_id_expiration_ms: int = setting(
        7 * 86_400_000, help="A transactional id that was not used for this time is removed", minimum=1
    )
    transaction_remove_expired_transaction_cleanup_interval_ms: int = setting(
        3_600_000, help="Interval between two searches for expired transactional ids", minimum=1
    )
    transactional_ids_max: int = setting(
        100_000,
        help="Maximum number of transactional ids per partition of __transaction_state",
        minimum=1,
        maximum=10_000_000,
    )

    memory_bytes: int = setting(
        512 * _MIB,
        help="Budget for all requests, responses, caches and indexes, by their real size; the process uses up to 1.25 times"
        " this in addition to its memory at start",
        minimum=64 * _MIB,
        maximum=1024 * 1024 * _MIB,
    )
    frame_bytes_max: int = setting(
        100 * _MIB,
        help="Maximum size of a request, or 15/64 of memory_bytes if that is less (120 MiB by default); a larger one closes the"
        " connection",
        minimum=1024,
        maximum=1024 * _MIB,
    )
    connections_max: int = setting(
        10_000, help="Maximum number of client connections; further ones are closed at once", minimum=1, maximum=1_000_000
    )
    connection_requests_max: int = setting(
        200, help="Unanswered requests of a connection at which the broker stops reading from it", minimum=1, maximum=100_000
    )
    response_bytes_max: int = setting(
        64 * _MIB,
        help="Maximum of fetched bytes in one response, whatever the client asks for; at most 1/8 of memory_bytes",
        minimum=_MIB,
        maximum=1024 * _MIB,
    )
    hot_reads_max: int = setting(
        32,
        help="Maximum number of concurrent reads from bookies, of up to 4 MiB each, and together"
        " up to 9/256 of memory_bytes (18 MiB by default)",
        minimum=1,
    )
    cold_reads_max: int = setting(
        32,
        help="Maximum number of concurrent reads from the object store, of up to 4 MiB each, and together"
        " up to 9/256 of memory_bytes (18 MiB by default)",
        minimum=1,
    )
    replay_percent_min: int = setting(
        25,
        help="Percentage of its rate at which history from the object store is still sent while acknowledgements take longer"
        " than usual; 100: it is never slowed down",
        minimum=1,
        maximum=100,
    )
    connection_idle_ms: int = setting(600_000, help="A connection is closed after this time without a request", minimum=1_000)
    shutdown_ms: int = setting(5_000, help="Time for requests in progress to complete when the broker stops", minimum=0)

    fetch_sessions_max: int = setting(
        1_000, help="Maximum number of incremental fetch sessions (KIP-227)", minimum=0, maximum=100_000
    )
    producers_max: int = setting(
        10_000, help="Maximum number of idempotent producers per partition; the least recently active one is dropped",
        minimum=1, maximum=PRODUCERS_MAX,
    )  # fmt: skip
    producer_id_expiration_ms: int = setting(
        86_400_000,
        help="An idempotent producer without an open transaction is forgotten after this time without a batch, counted from"
        " the partition's last change of owner",
        minimum=1_000,
        maximum=365 * 86_400_000,
    )
    partition_queue_bytes: int = setting(
        32 * _MIB, help="Maximum of queued batches (bytes) while a partition's next ledger opens", minimum=_MIB
    )
    ledger_idle_ms: int = setting(
        600_000, help="An open ledger is sealed after this time without an append", minimum=1_000, maximum=7 * 86_400_000
    )
    checkpoint_part_bytes: int = setting(
        _MIB,
        help="Maximum size of one entry of a ledger's checkpoint; larger state is split into several entries. Also the"
        " amount of an internal topic's log that is read at once when it is replayed",
        minimum=64,
        maximum=16 * _MIB,
    )
    state_upload_interval_ms: int = setting(
        300_000,
        help="Interval at which changed states of groups and transactional ids are stored in the object store, for"
        " `stratalog restore`: one write for each changed partition of an internal topic; 0: never",
        minimum=0,
        maximum=7 * 86_400_000,
    )
    append_timeout_ms: int = setting(
        30_000, help="Maximum time for a batch to reach its ack quorum", minimum=100, maximum=600_000
    )

    group_session_timeout_min_ms: int = setting(6_000, help="Minimum session.timeout.ms of a group member", minimum=1)
    group_session_timeout_max_ms: int = setting(1_800_000, help="Maximum session.timeout.ms of a group member", minimum=1)
    group_initial_rebalance_delay_ms: int = setting(
        500, help="Wait for more members before a new group's first rebalance", minimum=0, maximum=60_000
    )
    group_members_max: int = setting(10_000, help="Maximum number of members of one group", minimum=1, maximum=1_000_000)
    group_consumer_session_timeout_ms: int = setting(
        45_000, help="A consumer-protocol member is removed after this time without a heartbeat; groups may set their own",
        minimum=100, maximum=1_800_000,
    )  # fmt: skip
    group_consumer_heartbeat_interval_ms: int = setting(
        5_000, help="How often members of the consumer protocol send heartbeats; groups may set their own",
        minimum=10, maximum=600_000,
    )  # fmt: skip
    group_consumer_members_max: int = setting(
        10_000, help="Maximum number of members of one group of the consumer protocol", minimum=1, maximum=1_000_000
    )
    group_consumer_assignors: tuple[str, ...] = setting(
        ("uniform", "range"), help="Assignors that members of the consumer protocol may choose; the first one is the default"
    )
    group_consumer_migration_policy: str = setting(
        "bidirectional",
        help=(
            "Which groups with members change between the classic and the consumer protocol online: bidirectional, upgrade,"
            " downgrade or disabled"
        ),
    )
    group_consumer_assignment_interval_ms: int = setting(
        1_000,
        help="Minimum time between two assignments of a group of the consumer protocol; groups may set their own",
        minimum=0,
        maximum=60_000,
    )
    groups_max: int = setting(
        100_000, help="Maximum number of groups per partition of __consumer_offsets", minimum=1, maximum=10_000_000
    )
    group_offsets_max: int = setting(
        1_000_000,
        help="Maximum number of committed offsets per partition of __consumer_offsets",
        minimum=1,
        maximum=100_000_000,
    )
    offsets_retention_ms: int = setting(
        7 * 86_400_000, help="How long the committed offsets of an empty group are kept", minimum=1_000
    )
