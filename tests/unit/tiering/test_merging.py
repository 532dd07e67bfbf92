"""Small neighbours become one segment; what is read is the same before and after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.archive_writer import ArchiveWriter
from stratalog_tiering.manifest import Manifest, SegmentEntry
from stratalog_tiering.manifest_source import ManifestSource
from stratalog_tiering.merging import RUN_MIN, mergeable_run
from stratalog_tiering.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.verify import Verifier

Cluster = Any
Store = Any
Batches = Callable[..., list[bytes]]


async def manifest_of(writer: ArchiveWriter, store: Store, make_batches: Batches, segments: int) -> Manifest:
    for index in range(segments):
        pointer, _ = await writer.append(0, make_batches(index * 2, [2]))
    return await ManifestSource(store).manifest(pointer)


def resized(manifest: Manifest, sizes: list[int]) -> Manifest:
    template, entries = manifest.segments[0], list[SegmentEntry]()
    for index, size in enumerate(sizes):
        entries.append(msgspec.structs.replace(template, base_offset=index * 2, end_offset=index * 2 + 2, object_bytes=size))
    return msgspec.structs.replace(manifest, segments=tuple(entries))


@pytest.mark.parametrize(
    ("sizes", "run"),
    [
        ([10] * (RUN_MIN - 1), (0, 0)),
        ([10] * RUN_MIN, (0, RUN_MIN)),
        ([900, *[10] * RUN_MIN, 900], (1, 1 + RUN_MIN)),
        ([10, 900, *[10] * RUN_MIN], (2, 2 + RUN_MIN)),
        ([125] * 20, (0, 8)),
        ([126] * 20, (0, 0)),
    ],
)
async def test_runs_of_small_segments_are_found(
    writer: ArchiveWriter, store: Store, make_batches: Batches, sizes: list[int], run: tuple[int, int]
) -> None:
    manifest = resized(await manifest_of(writer, store, make_batches, 1), sizes)
    assert mergeable_run(manifest, 1000) == manifest.segments[run[0] : run[1]]


async def test_the_worker_merges_and_nothing_changes_for_readers(
    cluster: Cluster, make_batches: Batches, background: ThreadBackground, store_directory: Path
) -> None:
    await cluster.start_worker("worker-1", segment_bytes=1)
    written: list[bytes] = []
    for base in range(0, RUN_MIN * 2, 2):
        written += make_batches(base, [2], epoch=base)
        await cluster.add_ledger(written[-1:], base, leader_epoch=base)
    await cluster.until(lambda: not cluster.log().ledgers)
    assert len(list(all_segments(store_directory))) == RUN_MIN
    await cluster.close()
    version = cluster.pointer().manifest_version
    await cluster.start_worker("worker-2")
    await cluster.until(lambda: cluster.pointer().manifest_version > version)
    pointer = cluster.pointer()
    manifest = await ManifestSource(cluster.store).manifest(pointer)
    assert [(entry.base_offset, entry.end_offset) for entry in manifest.segments] == [(0, RUN_MIN * 2)]
    assert len(manifest.removed) == RUN_MIN
    reader = ColdReader(cluster.store, ColdReaderSettings(), SystemClock())
    assert b"".join(await reader.fetch(pointer, 0, 10**6, 10)) == b"".join(written)
    assert await reader.leader_epochs(pointer) == [(base, base) for base in range(0, RUN_MIN * 2, 2)]
    await reader.close()
    assert (await Verifier(cluster.store, background).partition("flights", pointer)).findings == ()


def all_segments(directory: Path) -> list[Path]:
    return list(directory.glob("segments/*/*/*"))
