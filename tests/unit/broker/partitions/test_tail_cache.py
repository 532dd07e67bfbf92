"""Tail cache and ledger index against plain lists."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_broker.partitions.ledger_index import EntryRun, LedgerIndex
from stratalog_broker.partitions.tail_cache import COPIED_BYTES_MAX, PartitionTail, TailCache
from stratalog_core.memory.retained import COPY_BYTES

MIB = 1024 * 1024

batches = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(1, 40)), max_size=80)


@given(batches, st.integers(400, 4000), st.data())
def test_a_read_gives_neighbouring_batches_from_the_offset_on(
    appended: list[tuple[int, int, int]], bytes_max: int, data: st.DataObject
) -> None:
    cache = TailCache(bytes_max)
    tails = [PartitionTail(cache, 0) for _ in range(3)]
    model: list[list[tuple[int, int, bytes]]] = [[], [], []]
    for which, records, size in appended:
        tail = tails[which]
        base = tail.end_offset
        batch = bytes([len(model[which]) % 256]) * (size * 60 if size > 30 else size)
        tail.append(base, base + records, memoryview(batch))
        model[which].append((base, base + records, batch))
        assert cache.bytes_held <= bytes_max
    if data.draw(st.booleans()):
        tails[0].clear()
        assert tails[0].start_offset == tails[0].end_offset
        assert tails[0].read(tails[0].end_offset - 1, tails[0].end_offset, 1) is None
    assert cache.bytes_held <= bytes_max
    for tail, known in zip(tails, model, strict=True):
        if tail.start_offset == tail.end_offset:
            continue
        offset = data.draw(st.integers(tail.start_offset, tail.end_offset - 1))
        end = data.draw(st.integers(offset + 1, tail.end_offset))
        room = data.draw(st.integers(1, 3000))
        read = tail.read(offset, end, room)
        assert read is not None
        found, size = read
        assert tail.read(tail.start_offset - 1, end, room) is None
        expected = [entry for entry in known if entry[1] > offset and entry[0] < end]
        assert [bytes(view) for view in found] == [entry[2] for entry in expected[: len(found)]]
        assert found
        assert size == sum(map(len, found))
        assert size <= room or len(found) == 1


def test_clearing_leaves_the_other_partitions_their_turns() -> None:
    cache = TailCache(2 * (40 + COPY_BYTES))
    first, second = PartitionTail(cache, 0), PartitionTail(cache, 0)
    first.append(0, 1, memoryview(b"a" * 40))
    second.append(0, 1, memoryview(b"b" * 40))
    first.clear()
    second.append(1, 2, memoryview(b"c" * 40))
    second.append(2, 3, memoryview(b"d" * 40))
    assert cache.bytes_held <= cache.bytes_max
    assert second.start_offset == 1


def test_cleared_partitions_leave_no_turns_behind() -> None:
    """Partitions that move to and fro must not make the order of eviction longer each time."""
    cache = TailCache(MIB)
    for _ in range(10):
        tail = PartitionTail(cache, 0)
        for offset in range(100):
            tail.append(offset, offset + 1, memoryview(bytes(40)))
        tail.clear()
    assert cache.bytes_held == 0
    assert len(cache._order) <= 100


SHAPES = (
    (170, 1, 70),
    (170, 50, 70),
    (COPIED_BYTES_MAX + 1, 1, 70),
    (16 * 1024, 1, 70),
    (16 * 1024, 12, 70),
    (2 * 1024, 1, 62 * 1024),
    (700 * 1024, 1, 70),
)
"""Bytes of a batch, batches in a request, and bytes of the request beside them."""


@pytest.mark.parametrize(("size", "count", "rest"), SHAPES)
def test_memory_that_is_really_taken_stays_within_the_bound(size: int, count: int, rest: int) -> None:
    bytes_max = 8 * MIB
    cache = TailCache(bytes_max)
    tails = [PartitionTail(cache, 0) for _ in range(50)]
    tracemalloc.start()
    try:
        for number in range(3 * bytes_max // ((size + 100) * count + rest)):
            view = memoryview(bytearray(size * count + rest))
            for each in range(count):
                tail = tails[(number * count + each) % len(tails)]
                tail.append(tail.end_offset, tail.end_offset + 1, view[each * size : (each + 1) * size])
            del view
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cache.bytes_held <= bytes_max
    assert taken <= 1.05 * bytes_max
    assert taken >= 0.7 * bytes_max, "what is charged is taken"
    for tail in tails:
        tail.clear()
    assert cache.bytes_held == 0


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 50), st.integers(1, 30)), min_size=1, max_size=40), st.data())
def test_the_index_finds_what_a_scan_finds(entries: list[tuple[int, int, int]], data: st.DataObject) -> None:
    index = LedgerIndex(10)
    known: list[tuple[int, int, int, int, int]] = []
    for number, (records, timestamp_ms, size) in enumerate(entries):
        base = index.end_offset
        index.append(number + 2, base, base + records, timestamp_ms, size)
        known.append((number + 2, base, base + records, timestamp_ms, size))
    offset = data.draw(st.integers(10, index.end_offset - 1))
    end = data.draw(st.integers(offset + 1, index.end_offset))
    room = data.draw(st.integers(1, 100))
    run = index.run_from(offset, end, room)
    assert run is not None
    first = next(entry for entry in known if entry[1] <= offset < entry[2])
    assert run.first_entry == first[0]
    chosen = [entry for entry in known if run.first_entry <= entry[0] <= run.last_entry]
    assert all(entry[1] < end for entry in chosen)
    assert len(chosen) == 1 or sum(entry[4] for entry in chosen) <= room
    read = chosen[: data.draw(st.integers(1, len(chosen)))]
    found = index.run_of(run.first_entry, [bytes(entry[4]) for entry in read])
    assert (list(found.base_offsets), found.end_offset) == ([entry[1] for entry in read], read[-1][2])
    below = found.below(end)
    assert list(below.base_offsets) == [entry[1] for entry in read if entry[1] < end]
    assert below.end_offset == read[len(below.batches) - 1][2]
    timestamp_ms = data.draw(st.integers(0, 51))
    reaching = [entry[0] for entry in known if entry[2] > offset and entry[3] >= timestamp_ms]
    assert list(index.reaching(timestamp_ms, offset)) == reaching
    assert index.greatest_timestamp_ms == max(entry[3] for entry in known)


def test_beyond_its_end_the_index_has_nothing() -> None:
    index = LedgerIndex(5)
    assert index.run_from(5, 10, 100) is None
    index.append(1, 5, 6, 0, 10)
    assert index.run_from(6, 10, 100) is None
    assert index.run_from(5, 6, 100) == EntryRun(1, 1)


def test_what_is_below_an_offset_is_dropped_with_its_turns() -> None:
    cache = TailCache(1_000_000)
    first, second = PartitionTail(cache, 0), PartitionTail(cache, 0)
    for offset in range(10):
        for tail in (first, second):
            tail.append(offset, offset + 1, memoryview(b"x" * 100))
    held = cache.bytes_held
    first.drop_below(7)
    assert (first.start_offset, first.read(6, 10, 1000), second.start_offset) == (7, None, 0)
    assert cache.bytes_held == held * 13 // 20
    first.drop_below(99)
    assert first.start_offset == first.end_offset == 10
    cache.bytes_max = 0
    cache.shrink()
    assert cache.bytes_held == 0
