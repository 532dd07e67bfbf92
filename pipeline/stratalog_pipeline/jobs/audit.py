"""Audit: checks that every offset of a partition's cold history is present exactly once and unaltered.

The driver checks manifests, their hash chain, index pages and Merkle trees. The tasks read every byte of every segment: object
size, footer, sections, block CRCs, batch CRCs, contiguous offsets; and return the hashes of their leaves, which the driver
compares with the partition's tree. Damage does not stop the audit: each becomes a problem with its place.

``digest`` is the head of the partition's Merkle tree (RFC 9162), which every manifest contains. Merging and retention do not
change it: equal digests of two buckets mean that the same batches were offloaded in the same order. A compacted segment lacks
some of its leaves, so its batches are checked by themselves, and not against the tree. No record is decoded, so the audit runs
at the speed of the disk or the network.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pyspark.sql import SparkSession

from stratalog_core.batches.batch import BatchHeader
from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Corrupt, Invalid
from stratalog_metadata.records import ManifestPointer
from stratalog_pipeline.brokers import Brokers
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.catalog import load_history
from stratalog_pipeline.jobs.batch_statistics import BatchStatistics, repeated_records
from stratalog_pipeline.jobs.lease import reader_lease
from stratalog_pipeline.jobs.session import OnProgress, run_tasks
from stratalog_pipeline.options import ReadOptions
from stratalog_pipeline.planning import OPEN_BYTES, OffsetRange, PartitionName, grouped
from stratalog_pipeline.scan_plan import wanted_partitions
from stratalog_pipeline.segments import located, parts_of, range_of, requested_together
from stratalog_tiering.cold.segment_check import check_presence
from stratalog_tiering.cold.verifier import Structure, Verifier
from stratalog_tiering.format.block_cipher import BlockCipher
from stratalog_tiering.format.erased_leaves import restore_leaves
from stratalog_tiering.format.footer import BlockEntry, SegmentFooter
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.format.merkle import split_hashes
from stratalog_tiering.format.partition_tree import TreeSpan, tree_span
from stratalog_tiering.format.segment import audit_block

PARTITIONS_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTask:
    """One segment to read. ``newest_ms`` is the greatest timestamp of the segments before it, -1 for the first."""

    name: PartitionName
    entry: SegmentEntry
    newest_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentResult:
    """The result for one segment. ``span`` holds the hashes of its leaves, None if they cannot be computed."""

    name: PartitionName
    base_offset: int
    statistics: BatchStatistics
    span: TreeSpan | None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPlan:
    """The findings of the driver about a partition, and the manifest and tree that its segments must agree with."""

    name: PartitionName
    structure: Structure
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionAudit:
    """The verdict on one partition. Offsets: end exclusive. ``digest`` is hex, and empty if there are problems.

    ``late_records`` and ``repeated_records`` are remarks about what producers sent, not problems of the history. Days are ISO
    dates; records without a timestamp count under ``none``.
    """

    topic: str
    topic_id: str
    partition: int
    start_offset: int = 0
    end_offset: int = 0
    manifest_version: int = 0
    segments: int = 0
    batches: int = 0
    records: int = 0
    stored_bytes: int = 0
    batch_bytes: int = 0
    late_records: int = 0
    lateness_max_ms: int = 0
    repeated_records: int = 0
    records_by_day: Mapping[int, int] = field(default_factory=dict)
    bytes_by_codec: Mapping[str, int] = field(default_factory=dict)
    tree_size: int = 0
    digest: str = ""
    problems: tuple[str, ...] = ()


def audit(
    spark: SparkSession, options: ReadOptions, on_progress: OnProgress = lambda done, total: None
) -> list[PartitionAudit]:
    """Audit the selected topics' whole history. Bounds of offset and time do not apply. Raises as :func:`plan_audit`."""
    with Bucket(options.store) as bucket, reader_lease(bucket, options, "audit"):
        plans = plan_audit(bucket, options)
        tasks = audit_tasks(plans, options.split_bytes)
        found = run_tasks(spark, options.store, tasks, audit_segments, on_progress)
    return verdicts(plans, (result for results in found for result in results))


