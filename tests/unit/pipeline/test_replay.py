"""The plan of a replay, its checkpoint, and what its windows read, without Spark."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec
import pytest

from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Invalid, Unavailable
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs import replay as replay_module
from stratalog_pipeline.jobs.page import render_page
from stratalog_pipeline.jobs.replay import (
    ReplayTarget,
    _described,
    _given_bounds,
    _planned,
    _remedy_of_replays,
    _window_options,
    replay,
)
from stratalog_pipeline.jobs.replay_checkpoint import Checkpoint, Plan
from stratalog_pipeline.jobs.replay_gaps import Gap, joined, readable
from stratalog_pipeline.jobs.report import replay_report
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.planning import OffsetRange, PartitionName, within
from stratalog_pipeline.scan_plan import plan_scan
from stratalog_pipeline.stream_plan import Available, KnownTopics, wanted_ranges
from stratalog_tiering.format.descriptor import DeletionMarker, encode_descriptor
from stratalog_tiering.format.object_keys import deletion_marker_key

if TYPE_CHECKING:
    from unit.pipeline.conftest import ColdBucket

TARGET = ReplayTarget(bootstrap="127.0.0.1:1")
RANGES: Available = {("flights", str(number)): OffsetRange(first=0, end=1_000_000) for number in range(8)}


def segment(count: int) -> list[bytes]:
    return [bytes(build_batch([Record(offset=o, timestamp_ms=1000, key=None, value=b"v") for o in range(count)]))]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Bucket]:
    (tmp_path / "checkpoint").mkdir()
    with Bucket(str(tmp_path / "checkpoint")) as bucket:
        yield bucket


def begin(opened: Bucket, source: Mapping[str, str], *, bounds: str = "") -> Plan:
    options, topics = parse_options(source), KnownTopics()
    plan = _planned(wanted_ranges(options, topics), TARGET, 100, 1)
    return Checkpoint(opened).begin(msgspec.structs.replace(plan, bounds=bounds, topic_ids=dict(topics.ids)))


def test_a_replay_does_not_go_on_with_a_topic_that_was_created_again(cold_bucket: ColdBucket, opened: Bucket) -> None:
    first_id = cold_bucket.add_topic("flights", [[segment(10)]])
    cold_bucket.add_topic("weather", [[segment(10)]])
    source = {"path": cold_bucket.url, "subscribe": "flights,weather", "missingTail": "ignore"}
    begin(opened, source)
    plan = Checkpoint(opened).begun(_described(TARGET), parse_options(source).wanted, "")
    assert plan is not None
    window = _window_options(source, plan, {"flights": {0: 4}}, {"flights": {0: 8}})
    with Bucket(cold_bucket.url) as bucket:
        assert [split.name.topic_id for split in plan_scan(bucket, parse_options(window)).splits] == [first_id]
        cold_bucket.put(deletion_marker_key(first_id), encode_descriptor(DeletionMarker(topic_id=first_id, deleted_at_ms=1)))
        cold_bucket.add_topic("flights", [[segment(30)]])
        with pytest.raises(Invalid, match=f"{first_id}, which is not in the bucket"):
            plan_scan(bucket, parse_options(window))
        others = _window_options(source, plan, {"weather": {0: 0}}, {"weather": {0: 8}})
        assert len(plan_scan(bucket, parse_options(others)).splits) == 1


def test_a_checkpoint_is_that_of_one_range(cold_bucket: ColdBucket, opened: Bucket) -> None:
    cold_bucket.add_topic("flights", [[segment(10)]])
    source = {"path": cold_bucket.url, "subscribe": "flights", "missingTail": "ignore"}
    wanted = parse_options(source).wanted
    plan = begin(opened, source, bounds="--since 7d")
    assert Checkpoint(opened).begun(_described(TARGET), wanted, "--since 7d") == plan
    with pytest.raises(Invalid, match=r"a replay of --since 7d; use another checkpoint for --offsets 0\.\.5"):
        Checkpoint(opened).begun(_described(TARGET), wanted, "--offsets 0..5")
    with pytest.raises(Invalid, match="use another checkpoint for everything"):
        Checkpoint(opened).begun(_described(TARGET), wanted, "")


def test_a_checkpoint_of_an_earlier_release_is_continued(opened: Bucket) -> None:
    plan = _planned(RANGES, TARGET, 100, 1)
    stored = msgspec.to_builtins(plan)
    del stored["bounds"], stored["topic_ids"]
    opened.run(opened.store.put("0000000000.json", [msgspec.json.encode(stored)]))
    begun = Checkpoint(opened).begun(
        _described(TARGET), parse_options({"path": "/", "subscribe": "flights"}).wanted, "--offsets 0..5"
    )
    assert begun == plan
    window = _window_options({"topicIds": str(UUID(int=7))}, plan, {"flights": {0: 0}}, {"flights": {0: 4}})
    assert window["topicIds"] == str(UUID(int=7))


def test_bounds_are_the_options_that_were_given() -> None:
    source = {"startingOffsets": "earliest", "subscribe": "flights", "EndingTimestamp": "5"}
    assert _given_bounds(source) == "endingtimestamp 5, startingoffsets earliest"


@pytest.mark.parametrize("timeout", ["900000", "60000"])
def test_at_a_limited_rate_one_task_can_send_a_whole_window_in_time(timeout: str) -> None:
    target = ReplayTarget(bootstrap="127.0.0.1:1", rows_per_s=1000, client={"transaction.timeout.ms": timeout})
    plan = _planned(RANGES, target, 1_000_000, 8)
    assert plan.tasks == 8
    # The records of most partitions may be in one task, or most records in one partition.
    assert plan.window_offsets / (target.rows_per_s / plan.tasks) < int(timeout) / 1000


def test_a_timeout_that_is_no_number_is_refused_by_name() -> None:
    target = ReplayTarget(bootstrap="127.0.0.1:1", rows_per_s=1000, client={"transaction.timeout.ms": "15m"})
    with pytest.raises(Invalid, match=r"option 'transaction\.timeout\.ms' must be an integer, not '15m'"):
        _planned(RANGES, target, 1_000_000, 8)


def test_a_replay_that_was_interrupted_in_its_first_window_was_resumed(
    cold_bucket: ColdBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold_bucket.add_topic("flights", [[segment(10)]])
    source = {"path": cold_bucket.url, "subscribe": "flights", "missingTail": "ignore"}
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=1))
    failures = [Unavailable("away")]

    def send(*_: object) -> int:
        if failures:
            raise failures.pop()
        return 10

    monkeypatch.setattr(replay_module, "_send_window", send)
    monkeypatch.setattr(replay_module, "check_targets", lambda *_: None)
    monkeypatch.setattr(replay_module, "_begun_write", lambda _, plan: plan)
    with pytest.raises(Unavailable):
        replay(spark, source, TARGET, checkpoint=str(tmp_path / "checkpoint"))
    done = replay(spark, source, TARGET, checkpoint=str(tmp_path / "checkpoint"))
    assert (done.was_resumed, done.records, done.windows) == (True, 10, 1)


def test_a_topic_has_the_partitions_that_records_keep(
    cold_bucket: ColdBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the first window was written before a task met a partition that the topic does not have."""
    cold_bucket.add_topic("flights", [[segment(10)], [], [segment(10)]])
    source = {"path": cold_bucket.url, "subscribe": "flights", "missingTail": "ignore"}
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=1))
    monkeypatch.setattr(replay_module, "_send_window", lambda *_: 20)
    monkeypatch.setattr(replay_module, "check_topic", lambda _: 2)
    assert replay(spark, source, TARGET).records == 20
    with pytest.raises(Invalid, match=r"topic 'flights\.replay' has 2 partitions, and records of 3 keep theirs"):
        replay(spark, source, dataclasses.replace(TARGET, keeps_partitions=True))
    monkeypatch.setattr(replay_module, "check_topic", lambda _: 3)
    assert replay(spark, source, dataclasses.replace(TARGET, keeps_partitions=True)).records == 20


