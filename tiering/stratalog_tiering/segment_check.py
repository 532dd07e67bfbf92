"""Checks one segment in the store against its manifest line: all of it, or the little that tells whether it is still there.

A full check reads every byte: size, footer (SHA-256 from the manifest), each block's CRC, Merkle leaf, batch CRCs and offsets.
What is found wrong is a :class:`Finding` with its place; a store that does not answer is ``Unavailable`` and no finding.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from stratalog_core.errors import Corrupt, Invalid, NoSuchObject
from stratalog_core.ports import Background
from stratalog_tiering.footer import BlockEntry
from stratalog_tiering.manifest import SegmentEntry
from stratalog_tiering.manifest_source import ManifestSource
from stratalog_tiering.segment import SegmentFooter, audit_block
from stratalog_tiering.store import ObjectStore

OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something wrong. ``block`` is None where no block is to blame; offsets: base inclusive, end exclusive."""

    key: str
    problem: str
    base_offset: int
    end_offset: int
    block: int | None = None

    def __str__(self) -> str:
        place = "" if self.block is None else f", block {self.block}"
        return f"{self.key}{place}, offsets {self.base_offset}..{self.end_offset - 1}: {self.problem}"


async def check_presence(store: ObjectStore, source: ManifestSource, entry: SegmentEntry) -> SegmentFooter:
    """Size and footer, read anew from the store; returns the footer. Raises ``Corrupt``, ``Unavailable``."""
    try:
        info = await store.head(entry.key)
    except NoSuchObject as gone:
        raise Corrupt(f"segment {entry.key} is missing from {store.url}", key=entry.key) from gone
    if info.size_bytes != entry.object_bytes:
        raise Corrupt(f"segment {entry.key} has {info.size_bytes} bytes, not {entry.object_bytes}", key=entry.key)
    footer = await source.read_footer(entry)
    _compare(entry, footer)
    return footer


async def check_segment(
    store: ObjectStore,
    source: ManifestSource,
    entry: SegmentEntry,
    background: Background,
    *,
    reads_at_once: int,
    on_bytes: OnBytes = lambda _: None,
) -> AsyncIterator[Finding]:
    """Everything wrong with the segment, in the order of its blocks."""
    try:
        footer = await check_presence(store, source, entry)
    except (Corrupt, Invalid) as bad:
        yield _finding(entry, bad.message)
        return
    for first in range(0, len(footer.blocks), reads_at_once):
        group = range(first, min(first + reads_at_once, len(footer.blocks)))
        checks = (_check_block(store, entry, index, footer.blocks[index], background) for index in group)
        for found in await asyncio.gather(*checks):
            if found is not None:
                yield found
        on_bytes(sum(footer.blocks[index].length for index in group))


async def require_sound(
    store: ObjectStore, source: ManifestSource, entry: SegmentEntry, background: Background, *, reads_at_once: int
) -> None:
    """Read the whole segment back. Raises ``Corrupt`` with the first thing that is wrong."""
    async for finding in check_segment(store, source, entry, background, reads_at_once=reads_at_once):
        raise Corrupt(f"the copy in {store.url} does not verify: {finding}", key=entry.key)


async def _check_block(
    store: ObjectStore, entry: SegmentEntry, index: int, block: BlockEntry, background: Background
) -> Finding | None:
    try:
        content = await store.get_range(entry.key, block.position, block.length)
        await background.run(lambda: audit_block(content, block))
    except (Corrupt, NoSuchObject) as bad:
        return Finding(
            key=entry.key, problem=bad.message, base_offset=block.base_offset, end_offset=block.last_offset + 1, block=index
        )
    return None


def _compare(entry: SegmentEntry, footer: SegmentFooter) -> None:
    said = (entry.base_offset, entry.end_offset, entry.record_count, entry.data_bytes, entry.merkle_root)
    found = (footer.base_offset, footer.end_offset, footer.record_count, footer.data_bytes, footer.merkle_root)
    if said != found:
        raise Corrupt(f"segment {entry.key} holds {found[:4]}, its manifest says {said[:4]}", key=entry.key)


def _finding(entry: SegmentEntry, problem: str) -> Finding:
    return Finding(key=entry.key, problem=problem, base_offset=entry.base_offset, end_offset=entry.end_offset)
