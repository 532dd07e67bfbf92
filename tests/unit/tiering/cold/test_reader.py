"""Cold reads: every offset, every size, by time, with faults, deadlines, cancellation and bounded read-ahead."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import pytest_asyncio
from support.archive_writer import ArchiveWriter

from stratalog_core import stepwise
from stratalog_core.batches.batch import iterate_headers, read_header
from stratalog_core.batches.checkpoint import ProducerEntry
from stratalog_core.batches.records import iterate_records
from stratalog_core.errors import Corrupt, NotFound, Unavailable
from stratalog_core.memory.retained import FRAME_BYTES, frame_bytes
from stratalog_core.ports import Background, Buffer
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.cold import manifest_source
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.cold.block_cache import CachedBlock
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.format.footer import AbortedTransaction
from stratalog_tiering.metrics import ColdReadMetrics

MIB = 1024 * 1024
Result = TypeVar("Result")
Store = Any  # the FaultyStore of conftest.py, which cannot be imported
Batches = Callable[..., list[bytes]]


async def fetched(
    reader: ColdReader, pointer: ManifestPointer, offset: int, max_bytes: int, timeout_s: float = 60
) -> list[Buffer]:
    """Return the batches of a fetch, after checking that their offsets are those in their headers."""
    found = await reader.fetch(pointer, offset, max_bytes, timeout_s)
    read = [read_header(batch) for batch in found.batches]
    assert list(found.base_offsets) == [header.base_offset for header in read]
    assert not read or found.end_offset == read[-1].next_offset
    return list(found.batches)


@pytest_asyncio.fixture
async def reader(store: Store) -> AsyncIterator[ColdReader]:
    cold = ColdReader(store, ColdReaderSettings(read_ahead_blocks=0), SystemClock())
    yield cold
    await cold.close()


async def write_history(writer: ArchiveWriter, make_batches: Batches, segments: int = 7) -> tuple[ManifestPointer, list[bytes]]:
    offset, written = 5, []
    for index in range(segments):
        counts = [1 + (index + step) % 4 for step in range(6)]
        batches = make_batches(offset, counts, epoch=index // 3)
        pointer, _ = await writer.append(0, batches, base_offset=5)
        written += batches
        offset += sum(counts)
    return pointer, written


def headers(pieces: Sequence[Buffer]) -> list[tuple[int, int]]:
    return [(header.base_offset, header.next_offset) for piece in pieces for _, header in iterate_headers(piece)]


async def test_every_offset_is_read_with_every_size(writer: ArchiveWriter, reader: ColdReader, make_batches: Batches) -> None:
    pointer, written = await write_history(writer, make_batches)
    assert (pointer.start_offset, pointer.end_offset) == (5, pointer.end_offset)
    whole = b"".join(written)
    for max_bytes in (0, 1, 300, 1000, MIB):
        for offset in range(pointer.start_offset, pointer.end_offset):
            pieces = await fetched(reader, pointer, offset, max_bytes)
            found = headers(pieces)
            assert found[0][0] <= offset < found[0][1]
            assert len(found) == 1 or sum(map(len, pieces)) <= max_bytes
            assert b"".join(pieces) in whole
    assert b"".join(await fetched(reader, pointer, 5, MIB)) == whole


async def test_sequential_reads_return_everything_once(writer: ArchiveWriter, store: Store, make_batches: Batches) -> None:
    pointer, written = await write_history(writer, make_batches)
    reader = ColdReader(store, ColdReaderSettings(read_ahead_blocks=4), SystemClock())
    offset, read = pointer.start_offset, []
    while offset < pointer.end_offset:
        pieces = await fetched(reader, pointer, offset, 500)
        read += [bytes(piece) for piece in pieces]
        offset = headers(pieces)[-1][1]
    assert b"".join(read) == b"".join(written)
    assert await fetched(reader, pointer, offset, 500) == []
    blocks = [key for name, key in store.calls if name == "get_range" and "segments/" in key]
    assert len(blocks) <= 7 + sum(1 for _ in written), "no block is read twice"
    await reader.close()


async def read_sequentially(reader: ColdReader, pointer: ManifestPointer) -> bytes:
    """Read everything in fetches of one batch, and let read-ahead end after each."""
    offset, read = pointer.start_offset, b""
    while offset < pointer.end_offset:
        found = await reader.fetch(pointer, offset, 1, 60)
        offset, read = found.end_offset, read + b"".join(found.batches)
        await read_ahead_ended(reader)
    return read


async def read_ahead_ended(reader: ColdReader) -> None:
    blocks = reader._blocks
    async with asyncio.timeout(60):
        while reader._tasks or len(blocks._loads) or blocks._run_reads or blocks._disk_writes:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_read_ahead_gets_adjacent_blocks_together(
    new_writer: Callable[..., ArchiveWriter], store: Store, make_batches: Batches
) -> None:
    batches = make_batches(0, [3] * 40)
    pointer, entry = await new_writer(block_bytes_target=1).append(0, batches)
    assert len((await Archive(store).footer(entry)).blocks) == 40
    store.calls.clear()
    reader = ColdReader(store, ColdReaderSettings(), SystemClock())
    assert await read_sequentially(reader, pointer) == b"".join(batches)
    assert store.count("get_range") < 40 / 2, "footer, the first blocks alone, then four at a time"
    blocks = list(reader._blocks._memory._finished.values())
    assert all(frame_bytes(block.content) == FRAME_BYTES + len(block.content) for block in blocks), (
        "no block keeps the others in memory"
    )
    (counted,) = reader.metrics()
    assert isinstance(counted, ColdReadMetrics)
    assert (counted.blocks_loaded, counted.loaded_bytes) == (40, entry.data_bytes)
    await reader.close()


@pytest.mark.parametrize("readers", [5, 8])
async def test_readers_in_little_memory_load_each_block_once(
    new_writer: Callable[..., ArchiveWriter], store: Store, make_batches: Batches, readers: int
) -> None:
    batches = make_batches(0, [3] * 600)
    size = len(batches[0])
    writer = new_writer(block_bytes_target=40 * size)
    pointers = [(await writer.append(partition, batches))[0] for partition in range(readers)]
    block = CachedBlock(memoryview(b"".join(batches[:40])), 0).memory_bytes
    # A block for each reader that it is in, one that is read ahead of it, and some of those that it has finished.
    memory = (2 * readers + 1) * block * 4 // 3
    reader = ColdReader(store, ColdReaderSettings(), SystemClock(), memory_bytes=memory)
    offsets, read = [0] * readers, [b""] * readers
    while any(offset < pointer.end_offset for offset, pointer in zip(offsets, pointers, strict=True)):
        for number, pointer in enumerate(pointers):
            found = await reader.fetch(pointer, offsets[number], 30 * size, 60)
            offsets[number], read[number] = found.end_offset, read[number] + b"".join(found.batches)
        await read_ahead_ended(reader)
    assert read == [b"".join(batches)] * readers
    (counted,) = reader.metrics()
    assert isinstance(counted, ColdReadMetrics)
    assert counted.blocks_loaded == 15 * readers
    await reader.close()


async def test_a_damaged_block_does_not_hide_those_that_are_read_with_it(
    new_writer: Callable[..., ArchiveWriter], store: Store, store_directory: Path, make_batches: Batches
) -> None:
    batches = make_batches(0, [3] * 40)
    pointer, entry = await new_writer(block_bytes_target=1).append(0, batches)
    block = (await Archive(store).footer(entry)).blocks[30]
    path = store_directory / entry.key
    content = bytearray(path.read_bytes())
    content[block.position + 70] ^= 0x20
    path.write_bytes(content)
    reader = ColdReader(store, ColdReaderSettings(), SystemClock())
    before = msgspec.structs.replace(pointer, end_offset=block.base_offset)
    assert await read_sequentially(reader, before) == b"".join(batches[:30])
    for offset in (block.base_offset, block.base_offset):
        with pytest.raises(Corrupt, match=f"{entry.key}, block 30 .offsets {block.base_offset}..{block.last_offset}"):
            await reader.fetch(pointer, offset, 1, 60)
    after = msgspec.structs.replace(pointer, start_offset=block.last_offset + 1)
    assert await read_sequentially(reader, after) == b"".join(batches[31:])
    await reader.close()


async def test_read_ahead_does_not_read_again_what_the_disk_cache_has(
    new_writer: Callable[..., ArchiveWriter],
    store: Store,
    make_batches: Batches,
    tmp_path: Path,
    background: ThreadBackground,
) -> None:
    batches = make_batches(0, [3] * 40)
    pointer, entry = await new_writer(block_bytes_target=1).append(0, batches)
    files = SystemFiles(tmp_path / "cache")
    settings = ColdReaderSettings(disk_bytes=MIB)
    reader = ColdReader(store, settings, SystemClock(), memory_bytes=16_000, files=files, background=background)
    for _ in range(2):
        assert await read_sequentially(reader, pointer) == b"".join(batches)
    (counted,) = reader.metrics()
    assert isinstance(counted, ColdReadMetrics)
    assert counted.disk_hits >= 20
    assert counted.loaded_bytes <= 1.5 * entry.data_bytes
    await reader.close()


async def test_read_ahead_that_the_store_refuses_is_tried_again_by_the_fetch(
    new_writer: Callable[..., ArchiveWriter], store: Store, make_batches: Batches
) -> None:
    batches = make_batches(0, [3] * 40)
    pointer, _ = await new_writer(block_bytes_target=1).append(0, batches)
    reader = ColdReader(store, ColdReaderSettings(), SystemClock())
    asked = 0

    def refuse_some(name: str, key: str) -> BaseException | None:
        nonlocal asked
        asked += name == "get_range"
        return Unavailable("the store is away") if name == "get_range" and asked % 3 == 0 else None

    store.before = refuse_some
    offset, read = 0, b""
    while offset < pointer.end_offset:
        with contextlib.suppress(Unavailable):
            found = await reader.fetch(pointer, offset, 1, 60)
            offset, read = found.end_offset, read + b"".join(found.batches)
        await read_ahead_ended(reader)
    assert read == b"".join(batches)
    await reader.close()


async def test_below_the_start_is_not_found(writer: ArchiveWriter, reader: ColdReader, make_batches: Batches) -> None:
    pointer, _ = await write_history(writer, make_batches, 1)
    with pytest.raises(NotFound):
        await fetched(reader, pointer, 4, 100)


async def test_what_was_aborted_below_the_start_is_not_found(
    writer: ArchiveWriter, reader: ColdReader, make_batches: Batches
) -> None:
    """Retention has removed the segments: an empty list would say that every transaction was committed."""
    aborted = [AbortedTransaction(producer_id=1, first_offset=0, last_offset=4, last_stable_offset=5)]
    await writer.append(0, make_batches(0, [5]), aborted_transactions=aborted)
    pointer, _ = await writer.append(0, make_batches(5, [5]))
    assert await reader.aborted_transactions(pointer, 3, 10) == [(1, 0, 4)]
    after = msgspec.structs.replace(pointer, start_offset=5)
    for start in range(5):
        with pytest.raises(NotFound):
            await reader.aborted_transactions(after, start, 10)
        with pytest.raises(NotFound):
            reader.cached_aborted_transactions(after, start, 10)
    assert await reader.aborted_transactions(after, 5, 10) == []


async def test_a_lookup_costs_two_reads_then_footer_and_block(
    writer: ArchiveWriter, reader: ColdReader, store: Store, make_batches: Batches
) -> None:
    pointer, _ = await write_history(writer, make_batches, 20)
    store.calls.clear()
    await fetched(reader, pointer, pointer.start_offset, 1)
    assert [name for name, _ in store.calls] == ["get", "get", "get_range", "get_range"]


async def test_equal_requests_share_one_read(
    writer: ArchiveWriter, reader: ColdReader, store: Store, make_batches: Batches
) -> None:
    pointer, _ = await write_history(writer, make_batches, 1)
    await fetched(reader, pointer, pointer.end_offset - 1, 1)
    store.calls.clear()
    results = await asyncio.gather(*(fetched(reader, pointer, 5, 1) for _ in range(10)))
    assert len({bytes(pieces[0]) for pieces in results}) == 1
    assert store.count("get_range") == 1


async def test_hits_and_loads_are_counted(
    writer: ArchiveWriter, reader: ColdReader, store: Store, make_batches: Batches
) -> None:
    pointer, _ = await write_history(writer, make_batches, 1)
    (counted,) = reader.metrics()
    assert isinstance(counted, ColdReadMetrics)
    await fetched(reader, pointer, 5, 1)
    assert (counted.memory_hits, counted.blocks_loaded, sum(counted.load_seconds.counts)) == (0, 1, 1)
    for _ in range(3):
        await fetched(reader, pointer, 5, 1)
    (again,) = reader.metrics()
    assert again is counted
    assert (counted.memory_hits, counted.blocks_loaded) == (3, 1)
    assert counted.cached_bytes > counted.loaded_bytes > 0


async def test_reads_of_different_offsets_share_manifest_and_footer_loads(
    writer: ArchiveWriter, reader: ColdReader, store: Store, make_batches: Batches
) -> None:
    pointer, _ = await write_history(writer, make_batches, 20)
    store.calls.clear()
    store.gate = asyncio.Event()
    reading = [asyncio.ensure_future(fetched(reader, pointer, offset, 1)) for offset in range(5, 15)]
    await store.entered.wait()
    store.gate.set()
    await asyncio.gather(*reading)
    loaded = [key for name, key in store.calls if name == "get"]
    assert len(loaded) == len(set(loaded)) == 2, "manifest and page are loaded once"


async def test_a_block_that_arrives_after_the_deadline_serves_the_retry(
    writer: ArchiveWriter, reader: ColdReader, store: Store, make_batches: Batches
) -> None:
    pointer, written = await write_history(writer, make_batches, 1)
    await fetched(reader, pointer, pointer.end_offset - 1, 1)
    store.calls.clear()
    store.gate = asyncio.Event()
    with pytest.raises(Unavailable):
        await fetched(reader, pointer, 5, 1, 0.01)
    store.gate.set()
    assert bytes((await fetched(reader, pointer, 5, 1))[0]) == written[0]
    assert store.count("get_range") == 1


async def test_a_cancelled_fetch_stops_its_read(
    writer: ArchiveWriter, reader: ColdReader, store: Store, make_batches: Batches
) -> None:
    pointer, _ = await write_history(writer, make_batches, 1)
    await fetched(reader, pointer, pointer.end_offset - 1, 1)
    store.gate = asyncio.Event()
    store.entered.clear()
    fetch = asyncio.ensure_future(fetched(reader, pointer, 5, 1))
    await store.entered.wait()
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    store.calls.clear()
    store.gate.set()
    await fetched(reader, pointer, 5, 1)
    assert store.count("get_range") == 1, "the cancelled read left nothing in the cache"


async def test_a_flipped_byte_is_reported_with_its_place_and_never_returned(
    writer: ArchiveWriter, reader: ColdReader, store: Store, store_directory: Path, make_batches: Batches
) -> None:
    pointer, entry = await writer.append(0, make_batches(0, [3] * 8))
    footer = await Archive(store).footer(entry)
    block = footer.blocks[1]
    path = store_directory / entry.key
    content = bytearray(path.read_bytes())
    content[block.position + 70] ^= 0x20
    path.write_bytes(content)
    with pytest.raises(Corrupt, match=f"{entry.key}, block 1 .offsets {block.base_offset}..{block.last_offset}"):
        await fetched(reader, pointer, block.base_offset, 1)
    assert headers(await fetched(reader, pointer, 0, 1))[0][0] == 0
    assert headers(await fetched(reader, pointer, 0, MIB))[-1][1] == block.base_offset, "it hides nothing before it"


async def test_a_missing_segment_is_corruption_not_the_end(
    writer: ArchiveWriter, reader: ColdReader, store_directory: Path, make_batches: Batches
) -> None:
    pointer, entry = await writer.append(0, make_batches(0, [3]))
    (store_directory / entry.key).unlink()
    with pytest.raises(Corrupt, match="missing"):
        await fetched(reader, pointer, 0, 1)


async def test_time_search_equals_a_scan_over_times_that_are_not_monotonic(
    writer: ArchiveWriter, reader: ColdReader, make_batches: Batches
) -> None:
    times = [(7 * index) % 43 for index in range(80)]
    for first in range(0, 80, 8):
        pointer, _ = await writer.append(0, make_batches(first, [3, 5], timestamps=times[first : first + 8]))
    for wanted in range(45):
        for start in (0, 9, 40):
            expected = next((offset for offset in range(start, 80) if times[offset] >= wanted), None)
            found = await reader.offset_for_timestamp(pointer, wanted, start)
            assert (found.offset if found else None) == expected
            assert found is None or found.timestamp_ms == times[found.offset]
    assert await reader.timestamp_bound(pointer) == max(times)


async def test_leader_epochs_are_those_at_the_end(writer: ArchiveWriter, reader: ColdReader, make_batches: Batches) -> None:
    await writer.append(0, make_batches(0, [4], epoch=2))
    pointer, _ = await writer.append(0, make_batches(4, [4], epoch=3))
    assert await reader.leader_epochs(pointer) == [(3, 4)]
    assert await reader.producer_snapshot(pointer) == ()
    assert await reader.aborted_transactions(pointer, 0, 8) == []


async def test_producers_are_read_by_a_takeover_and_by_no_fetch(
    writer: ArchiveWriter, reader: ColdReader, store: Store, make_batches: Batches
) -> None:
    producers = tuple(ProducerEntry(number, 1, (), number) for number in range(100))
    pointer, _ = await writer.append(0, make_batches(0, [3]), producers=producers)
    await fetched(reader, pointer, 0, MIB)
    footer_and_block = store.count("get_range")
    assert footer_and_block == 2
    assert await reader.producer_snapshot(pointer) == producers
    assert store.count("get_range") == footer_and_block + 1


async def test_aborted_transactions_are_found_by_their_index(
    writer: ArchiveWriter, reader: ColdReader, make_batches: Batches
) -> None:
    aborted = [
        AbortedTransaction(producer_id=1, first_offset=0, last_offset=4, last_stable_offset=2),
        AbortedTransaction(producer_id=2, first_offset=2, last_offset=6, last_stable_offset=7),
        AbortedTransaction(producer_id=1, first_offset=8, last_offset=9, last_stable_offset=10),
    ]
    pointer, _ = await writer.append(0, make_batches(0, [10]), aborted_transactions=aborted)
    for start in range(10):
        for end in range(start + 1, 11):
            overlapping = [one for one in aborted if one.first_offset < end and one.last_offset >= start]
            expected = [(one.producer_id, one.first_offset, one.last_offset) for one in overlapping]
            assert await reader.aborted_transactions(pointer, start, end) == expected


async def test_memory_is_bounded_and_evicted_blocks_go_to_disk(
    writer: ArchiveWriter, store: Store, make_batches: Batches, tmp_path: Path, background: ThreadBackground
) -> None:
    pointer, written = await write_history(writer, make_batches)
    settings = ColdReaderSettings(disk_bytes=MIB, read_ahead_blocks=0)
    files = SystemFiles(tmp_path / "cache")
    reader = ColdReader(store, settings, SystemClock(), memory_bytes=4_000, files=files, background=background)
    assert b"".join(await fetched(reader, pointer, 5, MIB)) == b"".join(written)
    await reader.close()
    assert files.list("blocks")
    for name in files.list("blocks"):
        (tmp_path / "cache/blocks" / name).write_bytes(b"spoiled")
    assert b"".join(await fetched(reader, pointer, 5, MIB)) == b"".join(written), "a spoiled cache is a miss"
    await reader.close()


async def test_records_read_cold_are_those_written(writer: ArchiveWriter, reader: ColdReader, make_batches: Batches) -> None:
    pointer, _ = await writer.append(1, make_batches(0, [2, 2]))
    pieces = await fetched(reader, pointer, 0, MIB)
    offsets = [
        record.offset
        for piece in pieces
        for position, header in iterate_headers(piece)
        for record in iterate_records(piece[position:], header)
    ]
    assert offsets == [0, 1, 2, 3]


class CountingBackground:
    """Counts the calls that run outside the event loop."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self.calls = 0

    def run(self, call: Callable[[], Result]) -> Awaitable[Result]:
        self.calls += 1
        return self._background.run(call)

    def close(self) -> None: ...


async def test_large_footers_and_pages_are_parsed_beside_the_event_loop(
    writer: ArchiveWriter, store: Store, make_batches: Batches, background: ThreadBackground, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointer, written = await write_history(writer, make_batches)
    for at_once_bytes, goes_aside in ((1 << 20, False), (0, True)):
        monkeypatch.setattr(manifest_source, "AT_ONCE_BYTES", at_once_bytes)
        monkeypatch.setattr(stepwise, "AT_ONCE_BYTES", at_once_bytes)
        counting = CountingBackground(background)
        reader = ColdReader(store, ColdReaderSettings(read_ahead_blocks=0), SystemClock(), background=counting)
        assert b"".join(await fetched(reader, pointer, 5, MIB)) == b"".join(written)
        assert bool(counting.calls) is goes_aside
        await reader.close()
