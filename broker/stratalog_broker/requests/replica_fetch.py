"""One Fetch request with a rack: which of its partitions go to a replica, or are served here for another owner."""

from __future__ import annotations

import contextlib
from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.protocol.fetch import PartitionFetched
from stratalog_broker.protocol.fetch_request import FetchWanted
from stratalog_broker.reads.readable_log import ColdHistory
from stratalog_broker.requests.replica_reads import ReplicaReads
from stratalog_core.errors import StratalogError
from stratalog_metadata.records import Topic

_REFRESH_WAIT_S: Final = 1.0


class ReplicaFetch:
    """Partitions are named by their place in the request."""

    __slots__ = ("_histories", "_rack", "_reads", "_refused", "is_stale")

    def __init__(self, reads: ReplicaReads, rack: bytes) -> None:
        self._reads = reads
        self._rack = rack
        self._histories: dict[int, ColdHistory] = {}
        self._refused = False
        self.is_stale = False
        """The metadata view has to be refreshed before a history is read."""

    def preferred_replica(self, one: FetchWanted, log: PartitionLog) -> int:
        """See ``ReplicaReads``."""
        return self._reads.preferred_replica(one, log, self._rack)

    def begin(self, line: int) -> None:
        """Forget what was found of the partition, because it is checked again."""
        self._histories.pop(line, None)

    def history(self, line: int, one: FetchWanted, topic: Topic) -> tuple[ErrorCode, ColdHistory | None]:
        """Return the history that serves the partition, or the error code for a client that has to ask the owner."""
        code, found = self._reads.history_for(one, topic)
        if found is None:
            return code, None
        if not self._reads.is_fresh:
            if self._refused:
                return ErrorCode.not_leader_or_follower, None
            self.is_stale = True
        self._histories[line] = found
        return code, found

    async def refresh(self) -> None:
        """Refresh the view; check all partitions again. If the quorum does not answer, histories will be refused."""
        with contextlib.suppress(StratalogError):
            await self._reads.refresh(_REFRESH_WAIT_S)
        self._refused = not self._reads.is_fresh
        self.is_stale = False

    def count(self, line: int, found: PartitionFetched, *, is_owned: bool) -> None:
        """Count a partition's result, which is being sent."""
        metrics = self._reads.metrics
        metrics.redirects += found.preferred_replica >= 0
        if line in self._histories:
            metrics.out_bytes += found.batches_bytes
        elif not is_owned and found.error_code == ErrorCode.not_leader_or_follower:
            metrics.returns += 1
