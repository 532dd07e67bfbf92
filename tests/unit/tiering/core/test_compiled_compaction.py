"""The compiled compaction leaves byte for byte what plain Python leaves (``support/plain_compaction.py``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from support.plain_compaction import PlainFilter, PlainMap

from stratalog_core.batches.batch import CONTROL_BIT, TIMESTAMP_TYPE_BIT, TRANSACTIONAL_BIT, BatchHeader, read_header
from stratalog_core.batches.records import Record, build_batch
from stratalog_tiering.core.compaction import MapBuilder
from stratalog_tiering.core.offset_map import OffsetMap
from stratalog_tiering.format.footer import AbortedTransaction

EXPIRES = "expires"
NOW_MS = 1_000
RETENTION_MS = 100
KEYS = st.one_of(st.none(), st.sampled_from([b"", b"a", b"b", b"c" * 15, b"c" * 16, b"c" * 17]), st.binary(max_size=300))
VALUES = st.one_of(st.none(), st.binary(max_size=300))
HEADERS = st.lists(
    st.tuples(st.sampled_from([EXPIRES, "other"]), st.sampled_from([None, b"", b"500", b"1050", b"1200", b"soon"])), max_size=2
)
TIMES_MS = st.one_of(st.integers(0, 2_000), st.integers(-1, 2**41))
ROWS = st.lists(st.tuples(st.integers(1, 3), TIMES_MS, KEYS, VALUES, HEADERS), min_size=1, max_size=6)


@dataclass(slots=True)
class Log:
    """Batches in offset order, and the transactions among them that were aborted."""

    batches: list[bytes] = field(default_factory=list)
    aborted: list[AbortedTransaction] = field(default_factory=list)
    end: int = 0

    def headers(self) -> list[tuple[bytes, BatchHeader]]:
        return [(batch, read_header(batch)) for batch in self.batches]


@st.composite
def logs(draw: st.DrawFn) -> Log:
    log = Log()
    for rows in draw(st.lists(ROWS, min_size=1, max_size=8)):
        kind = draw(st.sampled_from(["plain", "plain", "committed", "aborted"]))
        attributes = draw(st.sampled_from([0, TIMESTAMP_TYPE_BIT])) | (TRANSACTIONAL_BIT if kind != "plain" else 0)
        producer = {"producer_id": 7, "producer_epoch": 1, "base_sequence": 3} if kind != "plain" else {}
        first, records = log.end, list[Record]()
        for step, time_ms, key, value, headers in rows:
            records.append(Record(offset=log.end, timestamp_ms=time_ms, key=key, value=value, headers=tuple(headers)))
            log.end += step
        codec = draw(st.integers(0, 4))
        log.batches.append(bytes(build_batch(records, compression=codec, attributes=attributes, **producer)))
        log.end = read_header(log.batches[-1]).next_offset
        if kind != "plain":
            marker = Record(offset=log.end, timestamp_ms=5, key=b"\x00\x00\x00" + bytes([kind == "committed"]), value=bytes(6))
            attributes = TRANSACTIONAL_BIT | CONTROL_BIT
            log.batches.append(bytes(build_batch([marker], attributes=attributes, producer_id=7, producer_epoch=1)))
            if kind == "aborted":
                log.aborted.append(
                    AbortedTransaction(producer_id=7, first_offset=first, last_offset=log.end, last_stable_offset=first)
                )
            log.end += 1
    return log


@given(logs(), st.integers(1, 12), st.integers(0, 10), st.sampled_from([b"", EXPIRES.encode()]))
def test_each_batch_becomes_what_it_becomes_in_plain_python(
    log: Log, keys_max: int, dirty_from: int, expiry_header: bytes
) -> None:
    for now_ms in (NOW_MS, NOW_MS + RETENTION_MS - 1, NOW_MS + RETENTION_MS, NOW_MS + 2 * RETENTION_MS):
        _compare(log, keys_max, min(dirty_from, log.end), now_ms, expiry_header)


def _compare(log: Log, keys_max: int, dirty_from: int, now_ms: int, expiry_header: bytes) -> None:
    """Compact the log in both ways; it is what they have left afterwards."""
    builder, plain = MapBuilder(OffsetMap(keys_max, b"secret"), dirty_from), PlainMap(keys_max, dirty_from)
    builder.transactions.add(log.aborted)
    plain.transactions.add(log.aborted)
    for batch, header in log.headers():
        goes_on = builder.add(batch, header)
        assert goes_on == plain.add(batch, header)
        if not goes_on:
            break
    assert (builder.end_offset, len(builder.offsets)) == (plain.end_offset, len(plain.newest))
    found, expected = (
        builder.filter(now_ms, RETENTION_MS, (), expiry_header),
        PlainFilter(plain, now_ms, RETENTION_MS, expiry_header),
    )
    found.begin_segment(log.aborted)
    expected.transactions.add(log.aborted)
    left = list[bytes]()
    for batch, header in log.headers():
        is_last = header.next_offset == log.end
        filtered, other = found.filter(batch, header, is_last=is_last), expected.filter(batch, header, is_last=is_last)
        assert (filtered.batch is None) == (other is None)
        if filtered.batch is not None and other is not None:
            assert bytes(filtered.batch) == bytes(other)
            assert filtered.fingerprint == found.fingerprint(other, read_header(other))
            assert (filtered.batch is batch) == (other is batch)
            left.append(bytes(other))
        else:
            assert filtered.fingerprint == 0
    assert found.counts == expected.counts
    log.batches = left
    log.aborted = list(found.take_aborted())
