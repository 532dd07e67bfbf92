"""How fast cold history is read through ``ColdReader``: one consumer from the beginning to the end, in fetches of 1 MiB.

    PYTHONPATH=tests:. python benchmarks/cold_read.py [--mib 512] [--store /dir | s3://bucket/…?endpoint=…] [--latency-ms 0]

Without ``--store`` a temporary directory is used. The page cache is warm, so a local directory shows what our code costs, not
the disk; ``--latency-ms`` delays each read as a distant store would.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from uuid import uuid4

import uvloop
from support.archive_writer import ArchiveWriter

from stratalog_core.batches.batch import iterate_headers
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import ManifestPointer, Topic
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.cold.verifier import Verifier
from stratalog_tiering.store import STORE_THREADS, ObjectStore, open_store

MIB = 1024 * 1024
RECORDS_PER_BATCH = 16
SEGMENT_MIB = 64


def batches(base_offset: int, total_bytes: int) -> list[bytes]:
    """Batches of 16 KiB from ``base_offset`` on."""
    value = os.urandom(1000)
    made, offset, size = [], base_offset, 0
    while size < total_bytes:
        records = [Record(offset=offset + n, timestamp_ms=offset, key=None, value=value) for n in range(RECORDS_PER_BATCH)]
        made.append(bytes(build_batch(records)))
        offset, size = offset + RECORDS_PER_BATCH, size + len(made[-1])
    return made


async def fill(store: ObjectStore, mib: int) -> ManifestPointer:
    topic = Topic(name="bench", topic_id=uuid4(), partition_count=1, replication_factor=1)
    writer = ArchiveWriter(store, topic, SystemClock(), random.Random())
    offset, pointer = 0, None
    for _ in range(0, mib, SEGMENT_MIB):
        made = batches(offset, min(mib, SEGMENT_MIB) * MIB)
        pointer, entry = await writer.append(0, made)
        offset = entry.end_offset
    assert pointer is not None
    return pointer


class DelayedReads:
    """A store whose ranged reads take longer."""

    def __init__(self, inner: ObjectStore, delay_s: float) -> None:
        self._inner = inner
        self._delay_s = delay_s

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def get_range(self, key: str, start: int, length: int) -> memoryview:
        await asyncio.sleep(self._delay_s)
        return await self._inner.get_range(key, start, length)


async def read_through(store: ObjectStore, pointer: ManifestPointer, read_ahead_blocks: int) -> tuple[float, float]:
    """Seconds of wall and CPU time for everything."""
    reader = ColdReader(store, ColdReaderSettings(read_ahead_blocks=read_ahead_blocks), SystemClock())
    started, cpu = time.perf_counter(), time.process_time()
    offset = pointer.start_offset
    while offset < pointer.end_offset:
        for piece in (await reader.fetch(pointer, offset, MIB, 30)).batches:
            for _, header in iterate_headers(piece):
                offset = header.next_offset
    await reader.close()
    return time.perf_counter() - started, time.process_time() - cpu


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--store", default="")
    parser.add_argument("--latency-ms", type=float, default=0.0)
    options = parser.parse_args()
    background = ThreadBackground(STORE_THREADS, "store")
    with tempfile.TemporaryDirectory() as directory:
        store = open_store(options.store or directory, background=background, clock=SystemClock(), random=random.Random())
        started = time.perf_counter()
        pointer = await fill(store, options.mib)
        mib = pointer.cold_bytes / MIB
        print(f"{store.url}: wrote {mib:.0f} MiB in {time.perf_counter() - started:.1f} s")
        reads = DelayedReads(store, options.latency_ms / 1000) if options.latency_ms else store
        for read_ahead in (0, 4, 8):
            wall_s, cpu_s = await read_through(reads, pointer, read_ahead)  # type: ignore[arg-type]
            print(f"read-ahead {read_ahead}: {mib / wall_s:7.0f} MiB/s, {cpu_s / mib * 1024:.2f} CPU s/GiB")
        started = time.perf_counter()
        report = await Verifier(store, background).partition("bench", pointer)
        print(f"full verification: {mib / (time.perf_counter() - started):.0f} MiB/s, {len(report.findings)} findings")
        await store.close()
    background.close()


if __name__ == "__main__":
    uvloop.run(main())
