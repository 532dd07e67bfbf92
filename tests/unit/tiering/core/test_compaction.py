"""Compaction keeps what Kafka's cleaner keeps: it is compared with a plain model over random keys, times and map sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile_batches import CODECS, KINDS, hostile_batch

from stratalog_core.batches.batch import (
    CONTROL_BIT,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
    check_batch,
    read_header,
)
from stratalog_core.batches.checkpoint import ProducerEntry, SequencedBatch
from stratalog_core.batches.records import Record, build_batch, iterate_records
from stratalog_core.compiled.jit import Bools
from stratalog_tiering.core.compaction import BatchFilter, MapBuilder, MappedRecords, TransactionFilter
from stratalog_tiering.core.offset_map import OffsetMap
from stratalog_tiering.format.footer import AbortedTransaction

SECRET = b"s" * 32
ABORT, COMMIT = b"\x00\x00\x00\x00", b"\x00\x00\x00\x01"


@dataclass(slots=True)
class Log:
    """A partition as its batches, compacted as the worker does: a map as far as it reaches, then every batch up to its end."""

    batches: list[bytes] = field(default_factory=list)
    aborted: list[AbortedTransaction] = field(default_factory=list)
    dirty_from: int = 0
    end: int = 0

    def append(self, rows: list[tuple[bytes | None, bytes | None]], now_ms: int, *, codec: int = 0, **options: int) -> None:
        records = [
            Record(offset=self.end + index, timestamp_ms=now_ms + index, key=key, value=value)
            for index, (key, value) in enumerate(rows)
        ]
        self.batches.append(bytes(build_batch(records, compression=codec, **options)))
        self.end += len(rows)

    def compact(
        self,
        now_ms: int,
        retention_ms: int = 100,
        keys_max: int = 1000,
        producers: tuple[ProducerEntry, ...] = (),
        expiry_header: bytes = b"",
    ) -> BatchFilter:
        builder = MapBuilder(OffsetMap(keys_max, SECRET), self.dirty_from)
        builder.transactions.add(self.aborted)
        for batch in self.batches:
            if not builder.add(batch, read_header(batch)):
                break
        found = BatchFilter(builder.offsets, builder.end_offset, now_ms, retention_ms, producers, expiry_header)
        found.transactions.add(self.aborted)
        kept: list[bytes] = []
        for batch in self.batches:
            header = read_header(batch)
            filtered = found.filter(batch, header, is_last=header.next_offset == self.end)
            if filtered.batch is not None:
                after = check_batch(filtered.batch)
                assert filtered.fingerprint == found.fingerprint(filtered.batch, after)
                assert places(after) == places(header)
                kept.append(bytes(filtered.batch))
            else:
                assert filtered.fingerprint == 0
        self.batches, self.dirty_from = kept, builder.end_offset
        return found

    def records(self) -> list[Record]:
        return [record for batch in self.batches for record in iterate_records(batch)]

    def offsets(self) -> list[int]:
        return [record.offset for record in self.records()]


def places(header: BatchHeader) -> tuple[int, ...]:
    """The properties that compaction never changes."""
    return (
        header.base_offset, header.last_offset, header.leader_epoch, header.producer_id, header.producer_epoch,
        header.base_sequence, header.last_sequence, header.is_transactional, header.is_control, header.is_log_append_time,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kept:
    """A record of the model. ``batch`` is the base offset of its batch."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    batch: int


@dataclass(slots=True)
class Model:
    """Kafka's rules for one record after the other."""

    records: list[Kept] = field(default_factory=list)
    horizons: dict[int, int] = field(default_factory=dict)
    dirty_from: int = 0

    def compact(self, now_ms: int, retention_ms: int, keys_max: int, end: int) -> None:
        newest: dict[bytes, int] = {}
        map_end = end
        for each in self.records:
            if each.offset >= self.dirty_from and each.key is not None:
                if each.key not in newest and len(newest) == keys_max:
                    map_end = each.offset
                    break
                newest[each.key] = each.offset
        self.records = [each for each in self.records if self._stays(each, newest, map_end, now_ms)]
        for each in self.records:
            if each.value is None and each.batch < map_end:
                self.horizons.setdefault(each.batch, now_ms + retention_ms)
        self.dirty_from = map_end

    def _stays(self, each: Kept, newest: dict[bytes, int], map_end: int, now_ms: int) -> bool:
        if each.offset >= map_end:
            return True
        if each.key is None or newest.get(each.key, each.offset) > each.offset:
            return False
        return each.value is not None or now_ms < self.horizons.get(each.batch, now_ms + 1)