def plan_audit(bucket: Bucket, options: ReadOptions) -> list[PartitionPlan]:
    """Check the manifests, chains, pages and trees of the selected partitions; compare them with the brokers, if any are given.

    Raises ``Invalid``, ``NotFound``, ``Unavailable``, and ``Refused`` by the store.
    """
    names = wanted_partitions(bucket, options)
    verifier = Verifier(bucket.store, bucket.background)

    async def plan(name: PartitionName) -> tuple[PartitionPlan, ManifestPointer | None]:
        try:
            pointer = (await load_history(bucket, name)).pointer
        except (Corrupt, Invalid) as bad:
            return PartitionPlan(name=name, structure=Structure(), problems=(bad.message,)), None
        structure = await verifier.structure(name.topic, pointer) if pointer is not None else Structure()
        return PartitionPlan(name=name, structure=structure, problems=tuple(map(str, structure.findings))), pointer

    planned = bucket.run(bounded_map(plan, names, PARTITIONS_AT_ONCE))
    # Only now: what is offloaded or removed meanwhile would look like a contradiction.
    limits = Brokers(options).served_limits(options.wanted, names) if options.client else {}
    return [_compared(plan, pointer, limits.get(plan.name)) for plan, pointer in planned]


def _compared(plan: PartitionPlan, pointer: ManifestPointer | None, at_brokers: OffsetRange | None) -> PartitionPlan:
    if at_brokers is None:
        return plan
    return replace(plan, problems=(*plan.problems, *_compare(pointer, at_brokers)))


def _compare(pointer: ManifestPointer | None, at_brokers: OffsetRange) -> list[str]:
    """Return the contradictions between the bucket and the brokers, which may have records before and after its history."""
    if pointer is None:
        return []
    problems: list[str] = []
    if at_brokers.first < pointer.start_offset:
        problems.append(
            f"the brokers' log begins at offset {at_brokers.first}, the bucket at {pointer.start_offset}: records are missing"
        )
    if at_brokers.end < pointer.end_offset:
        problems.append(f"the brokers' log ends at offset {at_brokers.end}, the bucket only at {pointer.end_offset}")
    return problems


def audit_tasks(plans: Iterable[PartitionPlan], task_bytes: int) -> list[tuple[SegmentTask, ...]]:
    """Return the segments to read as tasks of about ``task_bytes`` stored bytes, or of one larger segment."""
    return grouped(((each, OPEN_BYTES + each.entry.stored_bytes, 1) for each in _segment_tasks(plans)), task_bytes)


def _segment_tasks(plans: Iterable[PartitionPlan]) -> Iterator[SegmentTask]:
    for plan in plans:
        newest_ms = -1
        for entry in plan.structure.segments:
            yield SegmentTask(name=plan.name, entry=entry, newest_ms=newest_ms)
            newest_ms = max(newest_ms, entry.max_timestamp_ms)


def audit_segments(bucket: Bucket, tasks: Iterable[SegmentTask]) -> list[SegmentResult]:
    """Read and check whole segments. Raises ``Unavailable``, ``Refused``."""
    return [_audit_segment(bucket, one) for one in tasks]


def _audit_segment(bucket: Bucket, task: SegmentTask) -> SegmentResult:
    entry, statistics, leaves = task.entry, BatchStatistics(newest_ms=task.newest_ms), bytearray()
    span = None
    try:
        footer, _ = bucket.run(check_presence(bucket.store, bucket.source, entry))
        problems = list(_audit_blocks(bucket, entry, footer, statistics, leaves))
        if not problems and not entry.is_compacted:
            restore_leaves(leaves, bucket.run(bucket.source.erased_leaves(entry)))
            span = tree_span(entry.first_leaf, list(split_hashes(leaves)))
    except (Corrupt, Invalid) as bad:
        problems = [bad.message if entry.key in bad.message else f"segment {entry.key}: {bad.message}"]
    return SegmentResult(
        name=task.name, base_offset=entry.base_offset, statistics=statistics, span=span, problems=tuple(problems)
    )


