"""How far a fetch can read, and positions that it cannot read from: out of range, or after records that the log does not have
(KIP-595).
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from stratalog_broker.partitions.core import PartitionCore
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.protocol.fetch import PartitionFetched
from stratalog_broker.protocol.fetch_request import FetchWanted


def readable_end(log: PartitionLog | None) -> int:
    """Return the high watermark of a partition that is served here; -1 if it is being released, or is not here."""
    return -1 if log is None or log.is_releasing else log.core.high_watermark


def refused_position(one: FetchWanted, core: PartitionCore) -> PartitionFetched | None:
    """Return the response for a position that cannot be served; None for any other.

    A client that gives the epoch of its last record learns up to which epoch and offset its records may be the log's. A
    position below the log's start is out of range whatever the epoch, as in Kafka.
    """
    if not core.log_start_offset <= one.offset:
        return _row(one, core, ErrorCode.offset_out_of_range)
    if one.last_epoch >= 0:
        epoch, end_offset = core.end_of_epoch(one.last_epoch)
        if epoch < 0:
            return _row(one, core, ErrorCode.offset_out_of_range)
        if epoch != one.last_epoch or one.offset > end_offset:
            return _row(one, core, ErrorCode.none)._replace(diverging=(epoch, end_offset))
    return _row(one, core, ErrorCode.offset_out_of_range) if one.offset > core.next_offset else None


def _row(one: FetchWanted, core: PartitionCore, code: ErrorCode) -> PartitionFetched:
    return PartitionFetched(one.index, int(code), core.high_watermark, core.last_stable_offset, core.log_start_offset)