KEYS = st.one_of(
    st.none(), st.sampled_from([b"", b"a", b"b", b"a much longer key, which is hashed", b"another of the long keys"])
)
ROWS = st.lists(st.tuples(KEYS, st.one_of(st.none(), st.binary(max_size=8))), min_size=1, max_size=6)
STEPS = st.lists(st.one_of(st.tuples(ROWS, st.integers(0, 4)), st.integers(1, 6)), min_size=1, max_size=25)


@given(steps=STEPS, is_log_append_time=st.booleans())
def test_what_stays_is_what_kafka_keeps(
    steps: list[tuple[list[tuple[bytes | None, bytes | None]], int] | int], *, is_log_append_time: bool
) -> None:
    log, model, now_ms = Log(), Model(), 1_000
    for step in steps:
        now_ms += 40
        if isinstance(step, int):
            log.compact(now_ms, 100, step)
            model.compact(now_ms, 100, step, log.end)
            assert log.dirty_from == model.dirty_from
        else:
            rows, codec = step
            log.append(rows, now_ms, codec=codec, attributes=TIMESTAMP_TYPE_BIT if is_log_append_time else 0)
            appended = iterate_records(log.batches[-1])
            base = log.end - len(rows)
            model.records += [Kept(each.offset, each.timestamp_ms, each.key, each.value, base) for each in appended]
        found = [(each.offset, each.timestamp_ms, each.key, each.value) for each in log.records()]
        assert found == [(each.offset, each.timestamp_ms, each.key, each.value) for each in model.records]


@given(steps=STEPS)
def test_the_newest_value_of_each_key_survives(steps: list[tuple[list[tuple[bytes | None, bytes | None]], int] | int]) -> None:
    log, newest, now_ms = Log(), dict[bytes, bytes | None](), 0
    for step in steps:
        now_ms += 40
        if isinstance(step, int):
            log.compact(now_ms, 100, step)
        else:
            log.append(step[0], now_ms, codec=step[1])
            newest.update((key, value) for key, value in step[0] if key is not None)
    found = {record.key: record.value for record in log.records() if record.key is not None}
    assert {key: value for key, value in newest.items() if value is not None} == {
        key: value for key, value in found.items() if value is not None
    }


def test_a_tombstone_stays_for_its_time_after_it_was_first_compacted() -> None:
    log = Log()
    log.append([(b"k", b"v"), (b"l", b"v")], 0)
    log.append([(b"k", None), (b"m", b"v")], 10)
    log.append([(b"n", b"v")], 20)
    log.compact(1_000)
    assert log.offsets() == [1, 2, 3, 4]
    horizon = read_header(log.batches[1])
    assert (horizon.delete_horizon_ms, horizon.base_timestamp_ms, horizon.max_timestamp_ms) == (1_100, 1_100, 11)
    assert [record.timestamp_ms for record in log.records()] == [1, 10, 11, 20]
    log.compact(1_099)
    assert 2 in log.offsets()
    counts = log.compact(1_100).counts
    assert (log.offsets(), counts.tombstones_deleted) == ([1, 3, 4], 1)
    assert read_header(log.batches[1]).delete_horizon_ms == 1_100, "Kafka keeps it, too"


def test_the_longest_time_for_tombstones_keeps_them_for_good() -> None:
    """`delete.retention.ms` may be as large as 64 bits allow, and the horizon is later than that."""
    log = Log()
    log.append([(b"k", None), (b"m", b"v")], 10)
    log.append([(b"n", b"v")], 20)
    log.compact(1_000, retention_ms=2**63 - 1)
    assert [record.timestamp_ms for record in log.records()] == [10, 11, 20]
    log.compact(2_000, retention_ms=2**63 - 1)
    assert log.offsets() == [0, 1, 2]


@pytest.mark.parametrize("is_opted_in", [True, False])
def test_an_expired_record_is_a_tombstone_from_then_on(is_opted_in: bool) -> None:
    log, name = Log(), b"expires" if is_opted_in else b""
    log.append([(b"a", b"old")], now_ms=0)
    record = Record(offset=1, timestamp_ms=0, key=b"a", value=b"lease", headers=(("expires", b"1000"),))
    log.batches.append(bytes(build_batch([record])))
    log.end = 2
    log.append([(b"z", b"1")], now_ms=0)
    log.compact(999, expiry_header=name)
    assert [each.value for each in log.records()] == [b"lease", b"1"]
    log.compact(1_000, expiry_header=name)
    log.compact(1_099, expiry_header=name)
    assert [(each.value, each.timestamp_ms) for each in log.records()] == [(b"lease", 0), (b"1", 0)], "it stays for its horizon"
    found = log.compact(1_100, expiry_header=name)
    assert [each.value for each in log.records()] == ([b"1"] if is_opted_in else [b"lease", b"1"])
    assert found.counts.tombstones_deleted == int(is_opted_in)


