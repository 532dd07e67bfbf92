"""Examines the records of produced batches, for topics whose configs ask for more than a batch's header tells.

As Kafka's LogValidator does: records of compacted topics need keys, each record's timestamp must be within the limits, the
fields of a record must fill it, and a topic whose ``compression.type`` is a codec stores its batches with that. A batch that
has the codec is stored as it is. Kafka checks the fields for every topic; that would cost the hot path a tenth
(``produce_checks.py``).

Small uncompressed batches are checked at once. Others are examined beside the event loop, within the budget of searches; a
partition's batches are continued in the order in which they arrived, so producers' sequences stay in order. A rewritten batch
is charged to its request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode

from stratalog_bookies.client.ledger_writer import ENTRY_BYTES_MAX
from stratalog_broker.requests.produce_checks import Refused
from stratalog_core.batches.batch import LOCATED_RECORDS_MAX, BatchHeader, read_header
from stratalog_core.batches.recompression import recompressed
from stratalog_core.batches.record_search import FoundInBatch, IsWanted, RecordRules, first_refused, search_bytes
from stratalog_core.errors import Corrupt, Overloaded, StratalogError, Unavailable
from stratalog_core.search_pool import SearchPool
from stratalog_metadata.records import TopicPartition
from stratalog_metadata.topic_rules.topic_configs import TopicConfigs

AT_ONCE_BYTES: Final = 16 * 1024
"""Size up to which an uncompressed batch is checked on the event loop: 3 ms for 2,000 empty records, 8 for 8,000 headers."""
Failure = Refused | StratalogError


Charge = Callable[[int], bool]
"""Counts more bytes as those of the batch's request; False if there is no room for them."""


class Produced(NamedTuple):
    """A batch as it came, with its topic's configs. ``now_ms`` is the wall time of its arrival."""

    batch: memoryview
    header: BatchHeader
    configs: TopicConfigs
    now_ms: int
    charge: Charge

    @property
    def is_rewritten(self) -> bool:
        """Whether the batch is stored with another codec."""
        codec = self.configs.codec
        return codec is not None and codec.number != self.header.compression


class Examined(NamedTuple):
    """A batch as it is to be stored."""

    batch: memoryview
    header: BatchHeader


OnExamined = Callable[[Examined | Failure], None]


class _Examination:
    """One batch that is being examined, or waits for earlier ones of its partition."""

    __slots__ = ("is_done", "on_examined", "outcome")

    def __init__(self, on_examined: OnExamined) -> None:
        self.on_examined = on_examined
        self.is_done = False
        self.outcome: Examined | Failure = Unavailable("the examination of the batch's records was cancelled")


class ProducedRecords:
    """One per broker. Its queue is bounded by that of the searches."""

    def __init__(self, searches: SearchPool) -> None:
        self._searches = searches
        self._queues: dict[TopicPartition, deque[_Examination]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def check_at_once(self, partition: TopicPartition, produced: Produced) -> bool:
        """Check a small batch now; False if it must be examined by :meth:`start`. Raises ``Refused``."""
        batch, header, configs = produced.batch, produced.header, produced.configs
        if partition in self._queues or produced.is_rewritten:
            return False
        if configs.checks_records:
            if header.compression or len(batch) > AT_ONCE_BYTES:
                return False
            rules = configs.record_rules(produced.now_ms)
            _refuse_count(header, rules)
            try:
                _refuse(first_refused(batch, header, rules), rules)
            except Corrupt as malformed:
                raise _refusal(malformed) from malformed
        return True

    def start(self, partition: TopicPartition, produced: Produced, on_examined: OnExamined) -> None:
        """Examine a batch, and call ``on_examined`` once, after those of the partition's earlier batches."""
        examination = _Examination(on_examined)
        self._queues.setdefault(partition, deque()).append(examination)
        task = asyncio.ensure_future(self._examine(partition, examination, produced))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _examine(self, partition: TopicPartition, examination: _Examination, produced: Produced) -> None:
        try:
            examination.outcome = await self._outcome(produced)
        except Corrupt as malformed:
            examination.outcome = _refusal(malformed)
        except (Refused, StratalogError) as failure:
            examination.outcome = failure
        finally:
            examination.is_done = True
            self._continue(partition)

    async def _outcome(self, produced: Produced) -> Examined:
        batch, header, configs, _, charge = produced
        codec = configs.codec if produced.is_rewritten else None
        if codec is None and not configs.checks_records:
            return Examined(batch, header)
        rules, bytes_max = configs.record_rules(produced.now_ms), self._searches.bytes_max
        limit_bytes = min(configs.max_message_bytes, ENTRY_BYTES_MAX)

        _refuse_count(header, rules)

        def examine(is_wanted: IsWanted) -> bytearray | None:
            _refuse(first_refused(batch, header, rules, is_wanted=is_wanted, memory_bytes=bytes_max), rules)
            if codec is None:
                return None
            found = recompressed(batch, header, codec, limit_bytes, is_wanted=is_wanted, memory_bytes=bytes_max)
            if found is None:
                raise Refused(
                    ErrorCode.message_too_large,
                    f"the batch has more than {limit_bytes} bytes (max.message.bytes) after its compression changed",
                )
            return found

        needed_bytes = search_bytes(batch, header) + (0 if codec is None else limit_bytes)
        rewritten = await self._searches.run(needed_bytes, examine)
        if rewritten is None:
            return Examined(batch, header)
        if not charge(len(rewritten)):
            raise Overloaded(f"no room for {len(rewritten)} bytes of a batch whose compression changed: retry later")
        return Examined(memoryview(rewritten), read_header(rewritten))

    def _continue(self, partition: TopicPartition) -> None:
        queue = self._queues[partition]
        while queue and queue[0].is_done:
            done = queue.popleft()
            done.on_examined(done.outcome)
        if not queue:
            del self._queues[partition]

    async def close(self) -> None:
        """Cancel the examinations; their batches are refused."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _refusal(malformed: Corrupt) -> Refused:
    """Kafka's code for records that cannot be read; clients do not repeat the batch, as they would after CORRUPT_MESSAGE."""
    return Refused(ErrorCode.invalid_record, malformed.message)


def _refuse_count(header: BatchHeader, rules: RecordRules) -> None:
    """Refuse a batch that compaction could not take apart in bounded memory: a few KB expand to millions of records."""
    if rules.needs_key and header.record_count > LOCATED_RECORDS_MAX:
        raise Refused(
            ErrorCode.invalid_record,
            f"the batch has {header.record_count} records; a compacted topic accepts at most {LOCATED_RECORDS_MAX} in one",
        )


def _refuse(found: FoundInBatch | None, rules: RecordRules) -> None:
    if found is None:
        return
    if not rules.allows_time(found.timestamp_ms):
        raise Refused(
            ErrorCode.invalid_timestamp,
            f"timestamp {found.timestamp_ms} of a record is not within {rules.earliest_ms} to {rules.latest_ms}, which"
            " message.timestamp.before.max.ms and message.timestamp.after.max.ms allow",
        )
    raise Refused(ErrorCode.invalid_record, "a compacted topic cannot accept a record without a key")
