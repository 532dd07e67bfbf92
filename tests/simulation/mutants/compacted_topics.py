"""Planted faults of compacted topics as brokers serve them, run in ``compacted-topics``."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, Final

from simulation.mutants.partition_transactions import undecided_transactions_are_offloaded
from stratalog_broker.admin import record_deletion
from stratalog_broker.partitions.tail_cache import PartitionTail
from stratalog_broker.requests import fetch_reads
from stratalog_core.batches.batch import base_offset_of
from stratalog_core.batches.batch_run import BatchRun, empty_run
from stratalog_tiering.cold.block_cache import CachedBlock


def aborted_transactions_are_reported_without_their_marker() -> None:
    """A reader waits for a marker that compaction removed, and skips what the same producer committed later."""

    def unmarked(batches: Any, aborted: Any) -> list[tuple[int, int]]:
        return [(producer, first) for producer, first, _ in aborted]

    setattr(fetch_reads, "runs_in", unmarked)  # noqa: B010 - it is imported there


def compaction_passes_the_last_stable_offset() -> None:
    """Segments end where a transaction is open, and its records are compacted as if it had been committed."""
    undecided_transactions_are_offloaded()


def _in_gap(block: Any, offset: int) -> int:
    """Return the position of the batch behind the gap that holds ``offset``; -1 if none does."""
    position = max(0, bisect_right(block.offsets, offset) - 1)
    return position if base_offset_of(block.content[block.positions[position] :]) > offset else -1


def a_read_in_a_gap_returns_the_batch_before_it() -> None:
    """A reader that goes on from where a removed batch began is sent back."""
    batches_from = CachedBlock.batches_from

    def back(self: CachedBlock, offset: int, bytes_max: int, *, at_least_one: bool) -> BatchRun:
        position = _in_gap(self, offset)
        if position < 1:
            return batches_from(self, offset, bytes_max, at_least_one=at_least_one)
        return batches_from(self, self.offsets[position - 1], 1, at_least_one=True)

    CachedBlock.batches_from = back  # type: ignore[method-assign]


def a_read_in_a_gap_finds_nothing() -> None:
    """A reader that goes on from where a removed batch began gets no batch, however often it asks."""
    batches_from = CachedBlock.batches_from

    def nothing(self: CachedBlock, offset: int, bytes_max: int, *, at_least_one: bool) -> BatchRun:
        if _in_gap(self, offset) >= 0:
            return empty_run(offset)
        return batches_from(self, offset, bytes_max, at_least_one=at_least_one)

    CachedBlock.batches_from = nothing  # type: ignore[method-assign]


def owners_keep_compacted_records_in_memory() -> None:
    """The tail cache serves records that compaction has removed from the history."""
    PartitionTail.drop_below = lambda self, offset: None  # type: ignore[method-assign]


def records_of_topics_that_are_only_compacted_are_deleted() -> None:
    """DeleteRecords does not look at the topic's ``cleanup.policy``."""
    setattr(record_deletion, "cleanup_policies", lambda configs: set())  # noqa: B010 - it is imported there


IN_COMPACTED_TOPICS: Final = (
    records_of_topics_that_are_only_compacted_are_deleted,
    aborted_transactions_are_reported_without_their_marker,
    compaction_passes_the_last_stable_offset,
    a_read_in_a_gap_returns_the_batch_before_it,
    a_read_in_a_gap_finds_nothing,
    owners_keep_compacted_records_in_memory,
)