def test_a_batch_whose_records_all_stay_is_not_changed() -> None:
    log = Log()
    log.append([(b"k", b"v"), (b"l", b"v")], 0, codec=4)
    before = list(log.batches)
    log.compact(1_000)
    assert log.batches == before


def test_the_last_batch_stays_without_its_records() -> None:
    log = Log()
    log.append([(None, b"v"), (None, b"w")], 5, codec=1)
    log.compact(1_000)
    (batch,) = log.batches
    header = check_batch(batch)
    assert (header.record_count, header.last_offset, header.compression, header.max_timestamp_ms) == (0, 1, 0, 6)
    log.append([(b"k", b"v")], 6)
    log.compact(1_000)
    assert [read_header(batch).base_offset for batch in log.batches] == [2], "it is not the last one any more"


def test_the_last_batch_of_a_known_producer_stays() -> None:
    log = Log()
    log.append([(b"k", b"1")], 0, producer_id=7, producer_epoch=2, base_sequence=0)
    log.append([(b"k", b"2")], 0, producer_id=7, producer_epoch=2, base_sequence=1)
    log.append([(b"k", b"3")], 0)
    known = ProducerEntry(7, 2, (SequencedBatch(1, 1, 1, 5),), -1)
    log.compact(1_000, producers=(known,))
    assert log.offsets() == [2]
    assert [(read_header(each).base_sequence, read_header(each).record_count) for each in log.batches] == [(1, 0), (-1, 1)]
    log.compact(1_000)
    assert len(log.batches) == 1, "nobody knows the producer any more"


def aborted(producer: int, first: int, last: int) -> AbortedTransaction:
    return AbortedTransaction(producer_id=producer, first_offset=first, last_offset=last, last_stable_offset=first)


def transaction(log: Log, producer: int, rows: list[tuple[bytes | None, bytes | None]], marker: bytes) -> None:
    first = log.end
    log.append(rows, 0, producer_id=producer, producer_epoch=0, base_sequence=0, attributes=TRANSACTIONAL_BIT)
    log.append([(marker, b"\x00" * 6)], 0, producer_id=producer, producer_epoch=0, attributes=TRANSACTIONAL_BIT | CONTROL_BIT)
    if marker == ABORT:
        log.aborted.append(aborted(producer, first, log.end - 1))


def test_an_aborted_record_neither_stays_nor_hides_an_older_one() -> None:
    log = Log()
    log.append([(b"k", b"1")], 0)
    transaction(log, 7, [(b"k", b"2")], ABORT)
    log.append([(b"z", b"")], 0)
    log.compact(1_000)
    assert log.offsets() == [0, 2, 3], "the marker stays while a reader may have read the transaction"
    log.aborted.clear()
    log.compact(1_010)
    marker = read_header(log.batches[1])
    assert (marker.is_control, marker.delete_horizon_ms) == (True, 1_110)
    log.compact(1_109)
    assert log.offsets() == [0, 2, 3]
    log.compact(1_110)
    assert log.offsets() == [0, 3]


def test_a_commit_marker_stays_until_the_records_of_its_transaction_are_gone() -> None:
    log = Log()
    transaction(log, 7, [(b"k", b"1"), (b"l", b"1")], COMMIT)
    log.append([(b"k", b"2")], 0)
    for now_ms in (1_000, 2_000, 3_000):
        log.compact(now_ms)
        assert log.offsets() == [1, 2, 3]
    log.append([(b"l", b"2")], 0)
    log.compact(4_000)
    assert log.offsets() == [2, 3, 4]
    log.compact(4_050)
    log.compact(4_200)
    assert log.offsets() == [3, 4]


def test_a_marker_that_is_empty_already_is_not_changed_again() -> None:
    """Else a segment that ends with it would be written again by each pass."""
    log = Log()
    transaction(log, 7, [(b"k", b"v")], ABORT)
    for now_ms in (1_000, 2_000, 3_000, 4_000):
        log.compact(now_ms)
        log.aborted.clear()
    (marker,) = log.batches
    assert read_header(marker).record_count == 0
    found = BatchFilter(OffsetMap(10, SECRET), log.end, 5_000, 100)
    assert found.filter(marker, read_header(marker), is_last=True).batch is marker


