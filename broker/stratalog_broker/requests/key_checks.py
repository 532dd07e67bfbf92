"""Checks that the records produced to a compacted topic have keys, as Kafka does (LogValidator).

Small uncompressed batches are checked at once. Others are searched beside the event loop, within the budget of searches; a
partition's batches are continued in the order in which they arrived, so producers' sequences stay in order. Only compacted
topics pay for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_broker.requests.produce_checks import Refused
from stratalog_core.batches.batch import BatchHeader
from stratalog_core.batches.record_search import FoundInBatch, first_without_key
from stratalog_core.errors import StratalogError, Unavailable
from stratalog_core.search_pool import SearchPool
from stratalog_metadata.records import TopicPartition

AT_ONCE_BYTES: Final = 16 * 1024
"""Size up to which an uncompressed batch is checked on the event loop: at most about 1 ms, with 2,000 empty records."""
Failure = Refused | StratalogError
OnChecked = Callable[[Failure | None], None]


class _Check:
    """One batch that is being searched, or waits for earlier ones of its partition."""

    __slots__ = ("failure", "is_done", "on_checked")

    def __init__(self, on_checked: OnChecked) -> None:
        self.on_checked = on_checked
        self.is_done = False
        self.failure: Failure | None = Unavailable("the check of the batch's keys was cancelled")


class KeyChecks:
    """One per broker. Its queue is bounded by that of the searches."""

    def __init__(self, searches: SearchPool) -> None:
        self._searches = searches
        self._queues: dict[TopicPartition, deque[_Check]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def check_at_once(self, partition: TopicPartition, batch: memoryview, header: BatchHeader) -> bool:
        """Check a small batch now; False if it must be checked by :meth:`start`. Raises ``Refused``, ``Corrupt``."""
        if partition in self._queues or header.compression or len(batch) > AT_ONCE_BYTES:
            return False
        _require_keys(first_without_key(batch, header))
        return True

    def start(self, partition: TopicPartition, batch: memoryview, header: BatchHeader, on_checked: OnChecked) -> None:
        """Check a batch, and call ``on_checked`` once, after those of the partition's earlier batches."""
        check = _Check(on_checked)
        self._queues.setdefault(partition, deque()).append(check)
        task = asyncio.ensure_future(self._search(partition, check, batch, header))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _search(self, partition: TopicPartition, check: _Check, batch: memoryview, header: BatchHeader) -> None:
        try:
            _require_keys(await self._searches.first_without_key(batch, header))
            check.failure = None
        except (Refused, StratalogError) as failure:
            check.failure = failure
        finally:
            check.is_done = True
            self._continue(partition)

    def _continue(self, partition: TopicPartition) -> None:
        queue = self._queues[partition]
        while queue and queue[0].is_done:
            done = queue.popleft()
            done.on_checked(done.failure)
        if not queue:
            del self._queues[partition]

    async def close(self) -> None:
        """Cancel the searches; their batches are refused."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _require_keys(found: FoundInBatch | None) -> None:
    if found is not None:
        raise Refused(ErrorCode.invalid_record, "a compacted topic cannot accept a record without a key")
