"""A history is cut where no transaction is open, whatever segments transactions span: compared with a replay of all batches."""

from __future__ import annotations

import random
from uuid import UUID

import msgspec
import pytest
from support.archive_writer import ArchiveWriter
from unit.tiering.maintenance.test_cutting import Store, ports, read_all

from stratalog_core.batches.batch import TRANSACTIONAL_BIT, read_header
from stratalog_core.batches.checkpoint import ProducerEntry
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.partition_state.replay_state import ReplayState
from stratalog_core.partition_state.transactions import ABORT, COMMIT, build_marker
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import ManifestPointer, Topic
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.core.policy import tier_policy
from stratalog_tiering.core.restoring import EPOCH_GAP
from stratalog_tiering.core.rewritten_batches import emptied
from stratalog_tiering.format.manifest import PresentBatches, Reason, SegmentKind, SegmentOptions, segment_entry
from stratalog_tiering.format.manifest_edit import ManifestEdit, Previous
from stratalog_tiering.format.object_keys import segment_key
from stratalog_tiering.format.segment import AbortedTransaction, SegmentIdentity, SegmentWriter
from stratalog_tiering.maintenance.cutting import cut_end, cut_history
from stratalog_tiering.maintenance.joined_segments import source_of
from stratalog_tiering.offload.commit import store_manifest

CLOCK = SystemClock()
TOPIC = Topic(name="flights", topic_id=UUID(int=0xAA), partition_count=1, replication_factor=1)
TRANSACTIONAL, IDEMPOTENT = (11, 12, 13), (21, 22)


class Writing:
    """Batches of several producers, the segments that they make, and the ends of batches at which no transaction is open."""

    def __init__(self, base_offset: int = 0) -> None:
        self.state = ReplayState(base_offset)
        self.base_offset = base_offset
        self.epoch = 0
        self.ends = [base_offset]
        self.segments: list[tuple[list[bytes], tuple[ProducerEntry, ...], int]] = []
        self.batches: list[bytes] = []
        self._sequences: dict[int, int] = {}
        self._aborted: list[AbortedTransaction] = []

    @property
    def end_offset(self) -> int:
        return self.state.next_offset

    def records(self, producer_id: int, count: int = 1) -> None:
        """Append a batch; of a transaction, if the producer has any."""
        base = self.end_offset
        records = [Record(offset=base + n, timestamp_ms=base + n, key=b"k", value=b"v" * 20) for n in range(count)]
        sequence = self._sequences.get(producer_id, 0) if producer_id >= 0 else -1
        self._sequences[producer_id] = sequence + count
        attributes = TRANSACTIONAL_BIT if producer_id in TRANSACTIONAL else 0
        producer_epoch = 0 if producer_id >= 0 else -1
        self._append(
            build_batch(
                records, attributes=attributes, producer_id=producer_id, producer_epoch=producer_epoch,
                base_sequence=sequence, leader_epoch=self.epoch,
            )
        )  # fmt: skip

    def marker(self, producer_id: int, kind: int = COMMIT) -> None:
        batch = build_marker(kind, producer_id, 0, 0, self.end_offset)
        batch[0:8] = self.end_offset.to_bytes(8, "big")
        batch[12:16] = self.epoch.to_bytes(4, "big")
        self._append(batch)

    def _append(self, batch: bytes | bytearray) -> None:
        self.batches.append(bytes(batch))
        self.state.replay(read_header(batch), batch)
        self._note_end()

    def _note_end(self) -> None:
        if not self.state.transactions.first_offsets and self.ends[-1] != self.end_offset:
            self.ends.append(self.end_offset)

    def restored(self) -> None:
        """Lose what was not offloaded yet, markers of open transactions for example; another owner goes on."""
        self.epoch += EPOCH_GAP
        self.state.transactions.load((), self.end_offset)
        self._note_end()

    def end_segment(self) -> None:
        if self.batches:
            self.segments.append((self.batches, self.state.producers.snapshot(), self.end_offset))
            self.batches = []

    async def stored(self, store: Store) -> ManifestPointer:
        """Store the segments, of several blocks each."""
        self.end_segment()
        writer = ArchiveWriter(store, TOPIC, CLOCK, random.Random(5), block_bytes_target=300)
        pointer: ManifestPointer | None = None
        aborted = [AbortedTransaction(**one._asdict()) for one in self.state.transactions.aborted]
        base = self.base_offset
        for batches, producers, end in self.segments:
            overlapping = [each for each in aborted if each.first_offset < end and each.last_offset >= base]
            pointer, _ = await writer.append(
                0, batches, base_offset=self.base_offset, producers=producers, aborted_transactions=overlapping
            )
            base = end
        assert pointer is not None
        return pointer

    def expected_end(self, offset: int) -> int:
        return max(end for end in self.ends if end <= offset)


