"""Segments that share an object, or begin elsewhere in one, are read and verified as any others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
from support.archive_writer import ArchiveWriter

from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.proofs import prove_batch
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.cold.verifier import Verifier
from stratalog_tiering.format.manifest import (
    Manifest,
    PresentBatches,
    SegmentEntry,
    SegmentKind,
    SegmentOptions,
    encode_manifest,
    pointer_to,
)
from stratalog_tiering.format.object_frame import object_sha256

Store = Any
Batches = Callable[..., list[bytes]]


async def committed(store: Store, pointer: ManifestPointer, segments: list[SegmentEntry]) -> tuple[ManifestPointer, Manifest]:
    """The history of ``pointer`` with other entries of its segments."""
    manifest = await ManifestSource(store).manifest(pointer)
    cold_bytes = sum(entry.stored_bytes for entry in segments)
    changed = msgspec.structs.replace(manifest, segments=tuple(segments), cold_bytes=cold_bytes, previous_key="")
    content = encode_manifest(changed)
    key = pointer.object_key.replace(".manifest", "0.manifest")
    await store.put(key, [content])
    return pointer_to(changed, key, object_sha256(content)), changed


async def packed(store: Store, entries: list[SegmentEntry]) -> list[SegmentEntry]:
    """The same segments, in one object behind some other bytes."""
    content, moved = bytearray(b"x" * 1000), []
    for entry in entries:
        moved.append((entry, len(content)))
        content += await store.get(entry.key)
    key, sha256 = entries[0].key.replace(".segment", "0.segment"), hashlib.sha256(content).digest()
    await store.put(key, [bytes(content)])
    return [
        msgspec.structs.replace(
            entry, key=key, data_position=start, footer_position=start + entry.footer_position, object_bytes=len(content),
            object_sha256=sha256,
        )
        for entry, start in moved
    ]  # fmt: skip


async def test_segments_of_one_object_are_told_apart(
    writer: ArchiveWriter, store: Store, background: ThreadBackground, make_batches: Batches
) -> None:
    batches = [make_batches(index * 24, [3] * 8) for index in range(3)]
    for each in batches:
        pointer, _ = await writer.append(0, each)
    segments = list((await ManifestSource(store).manifest(pointer)).segments)
    pointer, manifest = await committed(store, pointer, await packed(store, segments))
    reader = ColdReader(store, ColdReaderSettings(), SystemClock())
    offset, content = 0, b""
    while offset < pointer.end_offset:
        run = await reader.fetch(pointer, offset, 10**6, 60)
        content += b"".join(run.batches)
        offset = run.end_offset
    await reader.close()
    assert content == b"".join(batch for each in batches for batch in each)
    report = await Verifier(store, background).partition("flights", pointer)
    assert report.findings == ()
    assert report.progress.bytes == report.progress.bytes_total
    proof = await prove_batch(store, ManifestSource(store), background, manifest, 30)
    assert proof.holds(batches[1][2])


async def test_an_entry_and_a_segment_agree_in_whether_batches_are_missing(
    writer: ArchiveWriter, store: Store, background: ThreadBackground, make_batches: Batches
) -> None:
    pointer, entry = await writer.append(0, make_batches(0, [3, 4]))
    options = SegmentOptions(present=PresentBatches(base_offset=0, end_offset=7, batch_count=2))
    pointer, _ = await committed(store, pointer, [msgspec.structs.replace(entry, kind=SegmentKind.COMPACTED, options=options)])
    (finding,) = (await Verifier(store, background).partition("flights", pointer)).findings
    assert "its manifest says" in finding.problem


async def test_an_object_that_does_not_match_its_checksum_is_found(
    writer: ArchiveWriter, store: Store, background: ThreadBackground, make_batches: Batches
) -> None:
    pointer, entry = await writer.append(0, make_batches(0, [3, 4]))
    pointer, _ = await committed(store, pointer, [msgspec.structs.replace(entry, object_sha256=bytes(32))])
    (finding,) = (await Verifier(store, background).partition("flights", pointer)).findings
    assert "the object's SHA-256 is not that of its manifest entry" in finding.problem
