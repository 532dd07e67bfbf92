"""All record kinds, grouped by file. ``Record`` is the tagged union that is stored and sent."""

from __future__ import annotations

import msgspec

from stratalog_metadata.records.cluster import CLUSTER_KEY, Cluster
from stratalog_metadata.records.counter import (
    KNOWN_LEDGERS_KEY,
    LEDGER_IDS,
    PRODUCER_IDS,
    SESSION_IDS,
    Counter,
    KnownLedgers,
    counter_key,
)
from stratalog_metadata.records.ledger import (
    NONE_UNDECIDED,
    UNKNOWN_UNDECIDED,
    Fragment,
    Ledger,
    LedgerState,
    ledger_key,
)
from stratalog_metadata.records.node import (
    Bookie,
    Broker,
    DrainedBroker,
    Endpoint,
    TieringWorker,
    bookie_key,
    broker_key,
    drained_broker_key,
)
from stratalog_metadata.records.partition import (
    KEEP_METADATA,
    KEEP_STORE,
    NO_OWNER,
    ForkDecision,
    LedgerRef,
    Log,
    ManifestPointer,
    Partition,
    TierRequest,
    TierStatus,
    TopicPartition,
    fork_decision_key,
    log_key,
    manifest_pointer_key,
    partition_key,
    tier_request_key,
    tier_status_key,
)
from stratalog_metadata.records.quorum import QUORUM_KEY, Quorum
from stratalog_metadata.records.session import Lease, Session, lease_key, session_key
from stratalog_metadata.records.topic import (
    CLIENT_METRICS_CONFIGS,
    DEFERRED_MARKERS,
    FEATURES,
    FEATURES_KEY,
    GROUP_CONFIGS,
    REPLICATION_FACTOR_MAX,
    TOPIC_DEFAULTS_KEY,
    DeferredMarker,
    DeletedTopic,
    DynamicConfig,
    PendingTopic,
    RestoredTopic,
    Topic,
    configs_in_force,
    deferred_markers_prefix,
    deleted_topic_key,
    dynamic_config_key,
    is_hot_only,
    pending_topic_key,
    restored_topic_key,
    topic_key,
)

Record = (
    Bookie
    | Broker
    | Cluster
    | Counter
    | DeferredMarker
    | DeletedTopic
    | DrainedBroker
    | DynamicConfig
    | ForkDecision
    | KnownLedgers
    | Lease
    | Ledger
    | Log
    | ManifestPointer
    | Partition
    | PendingTopic
    | Quorum
    | RestoredTopic
    | Session
    | TierRequest
    | TierStatus
    | TieringWorker
    | Topic
)


class Versioned(msgspec.Struct, frozen=True, gc=False):
    """A stored record. ``version`` is the index of the command that wrote it, so it never repeats for a key."""

    version: int
    record: Record


__all__ = [
    "CLIENT_METRICS_CONFIGS", "CLUSTER_KEY", "DEFERRED_MARKERS", "FEATURES", "FEATURES_KEY", "GROUP_CONFIGS",
    "KEEP_METADATA", "KEEP_STORE", "KNOWN_LEDGERS_KEY", "LEDGER_IDS", "NONE_UNDECIDED", "NO_OWNER", "PRODUCER_IDS",
    "QUORUM_KEY", "REPLICATION_FACTOR_MAX", "SESSION_IDS", "TOPIC_DEFAULTS_KEY", "UNKNOWN_UNDECIDED",
    "Bookie", "Broker", "Cluster", "Counter", "DeferredMarker", "DeletedTopic", "DrainedBroker", "DynamicConfig",
    "Endpoint", "ForkDecision", "Fragment", "KnownLedgers", "Lease", "Ledger", "LedgerRef", "LedgerState", "Log",
    "ManifestPointer", "Partition", "PendingTopic", "Quorum", "Record", "RestoredTopic", "Session", "TierRequest",
    "TierStatus", "TieringWorker", "Topic", "TopicPartition", "Versioned",
    "bookie_key", "broker_key", "configs_in_force", "counter_key", "deferred_markers_prefix", "deleted_topic_key",
    "drained_broker_key", "dynamic_config_key", "fork_decision_key", "is_hot_only", "lease_key", "ledger_key", "log_key",
    "manifest_pointer_key", "partition_key", "pending_topic_key", "restored_topic_key", "session_key", "tier_request_key",
    "tier_status_key", "topic_key",
]  # fmt: skip
