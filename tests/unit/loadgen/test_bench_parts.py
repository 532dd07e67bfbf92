"""The parts of ``stratalog bench`` that need no cluster."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.errors import Invalid, Unavailable
from stratalog_loadgen.clients.connecting import source_of
from stratalog_loadgen.clients.due_batches import DueBatches
from stratalog_loadgen.clients.due_records import DueRecords
from stratalog_loadgen.clients.payloads import heads_of, payloads, stamped, stamps_of
from stratalog_loadgen.clients.whole_batches import LeaderQueue
from stratalog_loadgen.processes.control import Control
from stratalog_loadgen.processes.loads import Counted, Options, Payload, ProducerLoad
from stratalog_loadgen.results.gaps import Gaps
from stratalog_loadgen.results.histogram import Histogram, bucket_of, highest_of
from stratalog_loadgen.results.report import Pace, flat, print_result
from stratalog_loadgen.results.result import result, throughput
from stratalog_loadgen.runs.failover import gaps_of
from stratalog_loadgen.runs.java import java_properties
from stratalog_loadgen.runs.produce import producer_loads, split
from stratalog_loadgen.runs.readers import consumer_loads
from stratalog_loadgen.settings import (
    Readers,
    Topics,
    Traffic,
    Window,
    as_document,
    batch_records,
    in_flight,
    producer_options,
    whole_batch_options,
)
from stratalog_loadgen.topics import Prepared

_PLACE = Prepared("127.0.0.1:1", ["topic"], 6)


@given(st.integers(0, 2**40))
def test_a_bucket_is_less_than_a_hundredth_wider_than_its_values(value: int) -> None:
    highest = highest_of(bucket_of(value))
    assert value <= highest <= value * 1.01 + 1
    assert bucket_of(highest) == bucket_of(value)
    assert bucket_of(highest + 1) == bucket_of(value) + 1


@given(st.lists(st.integers(0, 10**9), min_size=1), st.sampled_from([50.0, 90.0, 99.0, 99.9, 100.0]))
def test_a_percentile_is_that_of_the_sorted_values(values: list[int], percent: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    exact = sorted(values)[max(0, -(-len(values) * percent // 100).__floor__() - 1)]
    assert exact <= histogram.percentile_us(percent) <= exact * 1.01 + 1


@given(st.lists(st.integers(-5, 10**9)), st.lists(st.integers(-5, 10**9)))
def test_histograms_of_two_processes_add_up(ours: list[int], theirs: list[int]) -> None:
    parts, whole = (Histogram(), Histogram()), Histogram()
    for part, values in zip(parts, (ours, theirs), strict=True):
        for value in values:
            part.record(value)
            whole.record(value)
    sent = Histogram(parts[1].buckets(), parts[1].maximum_us)
    parts[0].add(sent)
    assert (parts[0].buckets(), parts[0].maximum_us) == (whole.buckets(), whole.maximum_us)


@given(st.integers(-5000, 10**7), st.integers(0, 10**5), st.integers(0, 300), st.sampled_from([1, 8]))
def test_values_at_even_distances_are_counted_as_if_one_by_one(lowest: int, step: int, times: int, share: int) -> None:
    """In eighths and such, which floating point holds exactly."""
    evenly, singly, at_once = Histogram(), Histogram(), Histogram()
    values = [(lowest + number * step) / share for number in range(times)]
    evenly.record_evenly(lowest / share, step / share, len(values))
    for value in values:
        singly.record(value)
    at_once.record_all([int(value) for value in values])
    assert evenly.buckets() == singly.buckets() == at_once.buckets()
    assert evenly.maximum_us == singly.maximum_us == at_once.maximum_us


def test_an_empty_histogram_says_zero() -> None:
    assert set(Histogram().summary_ms().values()) == {0.0}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 10**9)), max_size=40))
def test_gaps_are_those_between_neighbours_of_one_partition(steps: list[tuple[int, int]]) -> None:
    gaps, now, moments = Gaps(), 0, dict[int, list[int]]()
    for partition, step in steps:
        now += step
        gaps.acknowledged("topic", partition, now)
        moments.setdefault(partition, []).append(now)
    found = {gap.partition: round(gap.longest_s * 1e9) for gap in gaps.longest()}
    assert found == {
        partition: max((later - earlier for earlier, later in pairwise(seen)), default=0) for partition, seen in moments.items()
    }


def test_gaps_that_ended_before_counting_began_are_forgotten() -> None:
    gaps = Gaps()
    for moment in (1, 9, 10):
        gaps.acknowledged("topic", 0, moment * 10**9)
    gaps.begin_anew()
    gaps.acknowledged("topic", 0, 12 * 10**9)
    (gap,) = gaps.longest()
    assert (gap.longest_s, gap.first_at) == (2.0, 1.0)


def test_what_began_behind_the_kill_is_no_gap() -> None:
    gaps = Gaps()
    for partition, moments in enumerate([(1, 2, 9), (2, 3, 8), (6, 7)]):
        for moment in moments:
            gaps.acknowledged("topic", partition, moment * 10**9)
    counts = [Counted(records=8, record_bytes=8, began_at=0.0, ended_at=9.0, gaps=gaps.longest())]
    found = gaps_of(counts, {("topic", 0), ("topic", 1)}, killed_at=5.0)
    assert (found["gap_median_s"], found["partitions_moved"], found["other_partitions_gap_max_s"]) == (6.0, 2, 1.0)
    with pytest.raises(Unavailable, match="1 of 2 partitions had acknowledged nothing"):
        gaps_of(counts, {("topic", 0), ("topic", 2)}, killed_at=5.0)


def test_payloads_are_random_to_the_wanted_share_and_repeatable() -> None:
    wanted = Payload(record_bytes=100, random_ratio=0.25, pool=7)
    pool = payloads(wanted, seed=1)
    assert pool == payloads(wanted, seed=1) != payloads(wanted, seed=2)
    assert (len(pool), {len(payload) for payload in pool}, {payload[25:] for payload in pool}) == (7, {100}, {bytes(75)})


def test_a_stamp_keeps_the_payload_as_long_as_it_was() -> None:
    payload = stamped(bytes(range(100)), 12345)
    assert (len(payload), stamps_of([payload, b"short"])) == (100, (12345,))
    assert stamps_of(heads_of([1, 2**60])) == (1, 2**60)


def test_a_payload_file_must_be_as_long_as_the_message(tmp_path: Path) -> None:
    file = tmp_path / "payload-10.data"
    file.write_bytes(b"0123456789")
    assert payloads(Payload(record_bytes=10, file=str(file)), 1) == [b"0123456789"]
    with pytest.raises(Invalid, match="10 bytes, but messageSize is 11"):
        payloads(Payload(record_bytes=11, file=str(file)), 1)
    with pytest.raises(Invalid, match="does not exist"):
        payloads(Payload(record_bytes=11, file=str(tmp_path / "none")), 1)


@given(st.integers(0, 10_000), st.integers(1, 100))
def test_shares_are_even(whole: int, parts: int) -> None:
    shares = split(whole, parts)
    assert (sum(shares), len(shares)) == (whole, parts)
    assert max(shares) - min(shares) <= 1


def test_producers_records_and_rate_are_shared_out() -> None:
    loads = producer_loads(_PLACE, Traffic(producers=5, processes=2), Window(), records=11, records_per_s=100)
    assert [(load.producers, load.records, load.records_per_s) for load in loads] == [(3, 6, 60.0), (2, 5, 40.0)]
    assert len({load.seed for load in loads}) == 2


def test_more_processes_than_producers_are_refused() -> None:
    with pytest.raises(Invalid, match="--processes is 3; maximum is the number of producers, 2"):
        producer_loads(_PLACE, Traffic(producers=2, processes=3), Window())
    with pytest.raises(Invalid, match="random ratio is 2"):
        producer_loads(_PLACE, Traffic(payload=Payload(random_ratio=2)), Window())


@pytest.mark.parametrize("processes", [0, 1, 2, 3, 5, 12])
def test_every_group_has_all_its_consumers(processes: int) -> None:
    members: dict[str, int] = {}
    for load in consumer_loads(_PLACE, Readers(groups=3, consumers=4, processes=processes)):
        for group in load.groups:
            members[group] = members.get(group, 0) + load.consumers
    assert sorted(members.values()) == [4, 4, 4]


def test_a_user_s_setting_of_the_client_wins() -> None:
    options = producer_options("127.0.0.1:1", Traffic(batch_records=1, client={"linger.ms": "0"}))
    assert (options["linger.ms"], options["batch.num.messages"], options["enable.idempotence"]) == ("0", 1, True)


def test_a_whole_batch_has_as_many_records_as_fit() -> None:
    assert batch_records(Traffic(batch_bytes=131_072)) == 129
    assert batch_records(Traffic(batch_bytes=131_072, payload=Payload(record_bytes=100_000))) == 1
    assert batch_records(Traffic(batch_bytes=1)) == batch_records(Traffic(batch_records=1)) == 1


def test_whole_batches_end_by_their_number_of_records_and_never_wait_for_bytes() -> None:
    options = whole_batch_options("127.0.0.1:1", Traffic(batch_bytes=1_000_000))
    assert options["batch.num.messages"] == batch_records(Traffic(batch_bytes=1_000_000)) == 988
    assert options["linger.ms"] == 60_000
    assert float(options["batch.size"]) > 1_000_000 < float(options["message.max.bytes"])


@pytest.mark.parametrize(("acks", "wanted", "most"), [("all", None, 5), ("all", 2, 2), ("all", 50, 5), ("1", 50, 20)])
def test_no_more_is_on_its_way_than_the_client_would_send(acks: Any, wanted: int | None, most: int) -> None:
    client: Options = {} if wanted is None else {"max.in.flight": wanted}
    assert in_flight(Traffic(acks=acks, client=client)) == most


@pytest.mark.parametrize("partitions", [1, 3, 12])
def test_one_batch_is_on_its_way_to_a_partition_and_a_few_to_a_broker(partitions: int) -> None:
    targets = [("topic", number) for number in range(partitions)]
    queue, taken = LeaderQueue(targets, room=5), []
    while queue.open:
        taken.append(queue.take())
    assert taken == targets[:5]
    queue.give_back(taken[0])
    assert queue.take() == (targets * 2)[min(5, partitions)]


def test_connections_come_from_several_addresses_of_the_loopback_interface() -> None:
    assert [source_of("127.0.0.1", number) for number in (0, 9_999, 10_000)] == [
        ("127.0.0.1", 0),
        ("127.0.0.1", 0),
        ("127.0.0.2", 0),
    ]
    assert source_of("broker.example", 1) is None


def test_rates_of_processes_add_up() -> None:
    counts = [
        Counted(records=1000, record_bytes=1_000_000, began_at=10.0, ended_at=12.0, cpu_s=1.0),
        Counted(records=3000, record_bytes=3_000_000, began_at=10.0, ended_at=12.0, cpu_s=1.0),
    ]
    measured = throughput(counts)
    assert (measured["records_per_s"], measured["megabytes_per_s"], measured["client_cpu_s_per_gb"]) == (2000, 2, 500)


def test_nothing_measured_is_an_error_with_the_reason() -> None:
    with pytest.raises(Unavailable, match="broker away"):
        throughput([Counted(records=0, record_bytes=0, began_at=0, ended_at=0, failure="broker away")])


def test_java_gets_batches_of_one_record_by_their_size() -> None:
    assert java_properties(Traffic(batch_records=1))["batch.size"] == 1
    assert java_properties(Traffic(batch_bytes=4096))["batch.size"] == 4096


def test_settings_are_shown_flat_without_what_is_unset() -> None:
    assert flat({"a": 1, "b": {"c": 2, "d": None}, "e": "", "f": False}) == [("a", 1), ("b.c", 2)]


def test_topics_are_told_apart_from_the_load() -> None:
    document = as_document(Topics(count=2, partitions=3), Traffic(producers=4))
    assert (document["topics"]["count"], document["topics"]["partitions"], document["producers"]) == (2, 3, 4)


@pytest.mark.parametrize(
    ("rate", "produced", "note"), [(1000.0, None, False), (900.0, None, True), (5000.0, 990.0, False), (5000.0, 500.0, True)]
)
def test_a_load_that_was_not_carried_is_told_beside_the_result(
    capsys: pytest.CaptureFixture[str], rate: float, produced: float | None, *, note: bool
) -> None:
    measured = {"records_per_s": rate} | ({"produced_records_per_s": produced} if produced else {})
    print_result(result("latency", {"wanted_records_per_s": 1000.0}, measured), as_json=True)
    told = capsys.readouterr()
    assert json.loads(told.out)["measured"] == measured
    assert ("of 1,000 records/s" in told.err) is note


def test_the_pace_is_that_of_the_last_second() -> None:
    pace, told = Pace(), []
    for count, now in ((0, 10.0), (50, 10.5), (200, 11.0), (1200, 12.0), (10, 12.5), (30, 13.5)):
        pace.note(count, now)
        told.append(pace.per_s)
    assert told == [0, 0, 200, 1000, 1000, 20]


def test_a_setting_of_zero_is_no_unset_one() -> None:
    assert flat({"linger_ms": 0.0, "warmup_s": 0}) == [("linger_ms", 0.0), ("warmup_s", 0)]


def _paced(records_per_s: float, linger_ms: float = 0.0) -> Counted:
    traffic = Traffic(linger_ms=linger_ms, client={"test.mock.num.brokers": 1})
    window = Window(warmup_s=0.1, duration_s=0.4)
    (load,) = producer_loads(Prepared("mock", ["bench"], 6), traffic, window, records_per_s=records_per_s, stamps=True)
    control = Control(BytesIO(), BytesIO())
    work = DueBatches(load, control)
    control.began = time.monotonic()
    return work.run()


@pytest.mark.parametrize(("records_per_s", "linger_ms"), [(500.0, 0.0), (20_000.0, 0.0), (20_000.0, 5.0)])
def test_every_record_that_was_due_after_the_warm_up_counts_however_slow_the_machine_is(
    records_per_s: float, linger_ms: float
) -> None:
    found = _paced(records_per_s, linger_ms)
    assert (found.failed, found.sent) == (0, round(records_per_s * 0.5))
    # One more or less at the border, by the rounding of moments.
    assert found.records == pytest.approx(records_per_s * 0.4, abs=1)
    assert sum(count for _, count in found.behind) == found.records
    assert 0 < Histogram(found.latency, found.latency_max_us).percentile_us(50) <= found.latency_max_us


_MOCKED: Options = {"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0, "linger.ms": 0}


def _one_by_one(load: ProducerLoad) -> Counted:
    control = Control(BytesIO(), BytesIO())
    work = DueRecords(load, control)
    control.began = time.monotonic()
    return work.run()


@pytest.mark.parametrize("keys", ["round-robin", "random"])
def test_records_with_keys_are_all_sent_and_count_from_their_moments(keys: Any) -> None:
    found = _one_by_one(
        ProducerLoad(
            client=_MOCKED, topics=["one", "two"], partitions=4, keys=keys, records_per_s=5000, warmup_s=0.1, duration_s=0.3
        )
    )
    assert (found.failed, found.sent, found.gaps) == (0, 2000, [])
    assert found.records == pytest.approx(1500, abs=1)
    assert sum(count for _, count in found.behind) == found.records


def test_partitions_take_turns_and_each_has_its_gap() -> None:
    load = ProducerLoad(
        client=_MOCKED,
        topics=["one", "two"],
        partitions=4,
        partition_step=3,
        records_per_s=400,
        duration_s=0.5,
        each_partition=True,
    )
    found = _one_by_one(load)
    assert (found.failed, found.sent, found.records) == (0, 200, 200)
    assert [(gap.topic, gap.partition) for gap in found.gaps] == [("one", 0), ("one", 3), ("two", 0), ("two", 3)]


def test_when_told_that_all_is_steady_a_load_counts_anew() -> None:
    incoming, outgoing = os.pipe()
    with os.fdopen(incoming, "rb") as commands, os.fdopen(outgoing, "wb", buffering=0) as other_side:
        reports = BytesIO()
        control = Control(commands, reports)
        other_side.write(b"go\n")
        control.wait_for_go()
        load = ProducerLoad(client=_MOCKED, topics=["one"], partitions=2, records_per_s=200, each_partition=True)
        work = DueRecords(msgspec.structs.replace(load, duration_s=3600), control)
        done = Thread(target=lambda: results.append(work.run()))
        results: list[Counted] = []
        done.start()
        _wait_until(lambda: b'"steady_partitions":2' in reports.getvalue())
        told = time.monotonic()
        other_side.write(b"measure\n")
        _wait_until(lambda: work.latency.count > 0 and work.measures_from_ns >= told * 1e9)
        other_side.write(b"stop\n")
        done.join()
    (found,) = results
    assert found.failed == 0
    assert 0 < found.records < found.sent
    assert all(gap.first_at < told for gap in found.gaps), "what was heard before is known"


def _wait_until(done: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
