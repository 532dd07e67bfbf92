"""Verifies one segment in the store against its manifest entry: all of it, or only that it is still there.

A full check reads every byte from storage: size, footer (SHA-256 from the manifest), sections, and, bypassing the page cache,
each block's CRC, Merkle leaves, batch CRCs and offsets. Neighbouring blocks are read together. Damage is reported as
:class:`Finding` with its place; a store that does not answer, or refuses to, raises ``Unavailable`` or ``Refused`` and is not a
finding.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from stratalog_core.errors import Corrupt, Invalid, NoSuchObject, OutcomeUnknown, Refused, StorageFailed, Unavailable
from stratalog_core.ports import Background
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.whole_objects import check_size, ends_object, has_own_object, read_whole
from stratalog_tiering.core.damage import Damage, Finding, segment_finding
from stratalog_tiering.format.block_cipher import BlockCipher
from stratalog_tiering.format.footer import BlockEntry
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.format.merkle import batch_leaf
from stratalog_tiering.format.segment import SegmentFooter, audit_block, iterate_block_batches
from stratalog_tiering.store import ObjectStore

OnBytes = Callable[[int], None]
OnContent = Callable[[memoryview, Sequence[memoryview]], None]
"""Takes stored bytes of a segment, and the plain blocks that they hold: none behind the blocks."""
Take = Callable[[int], Awaitable[None]]
"""Returns when so many bytes more may be read."""
WHOLE_BYTES_MAX: Final = 8 * 1024 * 1024
"""A segment of at most this size that has its object for itself is read back with one GET."""
NOT_RETURNED: Final = (OutcomeUnknown, Refused, StorageFailed, Unavailable)
"""Errors about an object that the store does not return: archived, without its key, below its read quorum."""
_READ_BYTES_MAX: Final = 4 * 1024 * 1024
"""Plain size of neighbouring blocks that are read together; a larger block is read alone."""


async def unlimited(_: int) -> None:
    """A ``Take`` that never waits."""


async def require_answers(store: ObjectStore, key: str) -> None:
    """Tell a store that does not return one object from one that is away: ask about ``key``. Raises what the latter raises."""
    with suppress(NoSuchObject):
        await store.head(key)


async def check_presence(store: ObjectStore, source: ManifestSource, entry: SegmentEntry) -> tuple[SegmentFooter, memoryview]:
    """Check size, footer and sections, read again from the store; returns the footer, and all bytes behind the blocks.

    One read shows all if the object ends with the segment; else its size is asked for. Raises ``Corrupt``, ``Unavailable``.
    """
    if not ends_object(entry):
        try:
            info = await store.head(entry.key)
        except NoSuchObject as gone:
            raise Corrupt(f"segment {entry.key} is missing from {store.url}", key=entry.key) from gone
        check_size(entry, info.size_bytes)
    footer, tail = await source.read_tail(entry)
    _compare(entry, footer)
    return footer, tail


async def check_segment(
    store: ObjectStore,
    source: ManifestSource,
    entry: SegmentEntry,
    background: Background,
    *,
    reads_at_once: int,
    on_bytes: OnBytes = lambda _: None,
    on_content: OnContent | None = None,
    take: Take = unlimited,
) -> AsyncIterator[Finding]:
    """Verify the whole segment; yields all damage in block order.

    ``on_bytes`` receives the number of bytes verified. ``on_content`` receives the content of sound blocks, in order, and
    at last the bytes behind the blocks, on threads of ``background``. ``take`` is awaited before each read.
    """
    await take(entry.stored_bytes - entry.data_bytes)
    try:
        footer, tail = await check_presence(store, source, entry)
        cipher = await source.cipher(footer)
    except (Corrupt, Invalid) as bad:
        yield segment_finding(entry, _kind(bad), bad.message)
        return
    for first in range(0, len(footer.blocks), reads_at_once):
        group = range(first, min(first + reads_at_once, len(footer.blocks)))
        group_bytes = sum(footer.blocks[index].length for index in group)
        await take(group_bytes)
        checks = (_check_run(store, entry, footer.blocks, cipher, run, background) for run in _runs(footer.blocks, group))
        for findings, contents in await asyncio.gather(*checks):
            for found in findings:
                yield found
            for content in contents if on_content is not None else ():
                await background.run(lambda content=content: on_content(*content))  # type: ignore[misc]
        on_bytes(group_bytes)
    if on_content is not None:
        await background.run(lambda: on_content(tail, ()))


def _kind(bad: Corrupt | Invalid) -> Damage:
    if isinstance(bad, Invalid):
        return Damage.UNKNOWN_FORMAT
    if isinstance(bad.__cause__, NoSuchObject) and "damage" not in bad.detail:
        return Damage.SEGMENT_MISSING
    return Damage.SEGMENT_SECTION if "section" in bad.detail else Damage(bad.detail.get("damage", Damage.SEGMENT_FOOTER))


def block_leaves(blocks: Sequence[memoryview]) -> bytes:
    """The Merkle leaves of plain blocks, one for each batch."""
    return b"".join(batch_leaf(batch) for block in blocks for batch, _ in iterate_block_batches(block))


async def require_sound(
    store: ObjectStore,
    source: ManifestSource,
    entry: SegmentEntry,
    background: Background,
    *,
    reads_at_once: int,
    take: Take = unlimited,
) -> None:
    """Read the whole segment back and verify it, a small one with one GET. ``take`` is awaited before each read.

    Raises ``Corrupt`` with the first finding, ``Unavailable``.
    """
    if has_own_object(entry) and entry.object_bytes <= WHOLE_BYTES_MAX:
        await take(entry.object_bytes)
        store, take = await read_whole(store, [entry]), unlimited
        source = ManifestSource(store, background=background)
    async for finding in check_segment(store, source, entry, background, reads_at_once=reads_at_once, take=take):
        raise Corrupt(f"the copy in {store.url} does not verify: {finding}", key=entry.key)


def _runs(blocks: Sequence[BlockEntry], indexes: range) -> Iterator[range]:
    """Ranges of adjacent blocks, each as large as one read may be."""
    first, plain_bytes = indexes.start, blocks[indexes.start].plain_length
    for index in indexes[1:]:
        plain_bytes += blocks[index].plain_length
        if blocks[index].position != blocks[index - 1].end_position or plain_bytes > _READ_BYTES_MAX:
            yield range(first, index)
            first, plain_bytes = index, blocks[index].plain_length
    yield range(first, indexes.stop)


_Content = tuple[memoryview, Sequence[memoryview]]


async def _check_run(
    store: ObjectStore,
    entry: SegmentEntry,
    blocks: Sequence[BlockEntry],
    cipher: BlockCipher | None,
    run: range,
    background: Background,
) -> tuple[list[Finding], list[_Content]]:
    """The damage in a run of blocks, and the run's content if it is sound."""
    start, last = blocks[run.start].position, blocks[run.stop - 1]
    position, length = entry.data_position + start, last.position + last.length - start
    try:
        content = await store.get_range(entry.key, position, length, uncached=True)
    except (Corrupt, NoSuchObject) as bad:
        if len(run) == 1:
            return [_block_finding(entry, run.start, blocks[run.start], bad)], []
        # Read them one by one, to find out which are damaged or missing.
        parts = [await _check_run(store, entry, blocks, cipher, range(index, index + 1), background) for index in run]
        return [found for findings, _ in parts for found in findings], [each for _, contents in parts for each in contents]
    findings, plain = await background.run(lambda: _audit_run(entry, blocks, cipher, run, content))
    return findings, [] if findings else [(content, plain)]


