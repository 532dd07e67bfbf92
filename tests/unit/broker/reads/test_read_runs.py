"""Read-ahead: batches are served whole and in order, within the bound, and dropped when no reader needs them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.reads.log_reader import LogReader
from stratalog_broker.reads.pending_reads import AHEAD_BYTES, PendingReads
from stratalog_broker.reads.read_runs import KEPT_S, ReadRuns
from stratalog_broker.reads.replay_pace import ReplayPace
from stratalog_core.batches.batch_run import BatchRun
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Overloaded, Unavailable
from stratalog_core.memory.retained import retained_bytes
from stratalog_core.metrics.groups import Histogram
from stratalog_core.ports import Buffer, Clock

RECORDS = 3
SIZE = 100_000
END = 1000 * RECORDS


def batch(number: int, size: int = SIZE) -> memoryview:
    """The batch of that number, of ``RECORDS`` records."""
    records = [Record(offset=each, timestamp_ms=0, key=None, value=bytes(size // RECORDS)) for each in range(RECORDS)]
    built = bytearray(build_batch(records))
    built[:8] = (number * RECORDS).to_bytes(8, "big")
    return memoryview(built)


BATCHES = [batch(number) for number in range(60)]
SMALL = [batch(number, 30) for number in range(60)]


def offsets(batches: Sequence[Buffer]) -> list[int]:
    return [int.from_bytes(each[:8], "big") for each in batches]


def run_of(batches: Sequence[Buffer]) -> BatchRun:
    base_offsets = array("q", offsets(batches))
    return BatchRun(batches, base_offsets, base_offsets[-1] + RECORDS if batches else 0)


def put(runs: ReadRuns, key: str, first: int, count: int, now_s: float = 0.0, batches: list[memoryview] = SMALL) -> int:
    """Returns what the run keeps in memory."""
    part = batches[first : first + count]
    runs.put(key, run_of(part), now_s)
    return retained_bytes(part)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 10)), max_size=6), st.data())
def test_what_is_served_is_whole_neighbours_from_the_offset_on(puts: list[tuple[int, int]], data: st.DataObject) -> None:
    runs = ReadRuns(1 << 20)
    for first, count in puts:
        put(runs, "log", first, count)
    offset, end = data.draw(st.integers(0, 60 * RECORDS)), data.draw(st.integers(1, 60 * RECORDS))
    bytes_max = data.draw(st.integers(1, 2000))
    served = runs.serve("log", offset, end, bytes_max, 0.0)
    is_held = offset < end and any(first * RECORDS <= offset < (first + count) * RECORDS for first, count in puts)
    assert (served is not None) == is_held
    if served is not None:
        found = offsets(served.batches)
        assert found == list(range(offset // RECORDS * RECORDS, found[-1] + 1, RECORDS))
        assert found[-1] < end
        assert served.size == sum(map(len, served.batches))
        assert len(found) == 1 or served.size <= bytes_max
        assert runs.serve("other", offset, end, bytes_max, 0.0) is None


def test_a_run_goes_when_it_was_served_unless_others_follow() -> None:
    runs = ReadRuns(1 << 20)
    put(runs, "log", 0, 4)
    assert runs.serve("log", 0, END, 1 << 20, 0.0) is not None
    assert runs.bytes_held == 0
    assert runs.is_followed("log", 4 * RECORDS)
    assert not runs.is_followed("log", 4 * RECORDS + 1)
    size = put(runs, "log", 0, 4)
    assert runs.serve("log", 0, END, 1 << 20, 0.0) is not None, "a second reader"
    assert runs.bytes_held == size
    assert runs.serve("log", RECORDS, END, 1 << 20, 0.0) is not None
    assert not runs.make_room(1, 0, 0.0), "what was served makes room"
    assert runs.bytes_held == 0


def test_what_nobody_comes_for_goes_and_what_was_served_goes_first() -> None:
    runs = ReadRuns(1 << 20)
    size = put(runs, "old", 0, 4)
    put(runs, "new", 0, 4, KEPT_S)
    assert runs.make_room(0, 1 << 20, KEPT_S + 0.1)
    assert runs.bytes_held == size
    assert runs.serve("old", 0, END, 1, KEPT_S + 0.1) is None
    small = ReadRuns(int(2.5 * size))
    for key in ("first", "second", "third"):
        put(small, key, 0, 4)
        assert small.bytes_held <= 2.5 * size
    assert [small.serve(key, 0, END, 1, 0.0) is not None for key in ("first", "second", "third")] == [False, True, True]


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(1, 10), st.booleans(), st.floats(0, 30)), max_size=30
    )
)
def test_the_bound_holds_whatever_is_put_and_served(steps: list[tuple[str, int, int, bool, float]]) -> None:
    bound = 10 * retained_bytes(SMALL[:1])
    runs, now_s = ReadRuns(bound), 0.0
    for key, first, count, is_put, later_s in steps:
        now_s += later_s
        if is_put:
            put(runs, key, first, count, now_s)
        else:
            runs.serve(key, first * RECORDS, END, count * 200, now_s)
        assert 0 <= runs.bytes_held <= bound
    runs.make_room(0, bound, now_s + 2 * KEPT_S)
    assert runs.bytes_held == 0


class Reader:
    """A partition's batches as bookies give them, when they are let go."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.failure: Exception | None = None
        self.cold_below = 0
        """Offsets below are in the object store, which answers when ``store_is_open``."""
        self.lost_below = 0
        """Offsets below are on bookies that cannot give them, and in the object store."""
        self.store_is_open = asyncio.Event()
        self.tail_start = END

    def is_in_tail(self, log: object, offset: int) -> bool:
        return offset >= self.tail_start

    def history_version(self, log: object) -> int:
        return 0

    def is_cold(self, log: object, offset: int) -> bool:
        return offset < self.cold_below

    async def read(
        self, log: object, offset: int, end_offset: int, bytes_max: int, timeout_s: float, before_cold: Callable[[], None]
    ) -> BatchRun:
        self.asked.append((offset, bytes_max))
        await self.is_open.wait()
        if offset < max(self.cold_below, self.lost_below):
            before_cold()
            await self.store_is_open.wait()
        if self.failure is not None:
            raise self.failure
        found: list[memoryview] = []
        size = 0
        for each in BATCHES[offset // RECORDS :]:
            if found and size + len(each) > bytes_max:
                break
            found.append(each)
            size += len(each)
        return run_of(found)


class Time:
    def monotonic(self) -> float:
        return 0.0


class ReadTail:
    erased_version = 0


class ReadLog:
    tail = ReadTail()


LOG = cast(PartitionLog, ReadLog())
SHARE = 4 * SIZE + 1000


def pending(reader: Reader, reads_max: int = 8, bytes_max: int = 16 * AHEAD_BYTES) -> PendingReads:
    return PendingReads(
        cast(LogReader, reader),
        cast(Clock, Time()),
        ReplayPace(cast(Clock, Time()), lambda: Histogram(()), percent=100),
        hot_reads_max=reads_max,
        cold_reads_max=reads_max,
        bytes_max=bytes_max,
    )


async def fetched(reads: PendingReads, offset: int) -> list[int]:
    """As a fetch does it: what is there, else a read of it."""
    end = len(BATCHES) * RECORDS
    found = reads.ready(LOG, offset, end, SHARE)
    if found is None:
        task = reads.start(LOG, offset, end, SHARE)
        found = reads.taken(LOG, offset, end, SHARE, await task)
    assert found[1] == sum(map(len, found[0])) <= SHARE
    return offsets(found[0])


async def read_all(reads: PendingReads) -> list[int]:
    seen: list[int] = []
    while len(seen) < len(BATCHES):
        seen += await fetched(reads, len(seen) * RECORDS)
        await asyncio.sleep(0)
    return seen


async def test_who_goes_on_reading_is_read_ahead_of() -> None:
    """The count is what matters: a read for each 2 MiB but the first, where every fetch of 400 KB had its own before."""
    reader = Reader()
    reads = pending(reader)
    assert await read_all(reads) == list(range(0, len(BATCHES) * RECORDS, RECORDS))
    whole = sum(map(len, BATCHES))
    assert len(reader.asked) <= 2 + whole // (AHEAD_BYTES - 2 * SIZE)
    assert reader.asked[0] == (0, SHARE), "a first read is no more than was asked for"
    assert {size for _, size in reader.asked[1:]} == {AHEAD_BYTES}
    assert reads.runs.bytes_held == 0
    await reads.close()


async def test_without_room_everybody_gets_what_is_asked_for() -> None:
    reader = Reader()
    reads = pending(reader, bytes_max=AHEAD_BYTES)
    assert await read_all(reads) == list(range(0, len(BATCHES) * RECORDS, RECORDS))
    assert {size for _, size in reader.asked} == {SHARE}
    await reads.close()


async def test_readers_side_by_side_share_what_is_read() -> None:
    reader = Reader()
    reads = pending(reader)
    await asyncio.gather(*(read_all(reads) for _ in range(5)))
    whole = sum(map(len, BATCHES))
    assert len(reader.asked) <= 3 * (2 + whole // (AHEAD_BYTES - 2 * SIZE)), "five readers, not five times the reads"
    await reads.close()


async def test_a_read_that_was_left_behind_is_there_for_the_next_fetch() -> None:
    reader = Reader()
    reads = pending(reader)
    reader.is_open.clear()
    task = reads.start(LOG, 0, END, SHARE)
    assert reads.start(LOG, 0, END, SHARE) is task
    assert reads.ready(LOG, 0, END, SHARE) is None
    reader.is_open.set()
    await task
    found = reads.ready(LOG, 0, END, SHARE)
    assert found is not None
    assert offsets(found[0]) == [0, 3, 6, 9]
    await reads.close()


async def test_reads_are_bounded_in_bytes_and_one_is_always_let_in() -> None:
    reader = Reader()
    reads = pending(reader, bytes_max=8 * SHARE)
    reader.is_open.clear()
    tasks = [reads.start(LOG, number * RECORDS, END, SHARE) for number in range(2)]
    assert reads.bytes_held == 2 * SHARE
    with pytest.raises(Overloaded):
        reads.start(LOG, 9 * RECORDS, END, 1)
    reader.is_open.set()
    await asyncio.gather(*tasks)
    assert 0 < reads.bytes_held <= 4 * SHARE, "what was not served yet is charged instead"
    await reads.close()
    tight = pending(reader, bytes_max=1)
    assert offsets((await tight.start(LOG, 0, END, SHARE))[0]) == [0, 3, 6, 9]
    await tight.close()


async def test_a_batch_is_charged_with_the_buffer_that_it_is_a_view_of() -> None:
    runs = ReadRuns(1 << 20)
    frame = bytearray(64 * 1024)
    frame[: len(SMALL[0])] = SMALL[0]
    runs.put("log", run_of([memoryview(frame)[: len(SMALL[0])]]), 0.0)
    assert runs.bytes_held > 64 * 1024


async def test_reads_are_bounded_in_number_and_failures_are_not_kept() -> None:
    reader = Reader()
    reads = pending(reader, reads_max=2)
    reader.is_open.clear()
    tasks = [reads.start(LOG, number * RECORDS, END, SHARE) for number in range(2)]
    with pytest.raises(Overloaded):
        reads.start(LOG, 9 * RECORDS, END, SHARE)
    reader.failure = Unavailable("bookies are away")
    reader.is_open.set()
    results: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [Unavailable, Unavailable]
    reader.failure = None
    assert await fetched(reads, 0) == [0, 3, 6, 9]
    await reads.close()


async def test_the_object_stores_reader_reads_ahead_by_itself() -> None:
    """Two read-aheads, one on the other, hold the same bytes twice."""
    reader = Reader()
    reader.cold_below = END
    reader.store_is_open.set()
    reads = pending(reader)
    assert await read_all(reads) == list(range(0, len(BATCHES) * RECORDS, RECORDS))
    assert {size for _, size in reader.asked} == {SHARE}
    await reads.close()


async def test_what_the_tail_cache_has_is_not_read_ahead() -> None:
    reader = Reader()
    reader.tail_start = 20 * RECORDS
    reads = pending(reader)
    at = 0
    while at < 20:
        at += len(await fetched(reads, at * RECORDS))
        await asyncio.sleep(0)
    assert all(offset < reader.tail_start for offset, _ in reader.asked)
    await reads.close()


COLD_LOGS = [cast(PartitionLog, ReadLog()) for _ in range(4)]


async def test_a_store_that_does_not_answer_takes_nothing_from_hot_readers() -> None:
    reader = Reader()
    reads = pending(reader, reads_max=len(COLD_LOGS))
    reader.cold_below = RECORDS
    stalled = [reads.start(log, 0, END, SHARE) for log in COLD_LOGS]
    with pytest.raises(Overloaded, match="object store"):
        reads.start(LOG, 0, END, SHARE)
    await asyncio.sleep(0)
    reader.cold_below = 0
    assert await read_all(reads) == list(range(0, len(BATCHES) * RECORDS, RECORDS))
    assert {size for offset, size in reader.asked[len(COLD_LOGS) + 1 :]} == {AHEAD_BYTES}, "and is read ahead of"
    assert not any(task.done() for task in stalled)
    await reads.close()


async def test_a_read_whose_bookies_fail_leaves_its_place_to_hot_reads() -> None:
    reader = Reader()
    reads = pending(reader, reads_max=2)
    reader.lost_below = RECORDS
    stalled = [reads.start(log, 0, END, SHARE) for log in COLD_LOGS[:2]]
    await asyncio.sleep(0)
    assert reads.start(LOG, RECORDS, END, SHARE) is not None, "both places of hot reads are free again"
    third = reads.start(COLD_LOGS[2], 0, END, SHARE)
    with pytest.raises(Unavailable, match="object store"):
        await third
    reader.store_is_open.set()
    assert [offsets((await task)[0])[0] for task in stalled] == [0, 0]
    await reads.close()


async def test_what_was_read_before_an_erasure_is_not_served_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()
    reads = pending(reader)
    await reads.start(LOG, 0, END, AHEAD_BYTES)
    assert reads.ready(LOG, 0, END, SHARE) is not None
    monkeypatch.setattr(ReadTail, "erased_version", 7)
    assert reads.ready(LOG, 2 * RECORDS, END, SHARE) is None
    await reads.start(LOG, 2 * RECORDS, END, SHARE)
    assert reads.ready(LOG, 2 * RECORDS, END, SHARE) is not None
    await reads.close()
