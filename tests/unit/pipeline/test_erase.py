"""The search of ``stratalog job erase`` in a bucket, without Spark, and its report."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec
import pytest
from support.hostile_batches import hostile_batch

from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs import erase as erase_module
from stratalog_pipeline.jobs.erase import (
    FoundRecords,
    Search,
    SearchedHistory,
    plan_search,
    ranges_of,
    search_segments,
    search_tasks,
)
from stratalog_pipeline.jobs.page import render_page
from stratalog_pipeline.jobs.report_erasure import OldObject, erasure_report
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.planning import OffsetRange, PartitionName
from stratalog_tiering.core.erasure import NEEDLES_MAX, Selection
from stratalog_tiering.maintenance.erasure import Erased
from stratalog_tiering.maintenance.segment_replacements import SegmentKept

if TYPE_CHECKING:
    from unit.pipeline.conftest import ColdBucket

ALICE = Selection(keys=frozenset({b"alice"}))


def batches(first: int, *keys: str) -> list[bytes]:
    return [
        bytes(build_batch([Record(offset=first + n, timestamp_ms=n, key=key.encode(), value=b"alice")], compression=4))
        for n, key in enumerate(keys)
    ]


def found_in(cold_bucket: ColdBucket, selection: Selection, task_bytes: int = 1) -> list[FoundRecords]:
    with Bucket(cold_bucket.url) as bucket:
        _, segments = plan_search(bucket, parse_options({"path": cold_bucket.url, "subscribePattern": ".*"}))
        tasks = search_tasks(segments, task_bytes)
        assert len(tasks) == (len(segments) if task_bytes == 1 else 1)
        return [each for task in tasks for each in search_segments(selection, bucket, task)]


@pytest.mark.parametrize("others", [0, NEEDLES_MAX])
def test_segments_with_selected_records_are_found(cold_bucket: ColdBucket, others: int) -> None:
    many = frozenset(b"nobody-%d" % number for number in range(others))
    cold_bucket.add_topic("a", [[batches(0, "alice", "bob"), batches(2, "bob"), batches(3, "alice", "alice")], []])
    cold_bucket.add_topic("b", [[batches(0, "bob")]])
    selection = Selection(keys=ALICE.keys | many)
    for task_bytes in (1, 1 << 40):
        found = found_in(cold_bucket, selection, task_bytes)
        assert [(str(each.name), each.base_offset, each.end_offset, each.records) for each in found] == [
            ("a-0", 0, 2, 1), ("a-0", 3, 5, 2),
        ]  # fmt: skip


def test_tasks_do_not_each_have_all_keys(cold_bucket: ColdBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver holds all tasks at once: a history of 16,000 of them, and a file of keys."""
    cold_bucket.add_topic("a", [[batches(0, "alice"), batches(1, "bob")]])
    sizes: list[int] = []

    def here(
        spark: None, store: str, tasks: Sequence[Any], work: Callable[[Bucket, Any], Any], on_progress: Callable[..., None]
    ) -> list[Any]:
        sizes.append(sum(len(pickle.dumps(task)) for task in tasks))
        with Bucket(store) as bucket:
            return [work(bucket, task) for task in tasks]

    monkeypatch.setattr(erase_module, "run_tasks", here)
    spark: Any = None
    options = parse_options({"path": cold_bucket.url, "subscribe": "a", "splitBytes": "1", "lease": "false"})
    for keys in (ALICE.keys, ALICE.keys | {b"nobody-%d" % number for number in range(1000)}):
        found = erase_module.search(spark, options, Selection(keys=keys))
        assert [(each.base_offset, each.records) for each in found.found] == [(0, 1)]
    assert sizes[0] == sizes[1]


