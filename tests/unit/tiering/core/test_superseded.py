"""Superseded records go and nothing else, whatever a worker's compaction does before, between and after."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.hostile_batches import hostile_batch
from support.superseded import offset_set, superseded_offsets

from stratalog_core.batches.batch import CONTROL_BIT, TRANSACTIONAL_BIT, check_batch, read_header
from stratalog_core.batches.checkpoint import ProducerEntry, SequencedBatch
from stratalog_core.batches.records import Record, build_batch, iterate_records
from stratalog_tiering.core.compaction import BatchFilter, MapBuilder
from stratalog_tiering.core.offset_map import OffsetMap
from stratalog_tiering.core.superseded import CHUNK_OFFSETS, OffsetSet, SupersededFilter
from stratalog_tiering.format.footer import AbortedTransaction

SECRET = b"s" * 32
ABORT, COMMIT = b"\x00\x00\x00\x00", b"\x00\x00\x00\x01"
PRODUCER = 7


@dataclass(slots=True)
class Log:
    """One segment of a partition, and the truth: which records were committed."""

    batches: list[bytes] = field(default_factory=list)
    aborted: list[AbortedTransaction] = field(default_factory=list)
    end: int = 0
    committed: dict[int, tuple[bytes | None, bytes | None]] = field(default_factory=dict)

    def append(self, rows: list[tuple[bytes | None, bytes | None]], kind: str = "plain", codec: int = 0) -> None:
        first = self.end
        producer = {"producer_id": PRODUCER, "producer_epoch": 0, "attributes": TRANSACTIONAL_BIT} if kind != "plain" else {}
        records = [Record(offset=first + n, timestamp_ms=n, key=key, value=value) for n, (key, value) in enumerate(rows)]
        sequence = {"base_sequence": first} if producer else {}
        self.batches.append(bytes(build_batch(records, compression=codec, **producer, **sequence)))
        self.end += len(rows)
        if kind != "aborted":
            self.committed.update((each.offset, (each.key, each.value)) for each in records)
        if producer:
            marker = Record(offset=self.end, timestamp_ms=0, key=COMMIT if kind == "committed" else ABORT, value=bytes(6))
            control = {**producer, "attributes": TRANSACTIONAL_BIT | CONTROL_BIT}
            self.batches.append(bytes(build_batch([marker], **control)))
            if kind == "aborted":
                aborted = AbortedTransaction(
                    producer_id=PRODUCER, first_offset=first, last_offset=self.end, last_stable_offset=self.end + 1
                )
                self.aborted.append(aborted)
            self.end += 1

    def newest(self) -> dict[bytes, int]:
        return {key: offset for offset, (key, _) in sorted(self.committed.items()) if key is not None}

    def present(self) -> dict[int, Record]:
        found: dict[int, Record] = {}
        for batch in self.batches:
            if not read_header(batch).is_control:
                found.update((each.offset, each) for each in iterate_records(batch))
        return found

    def remove(self, superseded: OffsetSet, producers: tuple[ProducerEntry, ...] = ()) -> SupersededFilter:
        rules = SupersededFilter(superseded, producers, SECRET)
        rules.begin_segment(self.aborted)
        left, expected, found = list[bytes](), 0, 0
        for batch in self.batches:
            header = read_header(batch)
            filtered = rules.filter(batch, header, is_last=header.next_offset == self.end)
            expected += filtered.fingerprint
            if filtered.batch is not None:
                found += rules.fingerprint(filtered.batch, check_batch(filtered.batch))
                left.append(bytes(filtered.batch))
        assert found == expected
        self.batches = left
        return rules

    def start_pass(self) -> BatchFilter:
        builder = MapBuilder(OffsetMap(1000, SECRET), 0)
        builder.transactions.add(self.aborted)
        assert all(builder.add(batch, read_header(batch)) for batch in self.batches)
        # Whatever was kept as a tombstone once goes in the next pass.
        return builder.filter(2**40, 0)

    def rewrite(self, rules: BatchFilter) -> None:
        rules.begin_segment(self.aborted)
        filtered = [
            rules.filter(each, read_header(each), is_last=read_header(each).next_offset == self.end) for each in self.batches
        ]
        self.batches = [bytes(each.batch) for each in filtered if each.batch is not None]


keys = st.sampled_from([b"", b"a", b"b", b"c", b"d"])
rows = st.lists(
    st.tuples(st.one_of(st.none(), keys), st.one_of(st.none(), st.just(b""), st.binary(max_size=20))), min_size=1, max_size=5
)
appends = st.lists(
    st.tuples(rows, st.sampled_from(["plain", "plain", "committed", "aborted"]), st.sampled_from([0, 4])), max_size=12
)


def log_of(appended: list[tuple[list[tuple[bytes | None, bytes | None]], str, int]]) -> Log:
    log = Log()
    for content, kind, codec in appended:
        log.append(content, kind, codec)
    return log


@given(appends)
def test_exactly_the_superseded_records_go(appended: list[tuple[list[tuple[bytes | None, bytes | None]], str, int]]) -> None:
    log = log_of(appended)
    before, newest = log.present(), log.newest()
    keyed = {offset for offset, (key, _) in log.committed.items() if key is not None}
    gone = keyed - set(newest.values())
    assert superseded_offsets(log.batches, log.aborted) == gone
    controls = [each for each in log.batches if read_header(each).is_control]
    rules = log.remove(offset_set(gone))
    assert rules.records_removed == len(gone)
    assert log.present() == {offset: each for offset, each in before.items() if offset not in gone}
    assert [each for each in log.batches if read_header(each).is_control] == controls
    if log.batches:
        assert read_header(log.batches[-1]).next_offset == log.end
    batches = log.batches
    assert superseded_offsets(log.batches, log.aborted) == set()
    assert log.remove(offset_set(gone)).records_removed == 0
    assert log.batches == batches, "a second removal finds nothing"


@given(appends, st.lists(st.sampled_from(["find", "remove", "map", "rewrite"]), max_size=12))
def test_the_newest_value_of_each_key_stays_in_any_order_of_removals_and_passes(
    appended: list[tuple[list[tuple[bytes | None, bytes | None]], str, int]], steps: list[str]
) -> None:
    """What a job has found, and the map of a pass, may be as old as they like."""
    log = log_of(appended)
    found, worker_map = OffsetSet(), log.start_pass()
    for step in steps:
        if step == "find":
            found = offset_set(superseded_offsets(log.batches, log.aborted))
        elif step == "remove":
            log.remove(found)
        elif step == "map":
            worker_map = log.start_pass()
        else:
            # The filter of a pass reads each batch once.
            log.rewrite(worker_map.trial())
        present = log.present()
        table = {each.key: each.value for offset, each in sorted(present.items()) if offset in log.committed}
        for key, offset in log.newest().items():
            value = log.committed[offset][1]
            if value is not None:
                assert offset in present
                assert table[key] == value
            elif offset not in present:
                assert key not in table, "the tombstone is gone, and an older record is not"


def test_an_aborted_record_stays_even_if_it_is_named() -> None:
    log = Log()
    log.append([(b"a", b"1")], "aborted")
    log.append([(b"a", b"2")], "committed")
    before = list(log.batches)
    rules = log.remove(offset_set([0]))
    assert (rules.records_removed, log.batches) == (0, before)
    assert rules.take_aborted() == log.aborted


def test_batches_without_records_stay_where_something_needs_them() -> None:
    log = Log()
    log.append([(b"a", b"1")])
    log.append([(b"a", b"2")], "committed")
    producer = {"producer_id": 9, "producer_epoch": 0, "base_sequence": 5}
    log.batches.append(bytes(build_batch([Record(offset=3, timestamp_ms=0, key=b"a", value=b"3")], **producer)))
    log.batches.append(bytes(build_batch([Record(offset=4, timestamp_ms=0, key=b"a", value=b"4")])))
    log.end = 5
    last = SequencedBatch(5, 5, 3, 0)
    log.remove(offset_set([0, 1, 3, 4]), (ProducerEntry(9, 0, (last,), -1),))
    left = [(header.base_offset, header.record_count, header.base_sequence) for header in map(read_header, log.batches)]
    assert left == [(1, 0, 1), (2, 1, -1), (3, 0, 5), (4, 0, -1)]


def test_unreadable_batches_stay_and_are_counted() -> None:
    log = Log(end=2)
    log.batches = [hostile_batch("a value beyond its record", 0, base_offset=1)]
    before = list(log.batches)
    rules = log.remove(offset_set([1]))
    assert (log.batches, rules.batches_unreadable, rules.records_removed) == (before, 1, 0)


@given(st.sets(st.integers(0, 4 * CHUNK_OFFSETS)), st.integers(0, 4 * CHUNK_OFFSETS), st.integers(0, 4 * CHUNK_OFFSETS))
def test_an_offset_set_is_a_set(offsets: set[int], first: int, end: int) -> None:
    found = offset_set(offsets)
    asked = sorted({*offsets, first, end, CHUNK_OFFSETS})
    assert found.has(np.array(asked, np.int64)).tolist() == [each in offsets for each in asked]
    within = [each for each in sorted(offsets) if first <= each < end]
    assert found.count(first, end) == len(within)
    assert found.first_from(first, end) == (within[0] if within else None)
