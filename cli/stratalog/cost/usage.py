"""Counts what a topic stores, and the requests that it has caused, from the listing of its objects and its manifests. No I/O.

Recent writes are counted, because objects stay for the grace period after they left the history: every object of the last day
is still listed, with its size, its time and the number of its parts. Listings and reads leave no object behind; they are
derived from the offloads, merges and commits. ``tests/unit/tiering/worker/test_requests_of_a_long_history.py`` compares them
with those that a worker made.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from stratalog_tiering.cold.block_source import RUN_BLOCKS_MAX
from stratalog_tiering.cold.segment_check import WHOLE_BYTES_MAX
from stratalog_tiering.format.manifest import Reason, RemovedObject, SegmentEntry
from stratalog_tiering.format.object_keys import data_key_key, is_version_object, parse_manifest_key, parse_segment_key
from stratalog_tiering.format.segment import BLOCK_BYTES_TARGET
from stratalog_tiering.maintenance.merging import FAN_IN, READ_WHOLE_BYTES_MAX
from stratalog_tiering.store.base import ObjectInfo

DAY_MS: Final = 86_400_000
GRACE_DAYS: Final = 1
"""The default of ``[tiering] grace_ms``: how long an object stays after it left the history."""
PART_BYTES: Final = 8 * 2**20
"""The default of ``[tiering] upload_part_bytes``, for stores whose tags do not show the number of parts."""
LISTED_AT_ONCE: Final = 1000
PREFIXES: Final = 5
"""Prefixes of a partition that a sweep lists: segments, pages, lists of removed objects, tree, manifests."""
SWEEP_DAYS: Final = 7
"""The default of ``[tiering] sweep_interval_ms``."""
_READ_BACK_BYTES: Final = 4 * BLOCK_BYTES_TARGET
_READ_ALONE: Final = 2
"""Additional reads for the first blocks of a replay, because read-ahead starts with one block."""
_PARTS: Final = re.compile(r"[0-9a-f]{32}-(\d{1,5})")
Sizes = Counter[int]
"""Number of objects by size in bytes."""


@dataclass(slots=True, kw_only=True)
class Requests:
    """Numbers of requests: those of PUT class and of GET class about segments, and about all other objects."""

    segment_puts: int = 0
    segment_gets: int = 0
    other_puts: int = 0
    other_gets: int = 0

    @property
    def puts(self) -> int:
        return self.segment_puts + self.other_puts

    @property
    def gets(self) -> int:
        return self.segment_gets + self.other_gets


@dataclass(frozen=True, slots=True, order=True)
class Departure:
    """A segment that left the history: its size, and the days from its upload to its deletion."""

    size_bytes: int
    age_days: int


@dataclass(slots=True, kw_only=True)
class Activity:
    """The work of tiering workers on one topic in the ``seconds`` before the count. Sweeps are not in ``requests``.

    ``commit_seconds`` are the seconds in which something was committed: commits of one second share a look for another owner.
    """

    seconds: float
    offloads: int = 0
    offloaded_bytes: int = 0
    merges: int = 0
    commits: int = 0
    commit_seconds: set[int] = field(default_factory=set)
    requests: Requests = field(default_factory=Requests)
    merged_away: Counter[Departure] = field(default_factory=Counter)
    expired: Counter[Departure] = field(default_factory=Counter)

    def since_ms(self, now_ms: int) -> int:
        """Wall time at which the observed time begins, if the count was made at ``now_ms``."""
        return now_ms - round(self.seconds * 1000)


@dataclass(slots=True, kw_only=True)
class TopicUsage:
    """One topic. ``hot_bytes`` counts all copies of sealed ledgers; None: unknown without metadata.

    ``live`` are segments of the history, ``removed`` segments that wait for their deletion, ``others`` all other objects.
    ``replay_requests`` are those of one replay of the whole history, ``sweep_listings`` the listings of one sweep.
    """

    topic: str
    partitions: int
    activity: Activity
    hot_bytes: int | None = None
    live: Sizes = field(default_factory=Counter)
    removed: Sizes = field(default_factory=Counter)
    others: Sizes = field(default_factory=Counter)
    replay_requests: Requests = field(default_factory=Requests)
    sweep_listings: int = 0
    storage_classes: frozenset[str] = frozenset()

    @property
    def live_bytes(self) -> int:
        return total_bytes(self.live)

    @property
    def cold_bytes(self) -> int:
        """Bytes of all objects in the store."""
        return sum(map(total_bytes, (self.live, self.removed, self.others)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionObjects:
    """The listed objects of one partition, its live segments by key, and the removed objects that its manifest names."""

    segments: tuple[ObjectInfo, ...]
    others: tuple[ObjectInfo, ...]
    live: Mapping[str, SegmentEntry]
    removed: Iterable[RemovedObject]


def total_bytes(sizes: Sizes) -> int:
    return sum(size * count for size, count in sizes.items())


def put_requests(info: ObjectInfo) -> int:
    """The number of requests that wrote the object: one, or for a multipart upload its parts, its begin and its end."""
    found = _PARTS.fullmatch(info.etag)
    parts = int(found[1]) if found else -(-info.size_bytes // PART_BYTES) if info.size_bytes >= PART_BYTES else 0
    return parts + 2 if parts else 1


def add_partition(usage: TopicUsage, partition: PartitionObjects, now_ms: int) -> None:
    """Add one partition's objects to ``usage``; those of the last ``usage.activity.seconds`` count as its activity."""
    since_ms = usage.activity.since_ms(now_ms)
    for info in partition.segments:
        (usage.live if info.key in partition.live else usage.removed)[info.size_bytes] += 1
    for info in partition.others:
        usage.others[info.size_bytes] += 1
    usage.sweep_listings += _sweep_listings(partition)
    usage.storage_classes |= {entry.options.storage_class or "STANDARD" for entry in partition.live.values()}
    data_keys = {info.key for info in partition.others if info.key.endswith(".key")}
    together = 0
    for entry in partition.live.values():
        blocks = _blocks(entry)
        reads = -(-blocks // RUN_BLOCKS_MAX)
        together += blocks - reads
        usage.replay_requests.segment_gets += reads + 1
        usage.replay_requests.other_gets += data_key_key(entry.key) in data_keys
    usage.replay_requests.segment_gets += min(_READ_ALONE, together)
    usage.replay_requests.other_gets += 1
    _add_commits(usage.activity, partition, since_ms)
    _add_departures(usage.activity, partition, since_ms)


def add_descriptors(usage: TopicUsage, descriptors: Iterable[ObjectInfo], now_ms: int) -> None:
    """Add the topic's own descriptors; each is written after a listing."""
    for info in descriptors:
        usage.others[info.size_bytes] += 1
        if info.last_modified_ms >= usage.activity.since_ms(now_ms):
            usage.activity.requests.other_puts += 2


def _sweep_listings(partition: PartitionObjects) -> int:
    if not partition.segments and not partition.others:
        return 0
    kinds = Counter(info.key.split("/", 1)[0] for info in (*partition.segments, *partition.others))
    return PREFIXES + sum((count - 1) // LISTED_AT_ONCE for count in kinds.values())


def _blocks(entry: SegmentEntry) -> int:
    """The number of a segment's blocks, if its batches have the same size: blocks hold whole batches."""
    batches = max(1, entry.batch_count)
    in_block = max(1, BLOCK_BYTES_TARGET * batches // max(1, entry.data_bytes))
    return -(-batches // in_block)


def _add_commits(activity: Activity, partition: PartitionObjects, since_ms: int) -> None:
    """Add the offloads, merges and commits since ``since_ms``, and their requests."""
    written = Requests()
    recent = [info for info in partition.others if info.last_modified_ms >= since_ms]
    is_encrypted = any(info.key.endswith(".key") for info in partition.others)
    offloaded, merged = _offloaded_and_merged(partition.segments, since_ms)
    for info in (*offloaded, *merged):
        written.segment_puts += put_requests(info)
        written.segment_gets += _read_back_gets(info, partition.live.get(info.key))
    # A hot copy is dropped after its cold copy's end, and its data key, were read once more.
    written.segment_gets += len(offloaded)
    written.other_gets += len(offloaded) if is_encrypted else 0
    for info in merged:
        sources = _source_count(info, partition)
        written.segment_gets += _merge_gets(info, sources)
        written.other_gets += sources if is_encrypted else 0
    written.other_puts += sum(map(put_requests, recent))
    written.other_gets += sum(info.key.endswith(".key") for info in recent)
    commits = [info for info in recent if is_version_object(info.key)]
    # Each manifest is read back. A commit that neither offloads nor merges deletes objects: it looks for a newer version and
    # for another owner.
    written.other_gets += len(commits) + 2 * max(0, len(commits) - len(offloaded) - len(merged))
    # The versions are listed before the first upload and before its commit.
    first = sum(parsed.version == 1 for info in commits if (parsed := parse_manifest_key(info.key)) is not None)
    written.other_puts += 2 * first
    seconds = {info.last_modified_ms // 1000 for info in commits} - activity.commit_seconds
    activity.commit_seconds |= seconds
    written.other_gets += len(seconds)
    _add(activity.requests, written)
    activity.offloads += len(offloaded)
    activity.offloaded_bytes += sum(info.size_bytes for info in offloaded)
    activity.merges += len(merged)
    activity.commits += len(commits)


def _offloaded_and_merged(segments: Iterable[ObjectInfo], since_ms: int) -> tuple[list[ObjectInfo], list[ObjectInfo]]:
    """The segments written since ``since_ms``: those of sealed ledgers, and those that merges made.

    A merged segment begins at the offset of its first source, which was written before and is still listed: it stays for the
    grace period.
    """
    offloaded, merged, seen = list[ObjectInfo](), list[ObjectInfo](), set[int]()
    for info in sorted(segments, key=lambda info: info.last_modified_ms):
        parsed = parse_segment_key(info.key)
        if parsed is None:
            continue
        if info.last_modified_ms >= since_ms:
            (merged if parsed.base_offset in seen else offloaded).append(info)
        seen.add(parsed.base_offset)
    return offloaded, merged


def _read_back_gets(info: ObjectInfo, entry: SegmentEntry | None) -> int:
    """Reads of a new segment's content: one, or for a large one its end and each four blocks."""
    if info.size_bytes <= WHOLE_BYTES_MAX:
        return 1
    return 1 + (-(-_blocks(entry) // 4) if entry is not None else -(-info.size_bytes // _READ_BACK_BYTES))


def _merge_gets(merged: ObjectInfo, sources: int) -> int:
    """Return the reads of a merge: one per small source, else each footer and block, and the last source's producers."""
    if merged.size_bytes <= sources * READ_WHOLE_BYTES_MAX:
        return sources
    return sources + max(sources, -(-merged.size_bytes // BLOCK_BYTES_TARGET)) + 1


def _source_count(merged: ObjectInfo, partition: PartitionObjects) -> int:
    """Return the number of segments that a merge replaced; the default if the merged segment has left the history."""
    entry = partition.live.get(merged.key)
    return len(entry.sources) if entry is not None else FAN_IN


def _add_departures(activity: Activity, partition: PartitionObjects, since_ms: int) -> None:
    """Add the segments that have left the history since ``since_ms``, by the age that they reach."""
    written_ms = {info.key: info.last_modified_ms for info in partition.segments}
    for each in partition.removed:
        if each.key in written_ms and each.removed_at_ms >= since_ms:
            age_days = max(0, each.removed_at_ms - written_ms[each.key]) // DAY_MS + GRACE_DAYS
            leaving = activity.merged_away if each.reason == Reason.MERGED else activity.expired
            leaving[Departure(each.object_bytes, age_days)] += 1


def _add(total: Requests, more: Requests) -> None:
    total.segment_puts += more.segment_puts
    total.segment_gets += more.segment_gets
    total.other_puts += more.other_puts
    total.other_gets += more.other_gets