def test_a_replay_names_no_option_of_the_data_source_as_a_remedy() -> None:
    """Retention may remove a part of its range before it comes there."""
    name = PartitionName(topic="flights", topic_id=UUID(int=7), partition=0)
    held, wanted = OffsetRange(first=50, end=100), OffsetRange(first=0, end=100)
    with (
        pytest.raises(Invalid, match=r"offsets 0\.\.100 are requested; the bucket holds 50\.\.100") as refused,
        _remedy_of_replays(),
    ):
        within(name, wanted, held, fail_on_data_loss=True)
    assert refused.value.message.endswith(
        "Continue without what retention removed by --allow-gaps, or begin another replay, with a checkpoint of its own, at a"
        " later offset or time"
    )
    with pytest.raises(Invalid, match=r"^something else$"), _remedy_of_replays():
        raise Invalid("something else")


Offsets = dict[str, dict[str, int]]


def segments(*ends: int) -> list[list[bytes]]:
    firsts = (0, *ends)
    return [
        [bytes(build_batch([Record(offset=o, timestamp_ms=1000, key=None, value=b"v") for o in range(first, end)]))]
        for first, end in zip(firsts, ends, strict=False)
    ]


class Sent:
    """Stands for Spark: plans what a window reads, as the data source does, and counts it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.windows: list[tuple[int, list[tuple[str, int, int]]]] = []
        self.before: Callable[[int], None] = lambda window: None
        monkeypatch.setattr(replay_module, "_send_window", self._send)
        monkeypatch.setattr(replay_module, "check_targets", lambda *_: None)
        monkeypatch.setattr(replay_module, "_begun_write", lambda _, plan: plan)

    def _send(self, spark: Any, source: Any, target: Any, plan: Plan, window: int, firsts: Any, ends: Any) -> int:
        self.before(window)
        options = parse_options(_window_options(source, plan, firsts, ends))
        with Bucket(options.store) as bucket:
            splits = plan_scan(bucket, options).splits
        read = [(str(split.name), split.offsets.first, split.offsets.end) for split in splits]
        self.windows.append((window, read))
        return sum(end - first for _, first, end in read)

    def replay(self, bucket: ColdBucket, checkpoint: Path | None = None, **more: Any) -> Any:
        spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=1))
        source = {"path": bucket.url, "subscribe": "flights", "missingTail": "ignore"}
        given = None if checkpoint is None else str(checkpoint)
        return replay(spark, source, TARGET, checkpoint=given, window_offsets=20, **more)


def test_what_retention_removes_ahead_of_a_replay_fails_it_or_is_left_out_and_reported(
    cold_bucket: ColdBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold_bucket.add_topic("flights", [segments(10, 20, 30, 40), segments(40)])
    sent = Sent(monkeypatch)

    def retention(window: int) -> None:
        if window == 1 and not sent.windows[1:]:
            cold_bucket.extend("flights", 0, segments(40, 50)[1], drop_below=30)
            sent.before = lambda _: None

    sent.before = retention
    with pytest.raises(Invalid, match=r"flights-0: offsets 10\.\.20 are requested; the bucket holds 30\.\.50.*--allow-gaps"):
        sent.replay(cold_bucket, tmp_path / "checkpoint")
    done = sent.replay(cold_bucket, tmp_path / "checkpoint", allow_gaps=True)
    assert sent.windows == [
        (0, [("flights-0", 0, 10), ("flights-1", 0, 10)]),
        (1, [("flights-1", 10, 20)]),
        (2, [("flights-1", 20, 30)]),
        (3, [("flights-0", 30, 40), ("flights-1", 30, 40)]),
    ], "the windows stay those of the plan"  # fmt: skip
    assert done.gaps == (Gap(topic="flights", partition=0, start_offset=10, end_offset=30),)
    report = replay_report(done, "there")
    assert report.document["gaps"] == [{"topic": "flights", "partition": 0, "start_offset": 10, "end_offset": 30}]
    assert report.facts["offsets_left_out"] == 20
    assert "Left out: removed by retention" in render_page(report, "replay", "now")


def test_retention_may_go_on_while_a_window_is_planned(cold_bucket: ColdBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    cold_bucket.add_topic("flights", [segments(20, 40)])
    sent = Sent(monkeypatch)

    def retention(window: int) -> None:
        sent.before = lambda _: None
        cold_bucket.extend("flights", 0, segments(40, 50)[1], drop_below=40)

    sent.before = retention
    done = sent.replay(cold_bucket, allow_gaps=True)
    assert sent.windows == [(0, []), (1, [])], "a window of which nothing is left is a batch of its own"
    assert done.gaps == (Gap(topic="flights", partition=0, start_offset=0, end_offset=40),)
    assert (done.records, done.offsets) == (0, 40)


def test_gaps_of_an_interrupted_run_are_reported_at_the_end(
    cold_bucket: ColdBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold_bucket.add_topic("flights", [segments(20, 40, 60)])
    sent = Sent(monkeypatch)

    def retention(window: int) -> None:
        if window == 0:
            cold_bucket.extend("flights", 0, segments(60, 70)[1], drop_below=20)
            sent.before = interrupted

    def interrupted(window: int) -> None:
        if window == 2:
            sent.before = lambda _: None
            raise Unavailable("away")

    sent.before = retention
    with pytest.raises(Unavailable):
        sent.replay(cold_bucket, tmp_path / "checkpoint", allow_gaps=True)
    done = sent.replay(cold_bucket, tmp_path / "checkpoint")
    assert (done.records, done.windows, done.was_resumed) == (20, 1, True)
    assert done.gaps == (Gap(topic="flights", partition=0, start_offset=0, end_offset=20),)


def test_a_history_that_was_set_back_is_no_gap(cold_bucket: ColdBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    cold_bucket.add_topic("flights", [segments(20, 40)])
    sent = Sent(monkeypatch)

    def cut(window: int) -> None:
        if window == 1:
            cold_bucket.cut("flights", 0, 20)
            sent.before = lambda _: None

    sent.before = cut
    with pytest.raises(Invalid, match=r"offsets 20\.\.40 are requested; the bucket holds 0\.\.20"):
        sent.replay(cold_bucket, allow_gaps=True)


def test_topics_with_the_names_of_the_checkpoints_members(opened: Bucket) -> None:
    position: Offsets = {"position": {"0": 5}, "gaps": {"0": 3}}
    log = Checkpoint(opened)
    log.begin(_planned(RANGES, TARGET, 100, 1))
    log.record(position)
    assert (Checkpoint(opened).position, Checkpoint(opened).gaps) == (position, [])
    gap = Gap(topic="gaps", partition=0, start_offset=3, end_offset=4)
    log.record(position, [gap])
    assert (Checkpoint(opened).position, Checkpoint(opened).gaps) == (position, [gap])


def test_what_is_left_of_a_window() -> None:
    held = {("t", "0"): OffsetRange(first=5, end=90), ("t", "1"): OffsetRange(first=50, end=90)}
    start, end = {"t": {"0": 2, "1": 2}}, {"t": {"0": 9, "1": 9}}
    gaps = [Gap(topic="t", partition=number, start_offset=2, end_offset=until) for number, until in ((0, 5), (1, 9))]
    assert readable(held, start, end) == ({"t": {0: 5}}, {"t": {0: 9}}, gaps)
    assert readable(held, {"t": {"1": 2}}, {"t": {"1": 9}}) == ({"t": {1: 50}}, {"t": {1: 50}}, gaps[1:])
    assert readable(held, {"t": {"0": 6}}, {"t": {"0": 9}}) == ({"t": {0: 6}}, {"t": {0: 9}}, [])
    after = Gap(topic="t", partition=0, start_offset=5, end_offset=7)
    assert joined([after, *gaps]) == [msgspec.structs.replace(after, start_offset=2), gaps[1]]
