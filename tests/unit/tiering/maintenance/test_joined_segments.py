"""What a segment takes over from those that it replaces is bounded."""

from __future__ import annotations

from uuid import UUID

import msgspec

from stratalog_core.batches.checkpoint import EpochStart
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.partition_state.replay_state import EPOCHS_MAX
from stratalog_tiering.format.segment import SegmentFooter, SegmentIdentity, SegmentWriter
from stratalog_tiering.maintenance.joined_segments import LEDGERS_MAX, joined_epochs, joined_identity


def footer(ledger_ids: range) -> SegmentFooter:
    """The footer of a segment that was made of these ledgers, each of an epoch of its own."""
    identity = SegmentIdentity(
        cluster_id="c",
        topic_id=UUID(int=1),
        topic_name="t",
        partition=0,
        base_offset=ledger_ids[0],
        ledger_ids=tuple(ledger_ids),
    )
    writer = SegmentWriter(identity)
    writer.append(build_batch([Record(offset=ledger_ids[0], timestamp_ms=1, key=b"k", value=b"v")]))
    epochs = tuple(EpochStart(epoch, epoch) for epoch in ledger_ids)
    return msgspec.structs.replace(writer.finish(created_at_ms=1).footer, leader_epochs=epochs)


def test_a_segment_names_the_newest_ledgers_and_epochs() -> None:
    footers = [footer(range(start, start + 4_000)) for start in range(0, 16_000, 4_000)]
    assert joined_identity("c", footers).ledger_ids == tuple(range(16_000 - LEDGERS_MAX, 16_000))
    assert [start.epoch for start in joined_epochs(footers)] == list(range(16_000 - EPOCHS_MAX, 16_000))
    assert joined_identity("c", footers[:1]).ledger_ids == tuple(range(4_000))
