"""Searches inside a batch: they find what reading all records finds, in memory that does not depend on what they unpack."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile_batches import CODECS, KINDS, hostile_batch

from stratalog_core.batches.batch import HEADER, HEADER_BYTES, LENGTH_PREFIX_BYTES, MAGIC, TIMESTAMP_TYPE_BIT, read_header
from stratalog_core.batches.compression import LZ4, NAMES, NONE, SNAPPY, ZSTD, compress
from stratalog_core.batches.record_search import (
    FoundInBatch,
    RecordRules,
    _RuleSearch,
    first_reaching,
    first_refused,
    search_bytes,
)
from stratalog_core.batches.record_spans import record_spans
from stratalog_core.batches.records import Record, build_batch, encode_varint, iterate_records
from stratalog_core.errors import Corrupt, Overloaded, Unavailable
from stratalog_core.search_pool import SearchPool
from stratalog_core.system import ThreadBackground

MIB = 1024 * 1024
records = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 200), st.binary(max_size=300)), min_size=1, max_size=40).map(
    lambda rows: [
        Record(offset=sum(row[0] for row in rows[: number + 1]), timestamp_ms=row[1], key=None, value=row[2])
        for number, row in enumerate(rows)
    ]
)


@settings(deadline=None)
@given(records, st.sampled_from(tuple(NAMES.values())), st.booleans(), st.integers(0, 201), st.integers(0, 130))
def test_a_search_finds_what_reading_everything_finds(
    written: list[Record], codec: int, is_append_time: bool, timestamp_ms: int, from_offset: int
) -> None:
    batch = build_batch(written, compression=codec, attributes=TIMESTAMP_TYPE_BIT if is_append_time else 0)
    expected = next(
        (
            FoundInBatch(record.offset, record.timestamp_ms)
            for record in iterate_records(batch)
            if record.timestamp_ms >= timestamp_ms and record.offset >= from_offset
        ),
        None,
    )
    assert first_reaching(batch, read_header(batch), timestamp_ms, from_offset) == expected


def bomb(codec: int, records_count: int, value_bytes: int = 0) -> bytes:
    """A batch of records that all are old, but say that one is not."""
    first = build_batch([Record(offset=0, timestamp_ms=0, key=None, value=bytes(value_bytes))])[HEADER_BYTES:]
    packed = compress(codec, bytes(first) * records_count)
    size = HEADER_BYTES + len(packed)
    head = bytearray(HEADER_BYTES)
    HEADER.pack_into(
        head, 0, 0, size - LENGTH_PREFIX_BYTES, 0, MAGIC, 0, codec, records_count, 0, 1_000, -1, -1, -1, records_count
    )
    return bytes(head) + packed


@pytest.mark.parametrize("codec", [codec for codec in NAMES.values() if codec not in (NONE, SNAPPY)])
def test_memory_of_a_search_does_not_depend_on_what_it_unpacks(codec: int) -> None:
    """One record of 64 MB, after which the next one is found to break the order: all of it has been read."""
    batch = bomb(codec, 2, 64 * MIB - 1000)
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match="is not above"):
            first_reaching(batch, read_header(batch), 1_000, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= search_bytes(batch, read_header(batch)) + MIB < 12 * MIB


def test_a_header_that_claims_more_than_it_can_hold_is_not_believed() -> None:
    claimed = b"\xff\xff\xff\xff\x07" + bytes(100)
    head = bytearray(HEADER_BYTES)
    HEADER.pack_into(head, 0, 0, HEADER_BYTES - 12 + len(claimed), 0, MAGIC, 0, SNAPPY, 1, 0, 0, -1, -1, -1, 1)
    with pytest.raises(Corrupt):
        first_reaching(bytes(head) + claimed, read_header(head), 0, 0)


LARGE = [Record(offset=number, timestamp_ms=0, key=None, value=bytes(3 * MIB)) for number in range(2)]


def test_what_needs_more_than_there_is_may_expand_to_no_more() -> None:
    batch = build_batch(LARGE, compression=LZ4)
    header = read_header(batch)
    assert first_reaching(batch, header, 0, 1) == FoundInBatch(1, 0)
    assert first_reaching(batch, header, 0, 0, memory_bytes=300_000) == FoundInBatch(0, 0), "its head comes first"
    with pytest.raises(Corrupt, match="limit of 300000"):
        first_reaching(batch, header, 0, 1, memory_bytes=300_000)


def test_a_search_that_nobody_waits_for_ends_at_its_next_piece() -> None:
    batch = build_batch(LARGE, compression=ZSTD)
    asked = []

    def is_wanted() -> bool:
        asked.append(1)
        return len(asked) < 3

    with pytest.raises(Unavailable):
        first_reaching(batch, read_header(batch), 5, 0, is_wanted=is_wanted)
    assert len(asked) == 3


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(tuple(NAMES.values())), st.binary(max_size=200), st.integers(1, 50))
def test_arbitrary_bytes_find_nothing_worse_than_corrupt(codec: int, noise: bytes, count: int) -> None:
    head = bytearray(HEADER_BYTES)
    HEADER.pack_into(head, 0, 0, HEADER_BYTES - 12 + len(noise), 0, MAGIC, 0, codec, 100, 0, 9, -1, -1, -1, count)
    with contextlib.suppress(Corrupt):
        first_reaching(bytes(head) + noise, read_header(head), 9, 0)


HEADERS = st.lists(st.tuples(st.text(max_size=4), st.none() | st.binary(max_size=70)), max_size=4).map(tuple)
FIELDS = st.tuples(st.none() | st.binary(max_size=70), st.none() | st.binary(max_size=200), HEADERS)


def is_sound(body: bytes, count: int, pieces_bytes: int) -> bool:
    """Whether a search by rules accepts a body that comes in pieces."""
    batch = bytes(HEADER_BYTES) + body
    head = bytearray(HEADER_BYTES)
    HEADER.pack_into(head, 0, 0, len(batch) - LENGTH_PREFIX_BYTES, 0, MAGIC, 0, 0, count - 1, 0, 0, -1, -1, -1, count)
    search = _RuleSearch(read_header(head), RecordRules(needs_key=False))
    try:
        for at in range(0, len(body), pieces_bytes):
            search.read(body[at : at + pieces_bytes])
            search.is_over()
        search.end()
    except Corrupt:
        return False
    return True


@settings(deadline=None, max_examples=300)
@given(st.lists(FIELDS, min_size=1, max_size=5), st.integers(1, 300), st.integers(0), st.integers(0, 255))
def test_what_a_search_by_rules_accepts_can_be_read(rows: list[Any], pieces_bytes: int, place: int, byte: int) -> None:
    written = [
        Record(offset=at, timestamp_ms=0, key=key, value=value, headers=headers)
        for at, (key, value, headers) in enumerate(rows)
    ]
    batch = build_batch(written)
    assert is_sound(bytes(batch[HEADER_BYTES:]), len(rows), pieces_bytes)
    batch[HEADER_BYTES + place % (len(batch) - HEADER_BYTES)] = byte
    body = bytes(batch[HEADER_BYTES:])
    accepted = is_sound(body, len(rows), pieces_bytes)
    assert accepted is is_sound(body, len(rows), len(body)), "the size of the pieces does not matter"
    if accepted:
        assert len(list(iterate_records(batch))) == len(rows)
        assert len(record_spans(body, read_header(batch))) == len(rows)


def record_of(*parts: bytes) -> bytes:
    content = b"".join((bytes(3), *parts))
    return encode_varint(len(content)) + content


KEY, VALUE, NO_HEADERS = b"\x02k", b"\x02v", b"\x00"


@pytest.mark.parametrize("pieces_bytes", [1, 5, 1000])
@pytest.mark.parametrize(
    ("parts", "is_accepted"),
    [
        ((KEY, VALUE, NO_HEADERS), True),
        ((b"\x01", b"\x01", NO_HEADERS), True),
        ((KEY, encode_varint(100) + bytes(100), NO_HEADERS), True),
        ((KEY, encode_varint(9000) + bytes(9000), NO_HEADERS), True),
        ((KEY, VALUE, b"\x02", KEY, VALUE), True),
        ((KEY, VALUE, b"\x04", KEY, b"\x01", b"\x00", VALUE), True),
        ((KEY, VALUE), False),
        ((KEY, encode_varint(0) + b"v", NO_HEADERS), False),
        ((KEY, encode_varint(100) + bytes(99), NO_HEADERS), False),
        ((KEY, encode_varint(100) + bytes(101), NO_HEADERS), False),
        ((KEY, VALUE, encode_varint(100)), False),
        ((KEY, VALUE, encode_varint(-1)), False),
        ((KEY, VALUE, b"\x02", b"\x01", VALUE), False),
        ((KEY, VALUE, b"\x02", KEY), False),
        ((KEY, VALUE, b"\x02", KEY, encode_varint(50)), False),
        ((KEY, VALUE, NO_HEADERS, b"x"), False),
    ],
)
def test_the_fields_of_a_record_fill_it(parts: tuple[bytes, ...], is_accepted: bool, pieces_bytes: int) -> None:
    assert is_sound(record_of(*parts), 1, pieces_bytes) is is_accepted


class Held:
    """Threads that search when they are let go, and what each was given."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.pool = ThreadBackground(2, "searches")

    def run(self, call):  # type: ignore[no-untyped-def]
        def waited():  # type: ignore[no-untyped-def]
            self.go.wait(120)
            return call()

        return self.pool.run(waited)

    def close(self) -> None:
        self.go.set()
        self.pool.close()


