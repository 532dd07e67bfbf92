"""Audit: checks that every offset of a partition's cold history is present exactly once and unaltered.

The tasks read and check every byte of every block (block CRC32C, Merkle leaves, each batch's own CRC, contiguous offsets) and
send only findings. Damage does not stop the audit: it becomes a finding with segment, block and offsets. The digest of a
partition is the RFC 9162 Merkle root over its blocks' roots: two buckets with equal digests hold the same bytes in the same
blocks. Rows are not decoded, so the audit runs at the speed of the disk or the network.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa
from pyspark.sql import SparkSession

from stratalog_core.errors import Corrupt
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.options import ReadOptions
from stratalog_pipeline.planning import SegmentSlice, Split
from stratalog_pipeline.scan_plan import plan_scan
from stratalog_pipeline.segments import located, wanted_blocks
from stratalog_tiering.format.footer import BlockEntry
from stratalog_tiering.format.merkle import root_hash, split_hashes
from stratalog_tiering.format.segment import audit_block


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFinding:
    """The result for one slice of a segment: offsets (end exclusive), counts, the blocks' Merkle roots, and problems."""

    topic: str
    partition: int
    first_offset: int
    end_offset: int
    record_count: int = 0
    stored_bytes: int = 0
    roots: bytes = b""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionAudit:
    """The verdict on one partition. ``digest`` is hex, and valid only if ``problems`` is empty."""

    topic: str
    partition: int
    first_offset: int
    end_offset: int
    record_count: int
    stored_bytes: int
    digest: str
    problems: tuple[str, ...]


def audit(spark: SparkSession, options: ReadOptions) -> list[PartitionAudit]:
    """Audit the partitions in ``options``, whole blocks at a time. Raises ``Invalid`` or ``Corrupt`` only if planning fails."""
    with Bucket(options.store) as bucket:
        splits = plan_scan(bucket, options).splits
    if not splits:
        return []
    rows = [(pickle.dumps(split),) for split in splits]
    frame = spark.createDataFrame(rows, "split binary").repartition(len(splits))
    collected = frame.mapInArrow(_task(options.store), "finding binary").collect()
    return combine([finding for row in collected for finding in pickle.loads(row["finding"])])


def _task(store: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with Bucket(store) as bucket:
            for batch in batches:
                findings = [pickle.dumps(audit_split(bucket, pickle.loads(one))) for one in batch.column(0).to_pylist()]
                yield pa.RecordBatch.from_arrays([pa.array(findings, pa.binary())], names=["finding"])

    return run


def audit_split(bucket: Bucket, split: Split) -> list[SliceFinding]:
    """Read and check every block that a split owns."""
    return [_audit_slice(bucket, split, piece) for piece in split.slices]


def _audit_slice(bucket: Bucket, split: Split, piece: SegmentSlice) -> SliceFinding:
    name = split.name
    try:
        footer = bucket.run(bucket.source.footer(piece.segment))
    except Corrupt as bad:
        return SliceFinding(
            topic=name.topic, partition=name.partition, first_offset=piece.blocks_from, end_offset=piece.blocks_end,
            problems=(bad.message,),
        )  # fmt: skip
    blocks = wanted_blocks(footer, piece, split.offsets)
    return SliceFinding(
        topic=name.topic,
        partition=name.partition,
        first_offset=blocks[0].base_offset if blocks else piece.blocks_from,
        end_offset=blocks[-1].last_offset + 1 if blocks else piece.blocks_from,
        record_count=sum(block.record_count for block in blocks),
        stored_bytes=sum(block.length for block in blocks),
        roots=b"".join(block.leaves_root for block in blocks),
        problems=tuple(_audit_blocks(bucket, piece, blocks)),
    )


def _audit_blocks(bucket: Bucket, piece: SegmentSlice, blocks: Sequence[BlockEntry]) -> Iterator[str]:
    """Yield a message for each problem in the blocks. Reads are ahead of the checks, and restart after an unreadable block."""
    done = 0
    while done < len(blocks):
        ranges = [(piece.segment.key, piece.segment.data_position + block.position, block.length) for block in blocks[done:]]
        try:
            for content in bucket.get_ranges(ranges):
                block, done = blocks[done], done + 1
                yield from _audit_one(piece, block, content)
        except Corrupt as unreadable:
            block, done = blocks[done], done + 1
            yield located(piece.segment, block, unreadable).message


def _audit_one(piece: SegmentSlice, block: BlockEntry, content: memoryview) -> Iterator[str]:
    try:
        audit_block(content, block)
    except Corrupt as bad:
        yield located(piece.segment, block, bad).message


def combine(findings: Sequence[SliceFinding]) -> list[PartitionAudit]:
    """Merge findings, in any order, into one verdict per partition. Pure. A gap or overlap between slices is a problem, too."""
    ordered = sorted((one for one in findings if one.end_offset > one.first_offset), key=_place)
    return [_verdict(list(group)) for _, group in groupby(ordered, key=lambda one: (one.topic, one.partition))]


def _place(finding: SliceFinding) -> tuple[str, int, int]:
    return finding.topic, finding.partition, finding.first_offset


def _verdict(findings: Sequence[SliceFinding]) -> PartitionAudit:
    problems: list[str] = []
    next_offset = findings[0].first_offset
    for finding in findings:
        if finding.first_offset != next_offset:
            problems.append(f"offset {finding.first_offset} found; expected {next_offset}")
        problems.extend(finding.problems)
        next_offset = finding.end_offset
    roots = b"".join(finding.roots for finding in findings)
    digest = root_hash(list(split_hashes(roots)))
    return PartitionAudit(
        topic=findings[0].topic,
        partition=findings[0].partition,
        first_offset=findings[0].first_offset,
        end_offset=next_offset,
        record_count=sum(finding.record_count for finding in findings),
        stored_bytes=sum(finding.stored_bytes for finding in findings),
        digest=digest.hex(),
        problems=tuple(problems),
    )
