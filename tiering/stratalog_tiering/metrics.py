"""Metrics of a tiering worker and of cold reads, and how far tiering is behind."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from stratalog_core.metrics.groups import Histogram, MetricGroup, counter, gauge, histogram, label
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Ledger, LedgerState, ManifestPointer, Topic, is_hot_only, manifest_pointer_key


@dataclass(slots=True, kw_only=True)
class TieringCounters(MetricGroup):
    """Counted by a worker as it works."""

    subsystem = "tiering"

    sessions: int = counter("sessions", "Sessions that the worker opened; more than one means that it lost one")
    segments_offloaded: int = counter("segments", "Segments uploaded, verified as [tiering] verify says, and committed")
    offloaded_bytes: int = counter("bytes", "Payload of the sealed ledgers in these segments")
    offload_seconds: Histogram = histogram(
        "seconds", "Time from the first read of a segment's ledgers to its commit", (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
    )
    segments_merged: int = counter("segments", "Small segments that were merged into larger ones")
    compaction_passes: int = counter("passes", "Passes over the cold history of partitions of compacted topics")
    segments_compacted: int = counter("segments", "Segments that compaction replaced")
    compaction_read_bytes: int = counter("bytes", "Bytes of the segments that compaction replaced")
    compaction_written_bytes: int = counter("bytes", "Bytes of the segments that compaction wrote")
    records_compacted: int = counter("records", "Records that compaction removed, tombstones included")
    tombstones_deleted: int = counter("records", "Tombstones that compaction removed after their delete.retention.ms")
    batches_not_compacted: int = counter(
        "batches",
        "Batches that a pass left as they are because their bytes are not exactly their records; a log line names the first",
    )
    ledgers_dropped: int = counter("ledgers", "Ledgers deleted because they are cold, empty or past retention")
    failures: int = counter("errors", "Failures of work on a partition; the work is retried")


@dataclass(slots=True, kw_only=True)
class TieringMetrics(MetricGroup):
    """The work that a worker has now and later."""

    subsystem = "tiering"

    work_in_progress: int = gauge("partitions", "Partitions that the worker is working on")
    work_scheduled: int = gauge("partitions", "Partitions that are scheduled for later")


@dataclass(slots=True, kw_only=True)
class SecondCopyMetrics(MetricGroup):
    """The second copy of the partitions that a worker copies."""

    subsystem = "second_copy"

    objects_copied: int = counter("objects", "Objects that were copied and read back")
    copied_bytes: int = counter("bytes", "Bytes of these objects")
    objects_deleted: int = counter("objects", "Objects deleted from the second copy after its grace period")
    failures: int = counter("errors", "Failures of copying a partition or of deleting from its copy; they are retried")
    lag_partitions: int = gauge("partitions", "Partitions whose newest committed history is not in the second copy yet")
    lag_seconds: float = gauge("seconds", "Time since the first of these was found to differ from its copy")


@dataclass(slots=True, kw_only=True)
class ScrubMetrics(MetricGroup):
    """The continuous scrub of the partitions that a worker scrubs."""

    subsystem = "scrub"

    segments_checked: int = counter("segments", "Segments whose every byte was read and checked")
    checked_bytes: int = counter("bytes", "Bytes of these segments")
    findings: int = counter("findings", "Damage found: missing or altered objects; the worker's log names each")
    repaired: int = counter("findings", "Findings that were repaired from the second copy, the hot copy or metadata")
    failures: int = counter("errors", "Failures of scrubbing a partition; it is retried")
    unrepaired: int = gauge("findings", "Damage that was found when its partition was checked last, and was not repaired")
    behind_seconds: float = gauge("seconds", "Time by which the scrub is behind its interval")


@dataclass(slots=True, kw_only=True)
class TieringLag(MetricGroup):
    """Sealed data that is not cold yet. All workers report the same, for the whole cluster."""

    subsystem = "tiering"

    topic: str = label()
    lag_bytes: int = gauge("bytes", "Payload of sealed ledgers that are not in the object store yet")
    lag_ledgers: int = gauge("ledgers", "Sealed ledgers that are not in the object store yet")
    lag_seconds: float = gauge("seconds", "Time since the oldest of these ledgers was sealed")


@dataclass(slots=True, kw_only=True)
class ColdReadMetrics(MetricGroup):
    """Blocks of segments that readers asked for. Scrubs and offloads do not count."""

    subsystem = "cold_reads"

    memory_hits: int = counter("blocks", "Blocks found in memory")
    disk_hits: int = counter("blocks", "Blocks found in the disk cache")
    blocks_loaded: int = counter("blocks", "Blocks read from the object store, read-ahead included")
    loaded_bytes: int = counter("bytes", "Bytes of the blocks read from the object store")
    unreadable_blocks: int = counter("blocks", "Blocks that were missing or damaged in the object store")
    second_copy_reads: int = counter("reads", "Reads of blocks, manifests and listings that the second copy answered")
    load_seconds: Histogram = histogram("seconds", "Time to read and check a block from the object store")
    cached_bytes: int = gauge("bytes", "Memory of the blocks in the memory cache")
    loads_in_progress: int = gauge("blocks", "Blocks that are being loaded or are queued for loading")


def tiering_lag(view: MetadataView, now_ms: int) -> list[TieringLag]:
    """One group for each topic that lags, the largest lag first. ``now_ms`` is wall time. O(hot ledgers).

    A topic whose copying is paused lags; one that is never offloaded does not.
    """
    names = {topic.topic_id: topic.name for topic in view.all(Topic) if not (topic.internal or is_hot_only(topic.configs))}
    cold_ends: dict[tuple[UUID, int], int] = {}
    lags: dict[UUID, TieringLag] = {}
    for ledger in view.all(Ledger):
        name = names.get(ledger.topic_id)
        if name is None or ledger.state is not LedgerState.CLOSED or not ledger.payload_bytes:
            continue
        partition = (ledger.topic_id, ledger.partition)
        if partition not in cold_ends:
            pointer = view.find(ManifestPointer, manifest_pointer_key(*partition))
            cold_ends[partition] = pointer.end_offset if pointer is not None else -1
        if ledger.end_offset > cold_ends[partition]:
            lag = lags.setdefault(ledger.topic_id, TieringLag(topic=name))
            lag.lag_bytes += ledger.payload_bytes
            lag.lag_ledgers += 1
            lag.lag_seconds = max(lag.lag_seconds, (now_ms - ledger.closed_at_ms) / 1000)
    return sorted(lags.values(), key=lambda lag: -lag.lag_bytes)