def written_at_random(seed: int) -> Writing:
    chance = random.Random(seed)
    written = Writing(chance.choice([0, 0, 40]))
    if written.base_offset:
        written.marker(13, ABORT)  # Retention has removed its records.
    segment_chance, restore_chance = chance.choice([0.05, 0.2, 0.6]), chance.choice([0.0, 0.0, 0.03])
    marker_chance = chance.choice([0.1, 0.5])
    for _ in range(60):
        producer_id = chance.choice([*TRANSACTIONAL, *IDEMPOTENT, -1])
        if producer_id in written.state.transactions.first_offsets and chance.random() < marker_chance:
            written.marker(producer_id, chance.choice([ABORT, COMMIT]))
        else:
            written.records(producer_id, chance.randint(1, 3))
        if chance.random() < segment_chance:
            written.end_segment()
        if chance.random() < restore_chance:
            written.restored()
    for producer_id in list(written.state.transactions.first_offsets):
        written.marker(producer_id, chance.choice([ABORT, COMMIT]))
    return written


async def compacted(store: Store, pointer: ManifestPointer, base_offset: int, **batches: bytes) -> ManifestPointer:
    """Replace the segment that begins at ``base_offset`` by a compacted one that has these ``batches`` only."""
    source = ManifestSource(store)
    manifest = await source.manifest(pointer)
    entry = await source.segment_at(manifest, base_offset)
    assert entry is not None
    footer = await source.footer(entry)
    identity = SegmentIdentity(
        cluster_id="c", topic_id=TOPIC.topic_id, topic_name=TOPIC.name, partition=0, base_offset=base_offset, ledger_ids=(),
    )  # fmt: skip
    writer = SegmentWriter(identity, 300, is_compacted=True)
    for batch in batches.values():
        writer.append(batch)
    segment = writer.finish(
        created_at_ms=footer.created_at_ms, leader_epochs=footer.leader_epochs, producers=await source.producers(entry)
    )
    key = segment_key(TOPIC.topic_id, 0, base_offset, 0, base_offset + 1)
    await store.put(key, writer.take_parts())
    first = read_header(next(iter(batches.values()))).base_offset
    present = PresentBatches(base_offset=first, end_offset=entry.end_offset, batch_count=len(batches))
    made = msgspec.structs.replace(
        segment_entry(key, segment, SegmentKind.COMPACTED), options=SegmentOptions(present=present),
        leaf_count=entry.leaf_count, sources=(source_of(entry),), leader_epochs=entry.leader_epochs,
    )  # fmt: skip
    edit = ManifestEdit(
        Previous(manifest=manifest, key=pointer.object_key, sha256=bytes.fromhex(pointer.sha256)), writer="test",
        random_id=lambda: base_offset + 2,
    )  # fmt: skip
    edit.replace(made, await source.pages(edit.pages_for_replace(base_offset)), Reason.COMPACTED)
    return await store_manifest(store, source, edit.finish(created_at_ms=1))


