"""Neighbouring record batches returned by one read, with their offsets, so that their headers are not parsed again."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from stratalog_core.ports import Buffer


class BatchRun(NamedTuple):
    """Whole batches in order, the offset from which each is found, and the offset after the last one. May be empty.

    A batch is found from its base offset on, or, behind a gap that compaction left, from the end of the batch before it.
    """

    batches: Sequence[Buffer]
    base_offsets: array[int]
    end_offset: int

    def below(self, end_offset: int) -> BatchRun:
        """Return the batches that begin below ``end_offset``."""
        stop = bisect_left(self.base_offsets, end_offset)
        if stop == len(self.base_offsets):
            return self
        return BatchRun(self.batches[:stop], self.base_offsets[:stop], self.base_offsets[stop])


def empty_run(offset: int) -> BatchRun:
    """Return a run without batches that begins and ends at ``offset``."""
    return BatchRun([], array("q"), offset)
