"""Compressed history: fetches, the disk cache, verification and proofs return what plain history returns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from support.archive_writer import ArchiveWriter

from stratalog_core.batches.batch import read_header
from stratalog_core.ports import Background
from stratalog_core.stepwise import AT_ONCE_BYTES
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_metadata.records import ManifestPointer
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.proofs import prove_batch
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.cold.verifier import Verifier
from stratalog_tiering.maintenance.merging import FAN_IN
from stratalog_tiering.metrics import ColdReadMetrics

MIB = 1024 * 1024
Cluster = Any
Store = Any
Batches = Callable[..., list[bytes]]
NewWriter = Callable[..., ArchiveWriter]
Result = TypeVar("Result")
SETTINGS = ColdReaderSettings(read_ahead_blocks=0)


class CountingBackground:
    """Counts the calls that run outside the event loop."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self.calls = 0

    def run(self, call: Callable[[], Result]) -> Awaitable[Result]:
        self.calls += 1
        return self._background.run(call)

    def close(self) -> None: ...


async def write_history(writer: ArchiveWriter, make_batches: Batches, segments: int = 3) -> tuple[ManifestPointer, list[bytes]]:
    written: list[bytes] = []
    for index in range(segments):
        batches = make_batches(index * 30, [6] * 5)
        pointer, _ = await writer.append(0, batches)
        written += batches
    return pointer, written


async def test_every_offset_is_read_with_every_size(new_writer: NewWriter, store: Store, make_batches: Batches) -> None:
    pointer, written = await write_history(new_writer(block_bytes_target=1000, zstd_level=3), make_batches)
    assert pointer.cold_bytes < sum(map(len, written))
    reader = ColdReader(store, SETTINGS, SystemClock())
    whole = b"".join(written)
    for max_bytes in (0, 300, 1000, MIB):
        for offset in range(pointer.end_offset):
            found = await reader.fetch(pointer, offset, max_bytes, 60)
            assert read_header(found.batches[0]).base_offset <= offset < read_header(found.batches[0]).next_offset
            assert b"".join(found.batches) in whole
    assert b"".join((await reader.fetch(pointer, 0, MIB, 60)).batches) == whole
    found_record = await reader.offset_for_timestamp(pointer, 47)
    assert found_record is not None
    assert found_record.offset == 47
    await reader.close()


async def test_a_fetch_starts_only_the_blocks_that_it_needs(new_writer: NewWriter, store: Store, make_batches: Batches) -> None:
    """The room of a fetch is counted in plain bytes: counted as stored, it would load three times as many blocks."""
    writer = new_writer(block_bytes_target=1000, zstd_level=3)
    batches = make_batches(0, [6] * 20)
    pointer, entry = await writer.append(0, batches)
    blocks = (await Archive(store).footer(entry)).blocks
    room = blocks[0].plain_length + 1
    assert sum(block.length for block in blocks[:3]) < room
    reader = ColdReader(store, SETTINGS, SystemClock())
    await reader.fetch(pointer, 0, room, 60)
    await reader.close()
    (counted,) = reader.metrics()
    assert isinstance(counted, ColdReadMetrics)
    assert counted.blocks_loaded == 2