def test_damage_ends_the_search(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("a", [[batches(0, "alice")]])
    path = cold_bucket.root / cold_bucket.segment_keys["a", 0][0]
    content = bytearray(path.read_bytes())
    content[70] ^= 1
    path.write_bytes(content)
    with pytest.raises(Corrupt, match="does not match its CRC"):
        found_in(cold_bucket, ALICE)


def test_a_batch_that_cannot_be_read_is_a_problem_of_the_report_even_if_nothing_was_found(cold_bucket: ColdBucket) -> None:
    broken = hostile_batch("a value beyond its record", 0, base_offset=1)
    cold_bucket.add_topic("a", [[[*batches(0, "bob"), broken]]])
    key = Selection(keys=frozenset({b"key"}))
    assert found_in(cold_bucket, Selection(keys=frozenset({b"nobody"}))) == [], "its bytes do not have that key"
    (each,) = found_in(cold_bucket, key)
    assert (each.records, each.unreadable_batches) == (0, 1)
    held = {each.name: SearchedHistory(offsets=OffsetRange(first=0, end=2), version=1)}
    found = Search(histories=held, segments=1, found=(), unreadable=(each,))
    for is_dry_run, verdict in ((True, "dry run, 1 parts not searched"), (False, "1 parts left")):
        report = erasure_report(found, [], [], [], {}, {}, {}, is_dry_run=is_dry_run)
        assert report.facts["verdict"] == verdict
        assert [problem.partition(":")[0] for problem in report.problems] == ["a-0"]
        assert "the batch at offset 1: batch at offset 1: a record is malformed" in report.problems[0]
        assert report.document["unreadable_batches"] == 1
        assert report.document["unreadable"][0]["batches"] == 1
        assert "Unreadable batches" in render_page(report, "erase", "now")


def test_neighbouring_segments_are_one_range() -> None:
    name = PartitionName(topic="a", topic_id=UUID(int=1), partition=0)
    found = [
        FoundRecords(name=name, base_offset=base, end_offset=end, records=1, stored_bytes=1)
        for base, end in ((20, 30), (0, 10), (10, 15))
    ]
    assert ranges_of(found) == {name: [(0, 15), (20, 30)]}


def test_what_stays_is_a_problem_of_the_report(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("a", [[batches(0, "alice", "bob")]])
    (each,) = found_in(cold_bucket, ALICE)
    with Bucket(cold_bucket.url) as bucket:
        _, [(name, entry)] = plan_search(bucket, parse_options({"path": cold_bucket.url, "subscribe": "a"}))
    held = {name: SearchedHistory(offsets=OffsetRange(first=0, end=2), version=1)}
    found = Search(histories=held, segments=1, found=(each,))
    new = msgspec.structs.replace(entry, key="new")
    erased = [(name, Erased(source=entry, entry=new, records=1, altered_batches=1, identical_batches=1, unreadable_batches=0))]
    objects = [OldObject(topic="a", partition=0, key=entry.key, bytes=9, reason="merged", is_deleted=False, due_ms=86_400_000)]
    complete = erasure_report(found, erased, [], objects, {}, {}, {}, is_dry_run=False)
    assert (complete.facts["verdict"], complete.problems) == ("complete", [])
    assert complete.document["objects"][0]["due_at"] == "1970-01-02T00:00:00+00:00"
    assert "1970-01-02" in render_page(complete, "erase", "now")
    refused = [(name, SegmentKept(entry=entry, reason="it is locked", lock_until_ms=86_400_000))]
    partly = erasure_report(
        found, [], refused, [], {name: 2}, {name: "it is changing"}, {name: "it was restored"}, is_dry_run=False
    )
    assert [problem.partition(": ")[2] for problem in partly.problems] == [
        f"{entry.key}: it is locked until 1970-01-02T00:00:00+00:00",
        "offsets from 2 on are still hot, or were when the search began, and were not searched: offload them, and erase again",
        "its replaced objects were neither listed nor deleted: it is changing; erase again",
        "its history is not the one that was searched and may have matching records: it was restored; erase again",
    ]
    assert partly.document["changed"] == [{"topic": "a", "partition": 0, "reason": "it was restored"}]
    assert "it was restored; erase again" in render_page(partly, "erase", "now")
    assert json.loads(json.dumps(partly.document, default=str))["refused"][0]["key"] == entry.key
    assert erasure_report(found, [], [], [], {}, {}, {}, is_dry_run=True).facts["verdict"] == "dry run"
