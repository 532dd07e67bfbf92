"""Planted faults of replicas that serve history of partitions that they do not own (KIP-392).

A replica that ignores the log's start survives here, because retention soon removes what was deleted from the manifest;
``test_fetch_from_replicas.py`` deletes within a segment.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.reads.aborted_transactions import AbortedTransactions
from stratalog_broker.reads.readable_log import ColdHistory, cold_history
from stratalog_broker.requests.replica_reads import ReplicaReads
from stratalog_metadata.records import TopicPartition


def replicas_serve_beyond_the_end_of_history() -> None:
    """The end of the history looks like the end of the partition: a reader stays there and waits."""
    history_for = ReplicaReads.history_for

    def beyond(self: ReplicaReads, one: Any, topic: Any) -> Any:
        code, history = history_for(self, one, topic)
        if code is not ErrorCode.not_leader_or_follower:
            return code, history
        found = cold_history(self._view, TopicPartition(topic.topic_id, one.index))
        is_beyond = found is not None and one.offset >= found.core.end_offset and one.leader_epoch >= 0
        return (ErrorCode.none, found) if is_beyond else (code, history)

    ReplicaReads.history_for = beyond  # type: ignore[method-assign]


def replicas_report_no_aborted_transactions() -> None:
    """Readers of committed records get aborted ones from replicas."""
    at_once = AbortedTransactions.at_once

    def forgetful(self: AbortedTransactions, log: Any, start_offset: int, end_offset: int) -> Any:
        return [] if isinstance(log, ColdHistory) else at_once(self, log, start_offset, end_offset)

    AbortedTransactions.at_once = forgetful  # type: ignore[method-assign]


def nothing_was_aborted_below_the_start() -> None:
    """Batches that retention removed while they were read are served as if all their transactions had been committed."""
    at_once = AbortedTransactions.at_once

    def from_the_start(self: AbortedTransactions, log: Any, start_offset: int, end_offset: int) -> Any:
        pointer = self._reader.manifest_pointer(log)
        if pointer is not None and start_offset < pointer.start_offset and start_offset < log.core.aborted_from:
            start_offset = pointer.start_offset
        return at_once(self, log, start_offset, end_offset) if start_offset < end_offset else []

    AbortedTransactions.at_once = from_the_start  # type: ignore[method-assign]


IN_LOG: Final = (replicas_serve_beyond_the_end_of_history,)
IN_TRANSACTIONS: Final = (replicas_report_no_aborted_transactions, nothing_was_aborted_below_the_start)
