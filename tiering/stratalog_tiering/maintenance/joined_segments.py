"""The parts of a segment that it takes over from those that it replaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stratalog_core.batches.checkpoint import EpochStart
from stratalog_core.errors import Corrupt
from stratalog_core.partition_state.replay_state import EPOCHS_MAX
from stratalog_tiering.format.manifest import SegmentEntry, SourceSegment
from stratalog_tiering.format.object_keys import parse_segment_key
from stratalog_tiering.format.segment import SegmentFooter, SegmentIdentity

LEDGERS_MAX: Final = 10_000
"""Ledgers that a segment names. The resolution of a fork looks for those that are still hot, which are the newest."""


def joined_identity(cluster_id: str, footers: Sequence[SegmentFooter]) -> SegmentIdentity:
    """The identity of the segment that replaces neighbouring ones."""
    first = footers[0]
    ledger_ids = tuple(ledger_id for footer in footers for ledger_id in footer.ledger_ids)[-LEDGERS_MAX:]
    return SegmentIdentity(
        cluster_id=cluster_id, topic_id=first.topic_id, topic_name=footers[-1].topic_name, partition=first.partition,
        base_offset=first.base_offset, ledger_ids=ledger_ids,
    )  # fmt: skip


def joined_epochs(footers: Sequence[SegmentFooter]) -> list[EpochStart]:
    """The union of the footers' leader epochs, each with the first start offset seen."""
    starts: dict[int, int] = {}
    for footer in footers:
        for start in footer.leader_epochs:
            starts.setdefault(start.epoch, start.start_offset)
    return [EpochStart(epoch, offset) for epoch, offset in sorted(starts.items())][-EPOCHS_MAX:]


def source_of(entry: SegmentEntry) -> SourceSegment:
    """The source that a segment which replaces ``entry`` names. Raises ``Corrupt`` if the entry's key is not a segment's."""
    parts = parse_segment_key(entry.key)
    if parts is None:
        raise Corrupt(f"{entry.key} is not the key of a segment", key=entry.key)
    return SourceSegment(base_offset=parts.base_offset, leader_epoch=parts.leader_epoch, random_id=parts.random_id)
