"""Planted faults of brokers' reads: the tail cache, read-ahead from bookies, and history that is held back.

Runs that are served beyond the high watermark survive here, because unconfirmed records are seldom both read and lost in one
run; the property test of ``test_read_runs.py`` finds them.
"""

from __future__ import annotations

from typing import Any

from stratalog_broker.partitions.tail_cache import PartitionTail
from stratalog_broker.reads.read_runs import ReadRuns
from stratalog_broker.requests.held_fetch import HeldFetch

_NO_END = 1 << 62


def tail_serves_the_bytes_of_another_batch() -> None:
    """The first batch has the right offset and the newest one's bytes, as if a buffer were reused."""
    read = PartitionTail.read

    def mixed(self: PartitionTail, offset: int, end_offset: int, bytes_max: int) -> Any:
        found = read(self, offset, end_offset, bytes_max)
        if found is None:
            return None
        batches, size = found
        first, newest = bytes(batches[0]), bytes(self._batches[-1])
        if len(first) != len(newest):
            return found
        return [first[:8] + newest[8:], *batches[1:]], size

    PartitionTail.read = mixed  # type: ignore[method-assign]


def tail_serves_beyond_the_high_watermark() -> None:
    """Readers see records that the quorum has not confirmed."""
    read = PartitionTail.read

    def beyond(self: PartitionTail, offset: int, end_offset: int, bytes_max: int) -> Any:
        return read(self, offset, _NO_END, bytes_max)

    PartitionTail.read = beyond  # type: ignore[method-assign]


def read_runs_skip_a_batch() -> None:
    """A run that was read ahead is served from its second batch on."""
    serve = ReadRuns.serve
    PartitionTail.read = lambda *_: None  # type: ignore[method-assign]  # no fault: readers behind the tail cache

    def skipping(self: ReadRuns, key: Any, offset: int, end_offset: int, bytes_max: int, now_s: float) -> Any:
        served = serve(self, key, offset, end_offset, bytes_max, now_s)
        if served is None or len(served.batches) < 2:
            return served
        return served._replace(batches=served.batches[1:], size=served.size - len(served.batches[0]))

    ReadRuns.serve = skipping  # type: ignore[method-assign]


def fetches_that_are_held_back_get_no_turn() -> None:
    """A fetch of history that waits for producers is never answered."""
    HeldFetch._on_turn = lambda self: None  # type: ignore[method-assign]


IN_LOG = (
    tail_serves_the_bytes_of_another_batch,
    tail_serves_beyond_the_high_watermark,
    read_runs_skip_a_batch,
    fetches_that_are_held_back_get_no_turn,
)
