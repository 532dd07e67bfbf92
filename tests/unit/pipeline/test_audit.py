"""The audit's findings and verdicts, without Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratalog_core.batches.records import Record, build_batch
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs.audit import PartitionAudit, SliceFinding, audit_split, combine
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.scan_plan import plan_scan

if TYPE_CHECKING:
    from unit.pipeline.conftest import ColdBucket


def batches(first: int, count: int) -> list[bytes]:
    return [
        bytes(build_batch([Record(offset=o, timestamp_ms=o, key=None, value=b"v" * 20)])) for o in range(first, first + count)
    ]


def audited(bucket: ColdBucket, **options: str) -> list[PartitionAudit]:
    parsed = parse_options({"path": bucket.url, "subscribe": "flights", **options})
    with Bucket(parsed.store) as opened:
        findings = [finding for split in plan_scan(opened, parsed).splits for finding in audit_split(opened, split)]
    return combine(findings[::-1])


def test_a_sound_history_has_one_digest_however_it_is_cut(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("flights", [[batches(5, 30), batches(35, 20)]], block_bytes=400)
    (whole,) = audited(cold_bucket)
    assert (whole.first_offset, whole.end_offset, whole.record_count, whole.problems) == (5, 55, 50, ())
    assert audited(cold_bucket, splitBytes="1") == [whole]


def test_compressed_history_has_the_same_digest(cold_bucket: ColdBucket) -> None:
    segments = [[batches(0, 30), batches(30, 20)]]
    cold_bucket.add_topic("plain", segments, block_bytes=1000)
    cold_bucket.add_topic("compressed", segments, block_bytes=1000, zstd_level=3)
    (plain,), (compressed,) = (audited(cold_bucket, subscribe=name) for name in ("plain", "compressed"))
    assert compressed.problems == ()
    assert compressed.digest == plain.digest
    assert compressed.stored_bytes < plain.stored_bytes
    key = cold_bucket.segment_keys["compressed", 0][1]
    content = bytearray((cold_bucket.root / key).read_bytes())
    content[20] ^= 1
    (cold_bucket.root / key).write_bytes(content)
    (damaged,) = audited(cold_bucket, subscribe="compressed")
    assert len(damaged.problems) == 1
    assert key in damaged.problems[0]


def test_damage_is_located_and_the_rest_is_still_audited(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("flights", [[batches(0, 30), batches(30, 20)]], block_bytes=400)
    first, second = (cold_bucket.root / key for key in cold_bucket.segment_keys["flights", 0])
    content = bytearray(first.read_bytes())
    content[20] ^= 1
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:-3])
    (verdict,) = audited(cold_bucket)
    assert len(verdict.problems) == 2
    assert first.name in verdict.problems[0]
    assert "block at byte 0, offsets 0.." in verdict.problems[0]
    assert second.name in verdict.problems[1]


def test_a_gap_between_findings_is_a_problem() -> None:
    def finding(first: int, end: int) -> SliceFinding:
        return SliceFinding(topic="t", partition=0, first_offset=first, end_offset=end)

    (verdict,) = combine([finding(10, 20), finding(0, 9), finding(20, 20)])
    assert verdict.problems == ("offset 10 found; expected 9",)
    assert combine([]) == []