async def test_large_blocks_are_decompressed_beside_the_event_loop(
    new_writer: NewWriter, store: Store, make_batches: Batches, background: ThreadBackground
) -> None:
    (large,) = make_batches(0, [AT_ONCE_BYTES // 40])
    assert len(large) > AT_ONCE_BYTES
    pointer, _ = await new_writer(zstd_level=3).append(0, [large])
    counting = CountingBackground(background)
    reader = ColdReader(store, SETTINGS, SystemClock(), background=counting)
    assert b"".join((await reader.fetch(pointer, 0, 1, 60)).batches) == large
    await reader.close()
    assert counting.calls == 1


async def test_the_disk_cache_holds_compressed_blocks_and_verifies_them(
    new_writer: NewWriter, store: Store, make_batches: Batches, tmp_path: Path, background: ThreadBackground
) -> None:
    pointer, written = await write_history(new_writer(block_bytes_target=1000, zstd_level=3), make_batches)
    settings = ColdReaderSettings(disk_bytes=MIB, read_ahead_blocks=0)
    files = SystemFiles(tmp_path / "cache")
    # Memory for no block, so that each is read again.
    reader = ColdReader(store, settings, SystemClock(), memory_bytes=400, files=files, background=background)

    async def read() -> bytes:
        content = b""
        for one in written:
            content += bytes((await reader.fetch(pointer, read_header(one).base_offset, 1, 60)).batches[0])
        await reader.close()
        return content

    assert await read() == b"".join(written)
    paths = [tmp_path / "cache/blocks" / name for name in files.list("blocks")]
    assert sum(path.stat().st_size for path in paths) < sum(map(len, written)) / 2
    (counted,) = reader.metrics()
    assert isinstance(counted, ColdReadMetrics)
    loaded, hits = counted.blocks_loaded, counted.disk_hits
    assert await read() == b"".join(written)
    assert (counted.blocks_loaded, counted.disk_hits) == (loaded, hits + len(written))
    for path in paths:
        path.write_bytes(b"spoiled")
    assert await read() == b"".join(written), "a spoiled cache is a miss"
    assert counted.blocks_loaded > loaded


async def test_compressed_history_verifies_and_its_batches_are_proved(
    new_writer: NewWriter, store: Store, store_directory: Path, make_batches: Batches, background: ThreadBackground
) -> None:
    pointer, written = await write_history(new_writer(block_bytes_target=1000, zstd_level=3), make_batches)
    source = ManifestSource(store)
    manifest = await source.manifest(pointer)
    for index, batch in enumerate(written):
        proof = await prove_batch(store, source, background, manifest, read_header(batch).base_offset)
        assert proof.leaf_index == index
        assert proof.holds(batch)
    verifier = Verifier(store, background)
    report = await verifier.partition("flights", pointer)
    assert report.findings == ()
    assert (report.progress.bytes, report.progress.records) == (pointer.cold_bytes, 90)
    path = store_directory / manifest.segments[1].key
    content = bytearray(path.read_bytes())
    block = (await source.footer(manifest.segments[1])).blocks[1]
    content[block.position + 30] ^= 1
    path.write_bytes(content)
    (finding,) = (await verifier.partition("flights", pointer)).findings
    assert (finding.key, finding.block) == (manifest.segments[1].key, 1)


async def test_new_and_merged_segments_have_the_compression_that_the_topic_asks_for_now(
    cluster: Cluster, make_batches: Batches, background: ThreadBackground
) -> None:
    written: list[bytes] = []

    async def configure(**configs: str) -> None:
        topic = msgspec.structs.replace(cluster.topic, configs={"retention.ms": "-1", **configs})
        await cluster.metadata.propose(Command(updates=(Put(record=topic),)))

    async def add(count: int) -> None:
        for _ in range(count):
            base = len(written) * 10
            written.extend(make_batches(base, [10]))
            await cluster.add_ledger(written[-1:], base)
        await cluster.until(lambda: cluster.pointer() is not None and not cluster.log().ledgers)

    async def compressions() -> list[str]:
        source = ManifestSource(cluster.store)
        manifest = await source.manifest(cluster.pointer())
        return [(await source.footer(entry)).block_compression for entry in manifest.segments]

    await cluster.start_worker("worker-1", segment_bytes=1)
    await add(2)
    await configure(**{"stratalog.tier.compression": "zstd", "stratalog.tier.compression.zstd.level": "1"})
    await add(2)
    await configure(**{"stratalog.tier.compression": "none"})
    await add(1)
    assert await compressions() == ["none", "none", "zstd", "zstd", "none"]
    await configure(**{"stratalog.tier.compression": "zstd"})
    await add(FAN_IN - 5)
    version = cluster.pointer().manifest_version
    await cluster.close()
    await cluster.start_worker("worker-2")
    await cluster.until(lambda: cluster.pointer().manifest_version > version)
    assert await compressions() == ["zstd"]
    reader = ColdReader(cluster.store, SETTINGS, SystemClock())
    assert b"".join((await reader.fetch(cluster.pointer(), 0, MIB, 60)).batches) == b"".join(written)
    await reader.close()
    assert (await Verifier(cluster.store, background).partition("flights", cluster.pointer())).findings == ()
