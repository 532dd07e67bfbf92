"""Writes a segment that replaces some segments whose batches pass a filter: shared by compaction and erasure.

Blocks are read, verified, filtered and uploaded under a fresh key. Nothing is committed here. The caller reads the new segment
back (:func:`read_back`), decides by itself that it holds what it must, and commits it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from stratalog_core.batches.batch import BatchHeader
from stratalog_core.batches.checkpoint import EpochStart
from stratalog_core.errors import Corrupt
from stratalog_core.object_lock import ObjectLock
from stratalog_core.ports import Buffer
from stratalog_tiering.cold.segment_check import check_segment
from stratalog_tiering.core.locks import merged_lock
from stratalog_tiering.core.partition import PartitionSnapshot
from stratalog_tiering.core.policy import TierPolicy
from stratalog_tiering.format.block_cipher import BlockCipher
from stratalog_tiering.format.erased_leaves import ErasedLeaf
from stratalog_tiering.format.footer import AbortedTransaction, BlockEntry
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.format.object_keys import segment_key
from stratalog_tiering.format.segment import SegmentWriter, WrittenSegment, audit_block, iterate_block_batches
from stratalog_tiering.maintenance.joined_segments import joined_epochs, joined_identity
from stratalog_tiering.offload.data_keys import new_encryption
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.offload.upload import StreamedUpload, finishing

if TYPE_CHECKING:
    from stratalog_tiering.core.rewritten_batches import Filtered  # loads numba

OnBatch = Callable[[memoryview, BatchHeader], None]


class BatchRules(Protocol):
    """Decides what is left of each batch, in offset order."""

    def begin_segment(self, aborted: Iterable[AbortedTransaction]) -> None:
        """Note the aborted transactions of the segment whose batches come next."""
        ...

    def filter(self, batch: Buffer, header: BatchHeader, *, is_last: bool) -> Filtered:
        """The batch as it is to be; ``is_last``: it is the new segment's last one. Raises ``Corrupt``."""
        ...

    def take_aborted(self) -> Sequence[AbortedTransaction]:
        """The aborted transactions that the new segment lists, in the order of their markers."""
        ...


class CheckedRules(BatchRules, Protocol):
    """Rules whose result can be compared with what is read back."""

    def fingerprint(self, batch: Buffer, header: BatchHeader) -> int:
        """The fingerprint of a batch that was read back; their sum is that of what ``filter`` returned. Raises ``Corrupt``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """An uploaded segment. ``fingerprint`` is the sum of those of its batches, ``first_batch`` the first one's base offset."""

    key: str
    segment: WrittenSegment
    fingerprint: int
    first_batch: int
    lock: ObjectLock | None


async def stored_blocks(
    ports: WorkerPorts, entry: SegmentEntry
) -> AsyncIterator[tuple[memoryview, BlockEntry, BlockCipher | None]]:
    """The stored bytes of a segment's blocks, in order, at the worker's rate."""
    footer = await ports.source.footer(entry)
    cipher = await ports.source.cipher(footer)
    for block in footer.blocks:
        content = await ports.store.get_range(entry.key, entry.data_position + block.position, block.length)
        await ports.reading.take(len(content))
        yield content, block, cipher


@dataclass(slots=True)
class _Output:
    """The new segment while it is written; ``fingerprint`` is over the records that it must have."""

    writer: SegmentWriter
    rules: BatchRules
    end_offset: int
    fingerprint: int = 0

    def add(self, stored: memoryview, block: BlockEntry, cipher: BlockCipher | None, entry: SegmentEntry) -> None:
        plain = audit_block(stored, block, cipher=cipher, is_compacted=entry.is_compacted)
        for batch, header in iterate_block_batches(plain):
            filtered = self.rules.filter(batch, header, is_last=header.next_offset == self.end_offset)
            self.fingerprint += filtered.fingerprint
            if filtered.batch is not None:
                self.writer.append(filtered.batch)


async def write_filtered(
    ports: WorkerPorts,
    state: PartitionSnapshot,
    group: Sequence[SegmentEntry],
    rules: BatchRules,
    policy: TierPolicy,
    *,
    is_compacted: bool,
    erased: Callable[[], Sequence[ErasedLeaf]] = tuple,
) -> Rewritten:
    """Upload the segment that replaces ``group``: compressed, encrypted and stored as the topic asks for now.

    It is locked until the latest date of the group's. ``erased`` is called when all batches were filtered. Raises ``Corrupt``,
    ``Unavailable``.
    """
    footers = [await ports.source.footer(entry) for entry in group]
    epoch = group[-1].leader_epochs[-1].epoch
    key = segment_key(state.log.topic_id, state.log.index, group[0].base_offset, epoch, ports.random_id())
    encryption = await new_encryption(ports.store, state.log.topic_id, state.log.index, key, policy.encryption_key)
    identity = joined_identity(ports.cluster_id, footers)
    writer = SegmentWriter(identity, ports.settings.block_bytes, policy.zstd_level, encryption, is_compacted=is_compacted)
    lock = merged_lock(group, ports.clock.wall_ms())
    upload = StreamedUpload(
        ports.store, key, part_bytes=ports.settings.upload_part_bytes, parts_at_once=ports.settings.upload_parts_at_once,
        storage_class=policy.storage_class, lock=lock,
    )  # fmt: skip
    output = _Output(writer, rules, group[-1].end_offset)
    async with finishing(upload):
        for entry, footer in zip(group, footers, strict=True):
            rules.begin_segment(footer.aborted_transactions)
            async for content, block, cipher in stored_blocks(ports, entry):
                await ports.background.run(partial(output.add, content, block, cipher, entry))
                await upload.write(writer.take_parts())
        finish = partial(
            writer.finish, created_at_ms=max(footer.created_at_ms for footer in footers), leader_epochs=joined_epochs(footers),
            aborted_transactions=rules.take_aborted(), producers=await ports.source.producers(group[-1]), erased=erased(),
        )  # fmt: skip
        written = await ports.background.run(finish)
        await upload.write(writer.take_parts())
    return Rewritten(
        key=key, segment=written, fingerprint=output.fingerprint, first_batch=writer.first_batch_offset, lock=lock
    )  # fmt: skip


def epochs_in_effect(group: Sequence[SegmentEntry]) -> tuple[EpochStart, ...]:
    """The leader epochs of the group, each from where it begins there, although its first batch may be gone."""
    starts: dict[int, int] = {}
    for start in (start for entry in group for start in entry.leader_epochs):
        starts.setdefault(start.epoch, start.start_offset)
    return tuple(EpochStart(epoch, offset) for epoch, offset in starts.items())


async def read_back(ports: WorkerPorts, entry: SegmentEntry, on_batch: OnBatch) -> None:
    """Read the new segment from the store and verify it; ``on_batch`` gets each batch, in a thread. Raises ``Corrupt``."""

    def add(_: memoryview, blocks: Sequence[memoryview]) -> None:
        for block in blocks:
            for batch, header in iterate_block_batches(block):
                on_batch(batch, header)

    check = check_segment(
        ports.store, ports.source, entry, ports.background,
        reads_at_once=ports.settings.verify_reads_at_once, on_content=add, take=ports.verifying.take,
    )  # fmt: skip
    async for finding in check:
        raise Corrupt(f"the copy in {ports.store.url} does not verify: {finding}", key=entry.key)