@pytest.mark.parametrize("seed", range(16))
async def test_every_cut_is_at_the_last_end_without_open_transactions(
    store: Store, background: ThreadBackground, seed: int
) -> None:
    written = written_at_random(seed)
    pointer, made = await written.stored(store), ports(store, background)
    offsets = range(pointer.start_offset, pointer.end_offset)
    for offset in random.Random(seed).sample(offsets, 12):
        assert await cut_end(made, pointer, offset) == written.expected_end(offset), f"of a cut at {offset}"
    cut = await cut_history(made, pointer, offset, tier_policy({}))
    assert cut.pointer.end_offset == written.expected_end(offset)
    kept = [batch for batches, *_ in written.segments for batch in batches]
    kept = [batch for batch in kept if read_header(batch).base_offset < cut.pointer.end_offset]
    assert await read_all(store, cut.pointer) == b"".join(kept)
    assert cut.record_count + cut.left_out_records == (await ManifestSource(store).manifest(pointer)).record_count


async def test_a_cut_in_a_transaction_of_many_segments_is_before_it(store: Store, background: ThreadBackground) -> None:
    written = Writing()
    written.records(-1, 10)
    for _ in range(4):
        written.records(11)
        written.records(12)
        written.end_segment()
    written.marker(11)
    written.records(-1)
    written.marker(12, ABORT)
    written.records(-1, 5)
    pointer, made = await written.stored(store), ports(store, background)
    for offset in range(10, 21):
        assert await cut_end(made, pointer, offset) == 10
    assert await cut_end(made, pointer, 21) == 21, "both transactions end in the segment in which the cut is"
    cut = await cut_history(made, pointer, 19, tier_policy({}))
    assert (cut.pointer.end_offset, cut.record_count, cut.left_out_records, cut.left_out_end_offset) == (10, 10, 16, 26)


async def test_a_producer_whose_transaction_has_ended_costs_a_block(store: Store, background: ThreadBackground) -> None:
    written = Writing()
    written.records(11)
    written.marker(11)
    for _ in range(8):
        for _ in range(20):
            written.records(-1)
        written.end_segment()
    pointer, made = await written.stored(store), ports(store, background)
    read: list[str] = []
    store.before = lambda name, key: read.append(key) if name == "get_range" and "segments/" in key else None
    last = pointer.end_offset - 20
    assert await cut_end(made, pointer, last) == last
    assert len(read) < 8, f"a footer, a block and producers, and no block of the segments between: {read}"


async def test_transactions_in_compacted_segments(store: Store, background: ThreadBackground) -> None:
    """What compaction leaves of an aborted transaction has no marker; of a committed one, the last batch may be gone."""
    written = Writing()
    for producer_id in (11, 12, -1):
        written.records(producer_id)
    first = written.batches
    written.end_segment()
    written.marker(11, ABORT)
    written.records(12)
    written.records(-1)
    second = written.batches
    written.end_segment()
    written.records(-1)
    written.marker(12)
    written.records(-1, 5)
    pointer, made = await written.stored(store), ports(store, background)
    assert [await cut_end(made, pointer, offset) for offset in (0, 3, 5, 6, 7, 8, 9)] == [0, 0, 0, 0, 0, 8, 8]
    pointer = await compacted(store, pointer, 0, aborted=emptied(read_header(first[0])), committed=first[1], other=first[2])
    pointer = await compacted(store, pointer, 3, other=second[2])
    assert [await cut_end(made, pointer, offset) for offset in (0, 3, 5, 6, 7, 8, 9)] == [0, 0, 0, 0, 0, 8, 8]


async def test_a_transaction_whose_batches_are_compacted_away_is_not_open(store: Store, background: ThreadBackground) -> None:
    written = Writing()
    written.records(11)
    written.records(-1)
    first = written.batches
    written.end_segment()
    written.marker(11, ABORT)
    written.records(-1)
    second = written.batches
    written.end_segment()
    written.records(-1, 5)
    pointer, made = await written.stored(store), ports(store, background)
    pointer = await compacted(store, pointer, 0, aborted=emptied(read_header(first[0])), other=first[1])
    pointer = await compacted(store, pointer, 2, other=second[1])
    assert [await cut_end(made, pointer, offset) for offset in (1, 2, 3, 4, 8)] == [0, 2, 2, 4, 4]