def test_transactions_of_one_producer_are_told_apart() -> None:
    log = Log()
    transaction(log, 7, [(b"a", b"1")], ABORT)
    transaction(log, 7, [(b"a", b"2")], COMMIT)
    transaction(log, 7, [(b"a", b"3")], ABORT)
    log.aborted += log.aborted  # every segment that one overlaps lists it
    log.compact(1_000)
    assert log.offsets() == [1, 2, 3, 5]


def test_a_segment_lists_the_transactions_whose_records_it_lost() -> None:
    log = Log()
    transaction(log, 7, [(b"a", b"1")], ABORT)
    transaction(log, 8, [(b"a", b"2")], ABORT)
    found = log.compact(1_000).transactions
    assert (found.take_removed(), found.take_removed()) == (log.aborted, [])
    assert log.compact(1_000).transactions.take_removed() == []


def test_a_listed_transaction_that_ended_before_is_skipped() -> None:
    found = TransactionFilter()
    found.add([aborted(7, 0, 3)])
    batch = build_batch(
        [Record(offset=9, timestamp_ms=0, key=b"", value=b"")], producer_id=7, producer_epoch=0, base_sequence=0,
        attributes=TRANSACTIONAL_BIT,
    )  # fmt: skip
    assert not found.is_aborted(read_header(batch))


def test_the_map_is_bounded_and_the_next_pass_continues() -> None:
    log = Log()
    log.append([(b"%d" % (index % 10), b"%d" % index) for index in range(40)], 0)
    log.append([(b"end", b"")], 0)
    passes = 0
    while log.dirty_from < log.end:
        log.compact(1_000, keys_max=3)
        passes += 1
    assert passes == 14
    assert log.offsets() == [*range(30, 41)]


@pytest.mark.parametrize("wrong", ["dropped", "tombstone"])
def test_the_fingerprint_tells_that_a_record_is_missing(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    log.append([(b"k", b"1"), (b"l", None)], 0)
    lost = 0 if wrong == "dropped" else 1
    keeps = BatchFilter._keeps

    def loses(self: BatchFilter, header: BatchHeader, records: MappedRecords) -> Bools:
        kept = keeps(self, header, records)
        kept[records.offsets == header.base_offset + lost] = False
        return kept

    monkeypatch.setattr(BatchFilter, "_keeps", loses)
    with pytest.raises(AssertionError):
        log.compact(1_000)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_cannot_be_read_stays_and_the_others_are_compacted(kind: str, codec: int) -> None:
    log = Log()
    log.append([(b"a", b"1"), (b"b", b"1")], 10)
    hostile = hostile_batch(kind, codec, base_offset=2)
    header = read_header(hostile)
    log.batches.append(hostile)
    log.end = header.next_offset
    log.append([(b"a", b"2")], 20)
    for _ in range(2):  # a map of a later pass begins after it
        counts = log.compact(now_ms=100).counts
        assert (counts.batches_unreadable, counts.first_unreadable[:10]) == (1, "offset 2: ")
        kept = [[each.key for each in iterate_records(batch)] for batch in log.batches if batch != hostile]
        assert kept == [[b"b"], [b"a"]]
        assert log.batches[1] == hostile
        assert counts.records_read - counts.records_kept in (0, 1)
        log.append([(b"c", b"1")], 30)
        log.compact(now_ms=100)
        log.batches.pop()


def test_a_tombstone_after_a_batch_that_cannot_be_read_stays() -> None:
    """The batch may hold an older record of its key, which would come back. It was written before the topic was compacted."""
    log = Log()
    hostile = hostile_batch("more records than are located", 0)
    log.batches.append(hostile)
    log.end = read_header(hostile).next_offset
    log.append([(b"key", None)], 10)
    log.append([(b"z", b"1")], 20)
    for now_ms in (1_000, 1_100, 2_000):
        log.compact(now_ms)
    assert [[each.key for each in iterate_records(batch)] for batch in log.batches[1:]] == [[b"key"], [b"z"]]


def test_another_batch_in_the_place_of_one_that_cannot_be_read_is_noticed() -> None:
    """It has no records by which they could be compared."""
    first, second = (hostile_batch(kind, 0) for kind in KINDS[:2])
    fingerprints = {
        BatchFilter(OffsetMap(10, SECRET), 0, 0, 0).fingerprint(batch, read_header(batch)) for batch in (first, second)
    }
    assert len(fingerprints) == 2
