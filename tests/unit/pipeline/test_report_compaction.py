"""The report of ``stratalog job compact``: what a dry run shows, and what was left and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
from support.superseded import offset_set

from stratalog_core.batches.records import Record, build_batch
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs.erase import plan_search
from stratalog_pipeline.jobs.page import render_page
from stratalog_pipeline.jobs.report_compaction import compaction_report
from stratalog_pipeline.options import parse_options
from stratalog_tiering.maintenance.segment_replacements import SegmentKept
from stratalog_tiering.maintenance.superseded import Compacted, HistoryRead

if TYPE_CHECKING:
    from unit.pipeline.conftest import ColdBucket


def test_segments_with_superseded_records_are_listed_and_what_stays_is_a_problem(cold_bucket: ColdBucket) -> None:
    batches = [
        [bytes(build_batch([Record(offset=first + n, timestamp_ms=n, key=b"a", value=b"v") for n in range(2)]))]
        for first in (0, 2, 4)
    ]
    cold_bucket.add_topic("a", [batches])
    with Bucket(cold_bucket.url) as bucket:
        _, segments = plan_search(bucket, parse_options({"path": cold_bucket.url, "subscribe": "a"}))
    name, entries = segments[0][0], [entry for _, entry in segments]
    options = msgspec.structs.replace(entries[1].options, lock_until_ms=86_400_000)
    entries[1] = msgspec.structs.replace(entries[1], options=options)
    read = {name: HistoryRead(start_offset=0, end_offset=4, settled_version=0, erased_version=0, segments=tuple(entries[:2]))}
    found = {name: offset_set([0, 1, 2])}
    dry = compaction_report(read, found, [], [], now_ms=1, is_dry_run=True)
    assert (dry.facts["verdict"], dry.problems) == ("dry run", [])
    assert [(row["start_offset"], row["superseded"], row["locked_until"]) for row in dry.document["segments"]] == [
        (0, 2, None), (2, 1, "1970-01-02T00:00:00+00:00"),
    ]  # fmt: skip
    assert dry.document["partitions"][0]["superseded"] == 3
    compacted = [(name, Compacted(source=entries[0], entry=entries[0], records=2, unreadable_batches=0))]
    refused = [(name, SegmentKept(entry=entries[1], reason="it is locked", lock_until_ms=86_400_000))]
    done = compaction_report(read, found, compacted, refused, now_ms=1, is_dry_run=False)
    assert done.facts["verdict"] == "1 parts left"
    assert done.problems == [f"a-0: {entries[1].key}: it is locked until 1970-01-02T00:00:00+00:00"]
    assert json.loads(json.dumps(done.document))["records_removed"] == 2
    assert "1970-01-02" in render_page(done, "compact", "now")
    partly = [(name, Compacted(source=entries[0], entry=entries[0], records=1, unreadable_batches=1))]
    assert compaction_report(read, found, partly, [], now_ms=1, is_dry_run=False).problems == [
        f"a-0: {entries[0].key}: 1 batches with superseded records cannot be read, and stay"
    ]
    complete = compaction_report(read, found, compacted, [], now_ms=86_400_001, is_dry_run=False)
    assert complete.facts["verdict"] == "complete"
    assert [row["locked_until"] for row in complete.document["segments"]] == [None, None]
