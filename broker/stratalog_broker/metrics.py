"""Metrics of a broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stratalog_core.metrics.groups import LATENCY_BOUNDS_S, Histogram, MetricGroup, counter, gauge, histogram, label


@dataclass(slots=True, kw_only=True)
class ApiMetrics(MetricGroup):
    """Requests of one Kafka API."""

    subsystem = "broker"

    api: str = label()
    requests: int = counter("requests", "Answered requests; with acks=0, handled requests")
    request_seconds: Histogram = histogram(
        "seconds", "Time from the receipt of a whole request to its response, in the broker's memory; waits of Fetch included"
    )


@dataclass(slots=True, kw_only=True)
class BrokerMetrics(MetricGroup):
    """Clients and work in progress."""

    subsystem = "broker"

    connections: int = gauge("connections", "Connected clients")
    connections_refused: int = counter("connections", "Connections closed at once because connections_max was reached")
    partitions: int = gauge("partitions", "Partitions that this broker owns and serves")
    takeovers_waiting: int = gauge("partitions", "Partitions that this broker owns and does not serve yet")
    hot_reads: int = gauge("reads", "Reads from bookies in progress, read-ahead included")
    cold_reads: int = gauge("reads", "Reads from the object store in progress, read-ahead included")
    replay_limit_bytes_per_second: int = gauge(
        "bytes per second", "Rate to which history is slowed down while acknowledgements take longer than usual; 0: it is not"
    )
    unreadable_group_records: int = gauge("records", "Records of __consumer_offsets that this broker could not read")
    unreadable_transaction_records: int = gauge("records", "Records of __transaction_state that this broker could not read")
    transaction_markers: int = gauge("markers", "Markers of decided transactions that are not written yet")


@dataclass(slots=True, kw_only=True)
class ReplicaReadMetrics(MetricGroup):
    """History fetched from a broker in the client's rack that does not own the partition (KIP-392)."""

    subsystem = "broker_replica"

    redirects: int = counter(
        "fetches", "Partitions in fetches that this broker, their owner, sent to a replica in the client's rack"
    )
    returns: int = counter("fetches", "Partitions in fetches with a rack that this broker sent back to their owner")
    out_bytes: int = counter("bytes", "Batches that consumers fetched here of partitions that another broker owns")


@dataclass(slots=True, kw_only=True)
class TakeoverMetrics(MetricGroup):
    """Counted as partitions are taken over."""

    subsystem = "broker"

    takeovers: int = counter("partitions", "Partitions taken over")
    takeover_failures: int = counter("errors", "Takeovers that failed and were tried again or given up")
    takeover_seconds: Histogram = histogram("seconds", "Time from a partition's assignment until this broker serves it")


@dataclass(slots=True, kw_only=True)
class StateUploadMetrics(MetricGroup):
    """States of groups and transactional ids that a broker stores in the bucket, for a restore."""

    subsystem = "broker_state"

    uploads: int = counter("objects", "States of coordinators that were stored")
    failures: int = counter("errors", "States that could not be stored; the next round tries again")
    partitions_waiting: int = gauge("partitions", "Partitions of internal topics with changes that are not stored yet")


@dataclass(slots=True, kw_only=True)
class MemoryMetrics(MetricGroup):
    """One share of the memory budget; see ``memory_bytes``."""

    subsystem = "broker_memory"

    share: str = label()
    used_bytes: int = gauge("bytes", "Memory in use, by real size")
    limit_bytes: int = gauge("bytes", "Size of the share")


@dataclass(slots=True, kw_only=True)
class TopicTraffic(MetricGroup):
    """Batches of one topic at this broker, counted every few seconds."""

    subsystem = "broker_topic"

    topic: str = label()
    in_bytes: int = counter("bytes", "Batches that producers appended")
    out_bytes: int = counter("bytes", "Batches that consumers fetched")


@dataclass(slots=True, kw_only=True)
class TelemetryMetrics(MetricGroup):
    """Metrics that clients push (KIP-714)."""

    subsystem = "broker_telemetry"

    client_instances: int = gauge("clients", "Client instances that asked for a subscription or pushed lately")
    pushes: int = counter("pushes", "Pushes whose metrics were taken")
    refused_pushes: int = counter("pushes", "Pushes that were refused: too early, outdated, too large or malformed")
    dropped_values: int = gauge("values", "Values that were not taken since the start because the limit of series was reached")


@dataclass(slots=True, kw_only=True)
class PushedMetric(MetricGroup):
    """One value of one client."""

    subsystem = "client"

    client_id: str = label()
    client_instance_id: str = label()
    metric: str = label()
    attributes: str = label()
    last_value: float = gauge("of the client's metric", "Value of a client's metric as of its last push to this broker")


class RequestMetrics:
    """Requests by API. ``names`` are those of all APIs that are served, by key.

    ``seconds`` are the histograms by key, to which each response adds one observation.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self.seconds = {key: Histogram(LATENCY_BOUNDS_S) for key in names}
        self._names = names

    def metrics(self) -> list[ApiMetrics]:
        """APIs that clients have used, the busiest first."""
        metrics = [
            ApiMetrics(api=self._names[key], requests=sum(seconds.counts), request_seconds=seconds)
            for key, seconds in self.seconds.items()
        ]
        return sorted((one for one in metrics if one.requests), key=lambda one: -one.requests)


class TrafficMeter:
    """Bytes by topic."""

    def __init__(self) -> None:
        self._topics: dict[str, TopicTraffic] = {}

    def count(self, topic: str, in_bytes: int, out_bytes: int) -> None:
        traffic = self._topics.get(topic)
        if traffic is None:
            traffic = self._topics[topic] = TopicTraffic(topic=topic)
        traffic.in_bytes += in_bytes
        traffic.out_bytes += out_bytes

    def metrics(self, exists: Callable[[str], bool]) -> list[TopicTraffic]:
        """The busiest topics first, without those that do not exist any more."""
        self._topics = {topic: traffic for topic, traffic in self._topics.items() if exists(topic)}
        return sorted(self._topics.values(), key=lambda one: -(one.in_bytes + one.out_bytes))
