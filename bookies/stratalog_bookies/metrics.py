"""Metrics of a bookie. INFO answers with the counters, ``/metrics`` with everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stratalog_core.metrics.groups import Histogram, MetricGroup, counter, definitions, gauge, histogram, label

GROUP_BOUNDS_BYTES: Final = tuple(float(4096 << power) for power in range(0, 13, 2))
"""4 KiB to 16 MiB."""


@dataclass(slots=True)
class Counters(MetricGroup):
    """Counted by all parts of a bookie, over all of its disks."""

    subsystem = "bookie"

    add_requests: int = counter("requests", "ADD requests")
    add_entries: int = counter("entries", "Entries in ADD requests")
    add_bytes: int = counter("bytes", "Headers and payloads in ADD requests that were accepted")
    adds_overloaded: int = counter("requests", "ADD requests refused because in_flight_bytes_max was reached")
    log_groups: int = counter("group commits", "Group commits that became durable")
    log_bytes: int = counter("bytes", "Log bytes that became durable")
    read_requests: int = counter("requests", "READ and READ_HEADERS requests")
    direct_reads: int = counter("reads", "Reads around the page cache")
    read_entries: int = counter("entries", "Entries read from disk")
    read_bytes: int = counter("bytes", "Payload bytes read from disk")
    unreadable_entries: int = counter("entries", "Entries found unreadable when they were read")
    fences: int = counter("ledgers", "Ledgers fenced")
    ledgers_deleted: int = counter("ledgers", "Ledgers deleted")
    files_recycled: int = counter("files", "Log files reused for new entries")
    compacted_bytes: int = counter("bytes", "Bytes moved by compaction of log files")
    scrubbed_bytes: int = counter("bytes", "Bytes read and checked by the scrub")
    scrub_errors: int = counter("errors", "Files or entries that the scrub found corrupt or could not read")
    corrupt_entries: int = counter("entries", "Corrupt entries found")
    repaired_entries: int = counter("entries", "Corrupt entries replaced by the copy of another bookie")
    repaired_files: int = counter("files", "Log files with corrupt frames whose entries were rewritten")
    audit_copied_entries: int = counter("entries", "Entries copied by the auditor on this bookie")
    audit_copied_bytes: int = counter("bytes", "Payload bytes copied by the auditor on this bookie")
    audit_moves: int = counter("fragments", "Copies of fragments that the auditor on this bookie moved")

    def as_dict(self) -> dict[str, int]:
        """The counters by name, for INFO."""
        return {definition.field: getattr(self, definition.field) for definition in definitions(Counters)}


@dataclass(slots=True, kw_only=True)
class BookieMetrics(MetricGroup):
    """Requests in progress."""

    subsystem = "bookie"

    in_flight_add_bytes: int = gauge("bytes", "ADD requests that are not answered yet")
    requests_in_progress: int = gauge("requests", "Other requests than ADD that are not answered yet")
    lac_waiters: int = gauge("requests", "Readers that wait for a ledger to grow")


@dataclass(slots=True, kw_only=True)
class DiskMetrics(MetricGroup):
    """One disk."""

    subsystem = "bookie_disk"

    disk: str = label()
    writable: int = gauge("0 or 1", "Whether the disk accepts new entries")
    failed: int = gauge("0 or 1", "Whether the disk has failed and is no longer used")
    free_bytes: int = gauge("bytes", "Free space of the disk's file system")
    log_files: int = gauge("files", "Log files in use")
    log_size_bytes: int = gauge("bytes", "Size of the log files' contents, deleted ledgers included")
    live_bytes: int = gauge("bytes", "Log bytes of ledgers that are not deleted")
    ledgers: int = gauge("ledgers", "Ledgers on the disk")
    unrepaired_entries: int = gauge("entries", "Entries known to be corrupt and not repaired yet")
    group_commit_seconds: Histogram = histogram("seconds", "Time to write and sync a group of entries")
    group_commit_bytes: Histogram = histogram("bytes", "Log bytes of a group commit", GROUP_BOUNDS_BYTES)
    waiting_for_commit: int = gauge("requests", "Requests that wait for a group commit")
    waiting_for_room: int = gauge("requests", "Requests that wait for the next log file")


@dataclass(slots=True, kw_only=True)
class AddMetrics(MetricGroup):
    """Adds of this process's ledger writers to one bookie."""

    subsystem = "ledger_client"

    bookie: str = label()
    in_flight_add_bytes: int = gauge("bytes", "Payload of the ADD requests that the bookie has not answered")
    in_flight_adds: int = gauge("requests", "ADD requests that the bookie has not answered")
    queued_entries: int = gauge("entries", "Entries that wait for earlier ADD requests, or are sent again")
    failures: int = counter(
        "failures", "Times that the bookie was treated as failed for all writers, because it was unreachable or silent"
    )