async def test_searches_wait_for_memory_in_order_and_the_queue_is_bounded() -> None:
    batch = build_batch([Record(offset=0, timestamp_ms=7, key=None, value=b"x")], compression=ZSTD)
    header = read_header(batch)
    size = search_bytes(batch, header)
    held = Held()
    searches = SearchPool(held, 2 * size, waiting_max=2)
    try:
        tasks = [asyncio.ensure_future(searches.first_reaching(batch, header, 7, 0)) for _ in range(4)]
        await asyncio.sleep(0)
        assert searches.bytes_held == 2 * size
        with pytest.raises(Overloaded):
            await searches.first_reaching(batch, header, 7, 0)
        tasks[2].cancel()
        tasks[0].cancel()
        await asyncio.gather(tasks[0], tasks[2], return_exceptions=True)
        assert searches.bytes_held == 2 * size, "a thread that runs holds its memory until it ends"
        held.go.set()
        assert list(await asyncio.gather(tasks[1], tasks[3])) == [FoundInBatch(0, 7)] * 2
        async with asyncio.timeout(60):
            while searches.bytes_held:  # noqa: ASYNC110 - the thread of the search that was given up ends unobserved
                await asyncio.sleep(0.001)
    finally:
        held.close()


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-1, 9), st.one_of(st.none(), st.binary(max_size=200)), st.binary(max_size=300)),
        min_size=1,
        max_size=30,
    ),
    st.sampled_from(tuple(NAMES.values())),
    st.builds(RecordRules, st.booleans(), st.none() | st.integers(0, 5), st.none() | st.integers(4, 9)),
)
def test_the_first_record_that_the_rules_refuse_is_found(
    rows: list[tuple[int, bytes | None, bytes]], codec: int, rules: RecordRules
) -> None:
    written = [Record(offset=at, timestamp_ms=ms, key=key, value=value) for at, (ms, key, value) in enumerate(rows)]
    batch = build_batch(written, compression=codec)

    def is_refused(record: Record) -> bool:
        ms = record.timestamp_ms
        is_early = rules.earliest_ms is not None and ms < rules.earliest_ms
        is_late = rules.latest_ms is not None and ms > rules.latest_ms
        return (rules.needs_key and record.key is None) or (ms != -1 and (is_early or is_late))

    expected = next((FoundInBatch(each.offset, each.timestamp_ms) for each in written if is_refused(each)), None)
    assert first_refused(batch, read_header(batch), rules) == expected


ADMITTED = "more records than are located"
"""The broker refuses so many records."""


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != ADMITTED])
def test_a_batch_that_cannot_be_read_is_refused(kind: str, codec: int) -> None:
    batch = hostile_batch(kind, codec)
    with pytest.raises(Corrupt):
        first_refused(batch, read_header(batch), RecordRules(needs_key=True))
