"""Verification finds every change in a bucket and reports its place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.archive_writer import ArchiveWriter

from stratalog_core.batches.checkpoint import ProducerEntry
from stratalog_core.errors import Refused, StratalogError
from stratalog_core.system import ThreadBackground
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.segment_check import check_segment
from stratalog_tiering.cold.verifier import PartitionReport, Progress, Verifier

Store = Any
Batches = Callable[..., list[bytes]]


@pytest.fixture
def verifier(store: Store, background: ThreadBackground) -> Verifier:
    return Verifier(store, background)


async def fill(writer: ArchiveWriter, make_batches: Batches, segments: int = 12) -> list[str]:
    keys = []
    for index in range(segments):
        _, entry = await writer.append(0, make_batches(index * 24, [3] * 8))
        keys.append(entry.key)
    return keys


async def verify(verifier: Verifier) -> list[PartitionReport]:
    return [report async for report in verifier.bucket()]


async def test_a_sound_bucket_has_no_findings(
    writer: ArchiveWriter, store: Store, background: ThreadBackground, make_batches: Batches
) -> None:
    await fill(writer, make_batches)
    seen: list[int] = []

    def on_progress(progress: Progress) -> None:
        seen.append(progress.bytes)

    (report,) = await verify(Verifier(store, background, on_progress=on_progress))
    assert report.findings == ()
    progress = report.progress
    assert (progress.topic, progress.partition, progress.records) == ("flights", 0, 288)
    assert (progress.segments, progress.bytes) == (progress.segments_total, progress.bytes_total)
    assert progress.manifest_versions == 12
    assert seen == sorted(seen)


async def test_a_store_that_refuses_to_answer_is_no_damage(
    writer: ArchiveWriter, store: Store, background: ThreadBackground, make_batches: Batches
) -> None:
    """As with credentials that expire meanwhile: nothing was found to be of an unknown format."""
    await fill(writer, make_batches, segments=3)
    store.calls.clear()
    await verify(Verifier(store, background))
    count = len(store.calls)
    assert count > 6
    for answered in range(count):
        store.calls.clear()
        store.before = lambda name, key, n=answered: Refused("expired") if len(store.calls) > n else None
        with pytest.raises(Refused, match="expired"):
            await verify(Verifier(store, background))


async def test_a_flipped_byte_is_named_by_segment_block_and_offsets(
    writer: ArchiveWriter, store: Store, verifier: Verifier, store_directory: Path, make_batches: Batches
) -> None:
    keys = await fill(writer, make_batches)
    archive = Archive(store)
    pointer = await archive.pointer(await archive.topic("flights"), 0)
    assert pointer is not None
    entries = [entry async for entry in archive.segments(await archive.manifest(pointer))]
    block = (await archive.footer(entries[4])).blocks[2]
    flip(store_directory / keys[4], block.position + 10)
    (report,) = await verify(verifier)
    (finding,) = report.findings
    assert (finding.key, finding.block) == (keys[4], 2)
    assert (finding.base_offset, finding.end_offset) == (block.base_offset, block.last_offset + 1)
    assert keys[4] in str(finding)
    assert "block 2" in str(finding)


async def test_neighbouring_blocks_are_read_together(
    writer: ArchiveWriter, store: Store, background: ThreadBackground, make_batches: Batches
) -> None:
    await fill(writer, make_batches, segments=1)
    archive = Archive(store)
    topic = await archive.topic("flights")
    pointer = await archive.pointer(topic, 0)
    assert pointer is not None
    (entry,) = [entry async for entry in archive.segments(await archive.manifest(pointer))]
    blocks = len((await archive.footer(entry)).blocks)
    assert blocks > 4
    store.calls.clear()
    (report,) = await verify(Verifier(store, background, reads_at_once=4))
    assert report.findings == ()
    # One more for the footer.
    assert store.count("get_range") == 1 + -(-blocks // 4)


async def test_sections_are_verified_by_the_read_of_the_footer(
    writer: ArchiveWriter, store: Store, verifier: Verifier, store_directory: Path, make_batches: Batches
) -> None:
    _, entry = await writer.append(0, make_batches(0, [3]), producers=[ProducerEntry(7, 1)])
    store.calls.clear()
    (report,) = await verify(verifier)
    assert report.findings == ()
    assert store.count("get_range") == 2, "one for footer and section, one for the blocks"
    flip(store_directory / entry.key, entry.data_bytes + 1)
    (report,) = await verify(verifier)
    (finding,) = report.findings
    assert finding.key == entry.key
    assert "section 'producers'" in finding.problem


async def test_a_cut_joint_read_reports_only_the_missing_blocks(
    writer: ArchiveWriter, store: Store, background: ThreadBackground, store_directory: Path, make_batches: Batches
) -> None:
    (key,) = await fill(writer, make_batches, segments=1)
    archive = Archive(store)
    pointer = await archive.pointer(await archive.topic("flights"), 0)
    assert pointer is not None
    (entry,) = [entry async for entry in archive.segments(await archive.manifest(pointer))]
    blocks = (await archive.footer(entry)).blocks
    whole = (store_directory / key).read_bytes()
    source = ManifestSource(store)
    check = check_segment(store, source, entry, background, reads_at_once=4)
    first = asyncio.ensure_future(anext(check))

    def cut_behind_the_footer(name: str, called: str) -> None:
        if name == "get_range" and store.count("get_range") == 2:
            (store_directory / key).write_bytes(whole[: blocks[2].position + 1])

    store.calls.clear()
    store.before = cut_behind_the_footer
    found = [await first, *[finding async for finding in check]]
    assert [finding.block for finding in found] == list(range(2, len(blocks)))


async def test_a_changed_footer_and_a_missing_or_cut_segment_are_named(
    writer: ArchiveWriter, verifier: Verifier, store_directory: Path, make_batches: Batches
) -> None:
    keys = await fill(writer, make_batches)
    flip(store_directory / keys[1], -40)
    cut(store_directory / keys[3])
    remove(store_directory / keys[5])
    (report,) = await verify(verifier)
    assert [finding.key for finding in report.findings] == [keys[1], keys[3], keys[5]]
    assert "missing" in report.findings[2].problem


@pytest.mark.parametrize("kind", ["pages/*/*/*", "manifests/*/*/*.manifest"])
async def test_a_changed_page_or_manifest_is_found(
    writer: ArchiveWriter, verifier: Verifier, store_directory: Path, make_batches: Batches, kind: str
) -> None:
    await fill(writer, make_batches)
    for path in matching(store_directory, kind):
        flip(path, 60)
    (report,) = await verify(verifier)
    assert len(report.findings) >= 1


async def test_a_changed_older_manifest_breaks_the_chain(
    writer: ArchiveWriter, verifier: Verifier, store_directory: Path, make_batches: Batches
) -> None:
    await fill(writer, make_batches, 3)
    oldest = matching(store_directory, "manifests/*/*/*.manifest")[-1]
    flip(oldest, 60)
    (report,) = await verify(verifier)
    (finding,) = report.findings
    assert finding.key.endswith(oldest.name)
    remove(oldest)
    (report,) = await verify(verifier)
    assert report.findings == (), "versions beyond the grace period are gone by right"


def matching(directory: Path, pattern: str) -> list[Path]:
    return sorted(directory.glob(pattern))


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path) -> None:
    path.unlink()


async def test_the_structure_alone_has_the_findings_of_everything_but_the_segments(
    writer: ArchiveWriter, store: Store, verifier: Verifier, store_directory: Path, make_batches: Batches
) -> None:
    keys = await fill(writer, make_batches)
    archive = Archive(store)
    pointer = await archive.pointer(await archive.topic("flights"), 0)
    assert pointer is not None
    sound = await verifier.structure("flights", pointer)
    assert (sound.findings, [entry.key for entry in sound.segments]) == ((), keys)
    assert sound.proofs is not None
    damaged = 0
    for path in others(store_directory):
        content = path.read_bytes()
        flip(path, len(content) // 2)
        found, report = await verifier.structure("flights", pointer), await verifier.partition("flights", pointer)
        assert found.findings == report.findings, path
        damaged += len(found.findings)
        path.write_bytes(content)
    assert damaged >= len(keys)


async def test_the_rest_of_the_structure_is_verified_without_a_part_that_the_store_does_not_return(
    writer: ArchiveWriter, store: Store, background: ThreadBackground, store_directory: Path, make_batches: Batches
) -> None:
    keys = await fill(writer, make_batches)
    archive = Archive(store)
    pointer = await archive.pointer(await archive.topic("flights"), 0)
    assert pointer is not None
    told: list[str] = []

    async def on_not_returned(key: str, failure: StratalogError) -> None:
        assert isinstance(failure, Refused)
        told.append(key)

    skipped: set[str] = set()
    for path in others(store_directory):
        refused = str(path.relative_to(store_directory))
        store.before = lambda name, key, refused=refused: Refused("archived") if key == refused else None
        told.clear()
        verifier = Verifier(store, background, on_not_returned=on_not_returned)
        if refused == pointer.object_key:
            with pytest.raises(Refused):
                await verifier.structure("flights", pointer)
            continue
        found = await verifier.structure("flights", pointer)
        assert (found.findings, found.not_returned) == ((), frozenset(told)), refused
        shown = [entry.key for entry in found.segments]
        assert shown == keys or (refused.startswith("pages/") and shown == [key for key in keys if key in shown] != [])
        assert found.proofs is not None
        skipped.update(key.partition("/")[0] for key in told)
        if told:
            with pytest.raises(Refused):
                await Verifier(store, background).structure("flights", pointer)
    assert skipped == {"pages", "manifests"}


def others(store_directory: Path) -> list[Path]:
    """Return all objects but the segments."""
    return [path for path in sorted(store_directory.rglob("*")) if path.is_file() and path.suffix != ".segment"]