def _audit_blocks(
    bucket: Bucket, entry: SegmentEntry, footer: SegmentFooter, statistics: BatchStatistics, leaves: bytearray
) -> Iterator[str]:
    """Yield a message for each problem in the blocks. Reads run ahead of the checks, and continue after an unreadable block.

    Adjacent blocks are read by one request: a request per block takes a third more CPU time. An unreadable run of blocks is
    read again block by block.
    """
    cipher, runs = bucket.cipher(footer), deque(requested_together(footer.blocks))
    while runs:
        try:
            for content in bucket.get_ranges([range_of(entry, run) for run in runs]):
                run = runs.popleft()
                for block, stored in parts_of(run, content):
                    yield from _audit_block(entry, block, stored, cipher, statistics, leaves)
        except Corrupt as unreadable:
            run = runs.popleft()
            if len(run) == 1:
                yield located(entry, run[0], unreadable).message
            else:
                runs.extendleft([block] for block in reversed(run))


def _audit_block(
    entry: SegmentEntry,
    block: BlockEntry,
    content: memoryview,
    cipher: BlockCipher | None,
    statistics: BatchStatistics,
    leaves: bytearray,
) -> Iterator[str]:
    found: list[tuple[BatchHeader, bytes]] = []
    try:
        audit_block(content, block, lambda header, leaf: found.append((header, leaf)), cipher, is_compacted=entry.is_compacted)
    except Corrupt as bad:
        yield located(entry, block, bad).message
    else:
        leaves += b"".join(leaf for _, leaf in found)
        for header, _ in found:
            statistics.add(header)


def verdicts(plans: Iterable[PartitionPlan], results: Iterable[SegmentResult]) -> list[PartitionAudit]:
    """Merge the results of all tasks, in any order, into one verdict per partition."""
    by_partition: defaultdict[PartitionName, list[SegmentResult]] = defaultdict(list)
    for result in results:
        by_partition[result.name].append(result)
    return [_verdict(plan, sorted(by_partition[plan.name], key=lambda one: one.base_offset)) for plan in plans]


def _verdict(plan: PartitionPlan, results: Sequence[SegmentResult]) -> PartitionAudit:
    name, manifest = plan.name, plan.structure.manifest
    by_offset = {result.base_offset: result for result in results}
    problems = list(plan.problems)
    for entry in plan.structure.segments:
        found = by_offset.get(entry.base_offset)
        problems += _problems_of(plan, entry, found)
    counted = [result.statistics for result in results]
    days: Counter[int] = sum((each.records_by_day for each in counted), Counter())
    codecs: Counter[str] = sum((each.bytes_by_codec for each in counted), Counter())
    return PartitionAudit(
        topic=name.topic,
        topic_id=str(name.topic_id),
        partition=name.partition,
        start_offset=manifest.start_offset if manifest is not None else 0,
        end_offset=manifest.end_offset if manifest is not None else 0,
        manifest_version=manifest.version if manifest is not None else 0,
        segments=len(plan.structure.segments),
        batches=sum(each.batches for each in counted),
        records=sum(each.records for each in counted),
        stored_bytes=sum(entry.stored_bytes for entry in plan.structure.segments),
        batch_bytes=sum(each.batch_bytes for each in counted),
        late_records=sum(each.late_records for each in counted),
        lateness_max_ms=max((each.lateness_max_ms for each in counted), default=0),
        repeated_records=repeated_records(run for each in counted for run in each.runs)
        + sum(each.settled_repeats for each in counted),
        records_by_day=dict(sorted(days.items())),
        bytes_by_codec=dict(sorted(codecs.items())),
        tree_size=manifest.tree.size if manifest is not None else 0,
        digest=manifest.tree.head.hex() if manifest is not None and not problems else "",
        problems=tuple(problems),
    )


def _problems_of(plan: PartitionPlan, entry: SegmentEntry, found: SegmentResult | None) -> list[str]:
    if found is None:
        return [f"segment {entry.key} was not read"]
    if found.problems or found.span is None or plan.structure.proofs is None:
        return list(found.problems)
    try:
        plan.structure.proofs.check_span(entry.first_leaf, found.span)
    except (Corrupt, Invalid) as bad:
        return [f"segment {entry.key}: {bad.message}"]
    return []