def _audit_run(
    entry: SegmentEntry, blocks: Sequence[BlockEntry], cipher: BlockCipher | None, run: range, content: memoryview
) -> tuple[list[Finding], list[memoryview]]:
    """The damage in a run of blocks, and its sound blocks as their batches."""
    findings, plain, start = list[Finding](), list[memoryview](), blocks[run.start].position
    for index in run:
        block = blocks[index]
        try:
            stored = content[block.position - start : block.end_position - start]
            plain.append(audit_block(stored, block, cipher=cipher, is_compacted=entry.is_compacted))
        except Corrupt as bad:
            findings.append(_block_finding(entry, index, block, bad))
    return findings, plain


def _block_finding(entry: SegmentEntry, index: int, block: BlockEntry, bad: Corrupt | NoSuchObject) -> Finding:
    end_offset = block.last_offset + 1
    kind = Damage.SEGMENT_MISSING if isinstance(bad, NoSuchObject) else Damage.SEGMENT_DATA
    return Finding(
        kind=kind, key=entry.key, problem=bad.message, base_offset=block.base_offset, end_offset=end_offset, block=index
    )


def _compare(entry: SegmentEntry, footer: SegmentFooter) -> None:
    said = (
        entry.base_offset, entry.end_offset, entry.record_count, entry.batch_count, entry.data_bytes, entry.is_compacted
    )  # fmt: skip
    found = (
        footer.base_offset, footer.end_offset, footer.record_count, footer.batch_count, footer.data_bytes, footer.is_compacted
    )  # fmt: skip
    if said != found:
        raise Corrupt(f"segment {entry.key} holds {found}, its manifest says {said}", key=entry.key)
