"""Which transactions are open where a segment of a partition's history begins.

Segments do not say it: only decided transactions are offloaded, but one may begin in a segment and end in a later one. It is
found from the producers at the end of the segment before, which all open transactions are of, and the batches from each
producer's last one on: its transaction is open unless a marker follows. So a producer whose last transaction has ended costs
one block or a few, and one whose transaction is open costs the blocks since its last batch.

Two kinds of transactions have no marker and are not open. Compaction leaves batches without records of aborted ones; they do
not count, and if the last batch of a producer is one, or is gone, its earlier ones are read. A restore loses markers that were
not offloaded; no transaction is open beyond it. It is known by the leader epochs that it leaves out.

It reads the object store and changes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import partial

from stratalog_core.batches.batch import BatchHeader
from stratalog_core.partition_state.transactions import ABORT, COMMIT, read_marker
from stratalog_core.ports import Background
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.core.restoring import EPOCH_GAP
from stratalog_tiering.format.manifest import Manifest, SegmentEntry
from stratalog_tiering.format.segment import BlockEntry, audit_block, find_block, iterate_block_batches
from stratalog_tiering.store import ObjectStore


async def blocks_from(
    store: ObjectStore, source: ManifestSource, background: Background, entry: SegmentEntry, offset: int
) -> AsyncIterator[tuple[BlockEntry, memoryview]]:
    """The segment's blocks and their plain bytes, from the one with ``offset`` on, each verified. Raises ``Corrupt``."""
    footer = await source.footer(entry)
    cipher = await source.cipher(footer)
    for block in footer.blocks[find_block(footer.blocks, offset) :]:
        stored = await store.get_range(entry.key, entry.data_position + block.position, block.length)
        audit = partial(audit_block, stored, block, cipher=cipher, is_compacted=entry.is_compacted)
        yield block, await background.run(audit)


def is_restored_between(last_epoch: int, next_epoch: int) -> bool:
    """Whether the history was restored between batches of these leader epochs: the new owner knew no open transaction."""
    return next_epoch - last_epoch >= EPOCH_GAP


class OpenTransactions:
    """The open transactions of one manifest's history."""

    def __init__(self, store: ObjectStore, source: ManifestSource, background: Background, manifest: Manifest) -> None:
        self._store = store
        self._source = source
        self._background = background
        self._manifest = manifest
        self._ended: dict[tuple[int, int], int] = {}
        """Where a transaction was found to have ended, by producer and the last offset of its last batch."""

    async def at(self, entry: SegmentEntry) -> list[int]:
        """The producers that have a transaction with records below ``entry``, one of the manifest's, open where it begins.

        Raises ``Corrupt``, ``Unavailable``.
        """
        before = await self.before(entry)
        if before is None or is_restored_between(before.leader_epochs[-1].epoch, entry.leader_epochs[0].epoch):
            return []
        lasts: dict[int, int] = {}
        for each in await self._source.producers(before):
            last = each.batches[-1].last_offset if each.batches else -1
            if last >= self._manifest.start_offset and not self._ended_before(each.producer_id, last, entry.base_offset):
                lasts[each.producer_id] = last
        found = await _Search(self, lasts, entry.base_offset).run(lasts)
        doubtful = {producer_id: last for producer_id, last in lasts.items() if producer_id not in found}
        is_open = {producer_id for producer_id, opened in found.items() if opened}
        return sorted(is_open | await self._have_earlier(doubtful))

    def _ended_before(self, producer_id: int, last: int, offset: int) -> bool:
        ended = self._ended.get((producer_id, last))
        return ended is not None and ended < offset

    async def _have_earlier(self, doubtful: Mapping[int, int]) -> set[int]:
        """Those of the producers of which the last batch with records is in an open transaction; the values are ends."""
        opened: set[int] = set()
        for producer_id, last in doubtful.items():
            end, entry = last, await self._source.segment_at(self._manifest, last)
            while entry is not None:
                found = await _Search(self, {}, end).run({producer_id: entry.base_offset})
                if producer_id in found:
                    opened |= {producer_id} if found[producer_id] else set()
                    break
                end, entry = entry.base_offset, await self.before(entry)
                if entry is not None and all(each.producer_id != producer_id for each in await self._source.producers(entry)):
                    break
        return opened

    async def before(self, entry: SegmentEntry) -> SegmentEntry | None:
        """The segment before, if the history has one."""
        if entry.base_offset <= self._manifest.start_offset:
            return None
        return await self._source.segment_at(self._manifest, entry.base_offset - 1)

    async def blocks(self, offset: int) -> AsyncIterator[tuple[BlockEntry, memoryview]]:
        """The blocks from the one with ``offset`` to the end of its segment."""
        entry = await self._source.segment_at(self._manifest, offset)
        assert entry is not None, f"offset {offset} is in the history"
        async for found in blocks_from(self._store, self._source, self._background, entry, offset):
            yield found

    def note_end(self, producer_id: int, last: int, offset: int) -> None:
        """Note that a transaction has ended at ``offset``; ``last`` is the last offset of the producer's last batch."""
        self._ended[producer_id, last] = offset


class _Search:
    """The state of producers' transactions at ``end_offset``, by their last batches below it.

    ``lasts``: the last offset of a producer's last batch. A marker beyond it ends the search for the producer.
    """

    def __init__(self, history: OpenTransactions, lasts: Mapping[int, int], end_offset: int) -> None:
        self._history = history
        self._lasts = lasts
        self._end_offset = end_offset
        self._waiting: list[tuple[int, int]] = []
        """Where to begin and producer, the next one last."""
        self._read: set[int] = set()
        """The producers whose batches are followed."""
        self._is_open: dict[int, bool] = {}
        self._epoch = 0

    async def run(self, begin: Mapping[int, int]) -> dict[int, bool]:
        """Whether each producer's transaction is open, by its batches from an offset on; no element if there is none."""
        self._waiting = sorted(((offset, producer_id) for producer_id, offset in begin.items()), reverse=True)
        offset = 0
        while self._read or self._waiting:
            offset = offset if self._read else max(offset, self._waiting[-1][0])
            if offset >= self._end_offset:
                break
            async for block, content in self._history.blocks(offset):
                for batch, header in iterate_block_batches(content):
                    if header.base_offset < self._end_offset:
                        self._add(batch, header)
                offset = block.last_offset + 1
                if not self._read or offset >= self._end_offset:
                    break
        return self._is_open

    def _add(self, batch: memoryview, header: BatchHeader) -> None:
        if is_restored_between(self._epoch, header.leader_epoch):
            for producer_id in list(self._read):
                self._close(producer_id, header.base_offset)
        self._epoch = header.leader_epoch
        while self._waiting and self._waiting[-1][0] <= header.last_offset:
            self._read.add(self._waiting.pop()[1])
        if header.producer_id not in self._read:
            return
        if header.is_control:
            # Compaction keeps a marker without its record, if it is the last batch of a segment or a producer.
            if not header.record_count or read_marker(batch, header).kind in (ABORT, COMMIT):
                self._close(header.producer_id, header.last_offset)
        elif not header.is_transactional:
            self._close(header.producer_id, header.last_offset)
        elif header.record_count:
            self._is_open[header.producer_id] = True

    def _close(self, producer_id: int, offset: int) -> None:
        self._is_open[producer_id] = False
        last = self._lasts.get(producer_id)
        if last is not None and offset >= last:
            self._read.discard(producer_id)
            self._history.note_end(producer_id, last, offset)
