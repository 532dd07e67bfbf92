"""Metrics of a metadata node."""

from __future__ import annotations

from dataclasses import dataclass

from stratalog_core.metrics.groups import Histogram, MetricGroup, counter, gauge, histogram, label


@dataclass(slots=True, kw_only=True)
class RequestCounters(MetricGroup):
    """Counted by the node as it serves."""

    subsystem = "metadata"

    requests: int = counter("requests", "Requests of clients and of other metadata nodes")
    commands_proposed: int = counter("commands", "Commands that this node accepted as the leader")
    leaderships: int = counter("times", "Times that this node became the leader and had applied everything")


@dataclass(slots=True, kw_only=True)
class QuorumMetrics(MetricGroup):
    """The node's place in the quorum, and what waits."""

    subsystem = "metadata"

    is_leader: int = gauge("0 or 1", "Whether this node leads and has applied everything that is committed")
    term: int = gauge("term", "Raft term of this node")
    commit_index: int = gauge("index", "Highest index of the log that this node knows to be committed")
    applied_index: int = gauge("index", "Highest index that is applied to this node's records")
    apply_lag_entries: int = gauge("entries", "Committed entries that are not applied yet")
    log_entries: int = gauge("entries", "Entries of the Raft log in memory")
    log_size_bytes: int = gauge("bytes", "Payload of the entries of the Raft log in memory")
    log_write_seconds: Histogram = histogram("seconds", "Time to write and sync a batch of Raft log entries")
    pending_proposals: int = gauge("commands", "Commands that are proposed and not answered")
    waiting_reads: int = gauge("requests", "Linearizable reads that wait for the quorum or for the replica")
    watchers: int = gauge("requests", "Clients that wait for the next change")
    refused_messages: int = counter("messages", "Raft messages refused because no correct peer sends them")


@dataclass(slots=True, kw_only=True)
class RecordMetrics(MetricGroup):
    """How much there is of each kind."""

    subsystem = "metadata"

    kind: str = label()
    records: int = gauge("records", "Records of a kind: topic, partition, ledger, broker, bookie, session …")
