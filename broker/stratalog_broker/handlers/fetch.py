"""Fetch (key 1), versions 4–18: sessions (KIP-227), long poll, leader epochs (KIP-320), topic ids (KIP-516).

What the tail cache has is answered at once and as it is; the rest is read from bookies and object store, all partitions of
the request in parallel. The first batch of a partition is always returned whole, so that every consumer gets on (KIP-74).
A read that is not ready when the client's patience ends leaves its partition empty, without error, and goes on for the
next fetch. Once there is something to answer, slower partitions get a short grace only, so that a replay does not hold up
a tail. The last stable offset is the high watermark, because transactions are not served yet. Followers do not exist:
replica fields are ignored, no preferred replica is ever named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.context import RequestContext
from stratalog_broker.fetch_sessions import FINAL_EPOCH, INITIAL_EPOCH, FetchSession, FetchWanted, SessionRefused
from stratalog_broker.handlers.info import HandlerInfo
from stratalog_broker.partition_log import PartitionLog
from stratalog_broker.protocol.entities import decode_request
from stratalog_broker.protocol.errors import fetch_error_code_of
from stratalog_broker.protocol.fetch import TOPIC_ID_VERSION, PartitionFetched, encode_response
from stratalog_broker.protocol.frame import response_head
from stratalog_broker.reads import Batches
from stratalog_core.errors import StratalogError, Unavailable
from stratalog_core.ids import TopicPartition

_KEY: Final = 1
_SESSION_VERSION: Final = 7
_GRACE_S: Final = 0.02
_READ_COMMITTED: Final = 1

_NOT_LOOKED_AT: Final = PartitionFetched(-1)


def handle_raw(context: RequestContext, body: memoryview) -> Awaitable[None] | None:
    """See the module's header."""
    request = decode_request(_KEY, context.api_version, body)
    try:
        fetch = FetchCall(context, request)
    except SessionRefused as refused:
        parts, size = encode_response((), context.api_version, error_code=int(refused.code))
        context.respond([response_head(_KEY, context.api_version, context.correlation_id, size), *parts])
        return None
    if fetch.collect():
        fetch.respond()
        return None
    return fetch.wait()


class FetchCall:
    """One request: what it wants, what has been found so far."""

    def __init__(self, context: RequestContext, request: Any) -> None:
        self._context = context
        self._services = services = context.services
        self._by_id = context.api_version >= TOPIC_ID_VERSION
        self._find = services.partitions.find_by_id if self._by_id else services.partitions.find_by_name
        self._session: FetchSession | None = None
        self._is_incremental = False
        self._wanted = self._open(request)
        self._bytes_max = min(max(request.max_bytes, 1), services.settings.response_bytes_max, services.response_room())
        self._bytes_min = min(request.min_bytes, self._bytes_max)
        self._wait_s = max(request.max_wait.total_seconds(), 0.0)
        self._deadline = services.clock.monotonic() + self._wait_s
        self._aborted: tuple[()] | None = () if request.isolation_level == _READ_COMMITTED else None
        self._results = [_NOT_LOOKED_AT] * len(self._wanted)
        self._logs: list[PartitionLog | None] = [None] * len(self._wanted)
        self._slow: list[tuple[int, FetchWanted, PartitionLog, int]] = []
        self._bytes = 0
        self._has_error = False

    def _open(self, request: Any) -> list[FetchWanted]:
        """Partitions to answer for, by the session if there is one. Raises ``SessionRefused``."""
        wanted = list(self._wanted_of(request))
        if self._context.api_version < _SESSION_VERSION:
            return wanted
        sessions, now_s = self._services.fetch_sessions, self._services.clock.monotonic()
        if request.session_epoch in (INITIAL_EPOCH, FINAL_EPOCH):
            sessions.end(request.session_id)
            if request.session_epoch == INITIAL_EPOCH:
                self._session = sessions.begin(wanted, now_s)
            return wanted
        forgotten = [(self._key_of(topic), index) for topic in request.forgotten_topics_data for index in topic.partitions]
        self._session = sessions.resume(request.session_id, request.session_epoch, wanted, forgotten, now_s)
        self._is_incremental = True
        return list(self._session)

    def _wanted_of(self, request: Any) -> Iterable[FetchWanted]:
        for topic in request.topics:
            key = self._key_of(topic)
            for one in topic.partitions:
                leader_epoch = getattr(one, "current_leader_epoch", -1)
                yield FetchWanted(key, one.partition, one.fetch_offset, one.partition_max_bytes, leader_epoch)

    def _key_of(self, topic: Any) -> bytes:
        if not self._by_id:
            return str(topic.topic).encode()
        return topic.topic_id.bytes if topic.topic_id is not None else bytes(16)

    # -- looking --------------------------------------------------------------------------------------------------------

    def collect(self) -> bool:
        """Look at every partition as it is now; True if that is an answer already."""
        for line in range(len(self._wanted)):
            self._look_at(line)
        return self._is_answer()

    def _look_again(self, lines: Iterable[int]) -> bool:
        """Look at the partitions that have moved since, or gave nothing; True if what there is now is an answer."""
        for line in sorted(lines):
            self._bytes -= self._results[line].batches_bytes
            self._look_at(line)
        return self._is_answer()

    def _is_answer(self) -> bool:
        if self._slow:
            return False
        return self._bytes >= self._bytes_min or self._has_error or self._wait_s == 0 or not self._wanted

    def _look_at(self, line: int) -> None:
        one = self._wanted[line]
        self._logs[line] = log = self._find(one.key, one.index)
        found = self._not_here(one) if log is None else self._look(line, one, log)
        self._bytes += found.batches_bytes
        self._has_error = self._has_error or found.error_code != 0
        self._results[line] = found

    def _look(self, line: int, one: FetchWanted, log: PartitionLog) -> PartitionFetched:
        core = log.core
        if one.leader_epoch not in (-1, core.leader_epoch):
            older = one.leader_epoch < core.leader_epoch
            code = ErrorCode.fenced_leader_epoch if older else ErrorCode.unknown_leader_epoch
            return PartitionFetched(one.index, int(code), leader=self._leader(log.topic_partition) if older else None)
        high_watermark = core.high_watermark
        if not core.log_start_offset <= one.offset <= core.next_offset:
            return PartitionFetched(
                one.index, int(ErrorCode.offset_out_of_range), high_watermark, high_watermark, core.log_start_offset
            )
        batches, size = (), 0
        room = min(one.bytes_max, self._bytes_max - self._bytes)
        if room > 0 and one.offset < high_watermark:
            found = self._services.reader.read_tail(log, one.offset, high_watermark, room)
            if found is None:
                found = self._services.pending_reads.ready(log, one.offset, high_watermark, room)
            if found is None:
                self._slow.append((line, one, log, high_watermark))
            else:
                batches, size = found  # type: ignore[assignment]
        return self._fetched(one, log, batches, size)

    def _fetched(self, one: FetchWanted, log: PartitionLog, batches: Any, size: int) -> PartitionFetched:
        core = log.core
        high_watermark = core.high_watermark
        return PartitionFetched(
            one.index, 0, high_watermark, high_watermark, core.log_start_offset, batches, size, self._aborted
        )

    def _not_here(self, one: FetchWanted) -> PartitionFetched:
        partitions = self._services.partitions
        topic = partitions.topic_by_id(one.key) if self._by_id else partitions.topic_by_name(one.key)
        if topic is None and self._by_id:
            return PartitionFetched(one.index, int(ErrorCode.unknown_topic_id))
        if topic is None or not 0 <= one.index < topic.partition_count:
            return PartitionFetched(one.index, int(ErrorCode.unknown_topic_or_partition))
        leader = self._leader(TopicPartition(topic.topic_id, one.index))
        return PartitionFetched(one.index, int(ErrorCode.not_leader_or_follower), leader=leader)

    def _leader(self, topic_partition: TopicPartition) -> Any:
        return self._services.partitions.leader_of(topic_partition)

    # -- waiting --------------------------------------------------------------------------------------------------------

    async def wait(self) -> None:
        """Until there is enough, something is wrong, or the client's patience ends; then answer."""
        unread: list[int] = []
        while True:
            if self._slow:
                lines = [line for line, *_ in self._slow]
                await self._read_slow()
                unread = [line for line in lines if not self._results[line].batches_bytes]
            if self._bytes >= self._bytes_min or self._has_error:
                break
            left_s = self._deadline - self._services.clock.monotonic()
            if left_s <= 0 or self._services.is_stopping:
                break
            moved = await self._progress(left_s)
            if not moved or self._look_again({*moved, *unread}):
                break
        self.respond()

    async def _progress(self, timeout_s: float) -> list[int]:
        """Wait until some partitions' high watermarks move, and return their lines; none at the time-out."""
        moved: list[int] = []
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake(line: int) -> None:
            moved.append(line)
            if not first.done():
                first.set_result(None)

        watched: list[tuple[PartitionLog, Callable[[], None]]] = []
        for line, one in enumerate(self._wanted):
            log = self._find(one.key, one.index)
            if log is None or log.core.high_watermark != self._results[line].high_watermark:
                # It moved since it was looked at: nobody would tell it again.
                moved.append(line)
            else:
                watched.append((log, partial(wake, line)))
        if moved:
            return moved
        for log, watcher in watched:
            log.watchers[watcher] = None
        try:
            async with asyncio.timeout(timeout_s):
                await first
        except TimeoutError:
            return []
        finally:
            for log, watcher in watched:
                log.watchers.pop(watcher, None)
        return moved

    async def _read_slow(self) -> None:
        """Read from bookies and object store what the tail cache does not have; put it into the results."""
        room = self._bytes_max - self._bytes
        reads: dict[asyncio.Task[Batches], tuple[int, FetchWanted, PartitionLog, int]] = {}
        for line, one, log, end_offset in self._slow:
            if room <= 0:
                break
            share = min(one.bytes_max, room)
            try:
                task = self._services.pending_reads.start(log, one.offset, end_offset, share)
            except StratalogError:
                continue
            reads[task] = (line, one, log, share)
            room -= share
        self._slow = []
        waiting = set(reads)
        deadline = self._deadline
        while waiting:
            now = self._services.clock.monotonic()
            if self._bytes >= max(self._bytes_min, 1):
                deadline = min(deadline, now + _GRACE_S)
            patience_s = max(deadline - now, 0.0)
            done, waiting = await asyncio.wait(waiting, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return
            for task in done:
                self._take(task, *reads[task])

    def _take(self, task: asyncio.Task[Batches], line: int, one: FetchWanted, log: PartitionLog, share: int) -> None:
        if task.cancelled():
            return
        failure = task.exception()
        if failure is None:
            end_offset = log.core.high_watermark
            batches, size = self._services.pending_reads.taken(log, one.offset, end_offset, share, task.result())
            self._results[line] = self._fetched(one, log, batches, size)
            self._bytes += size
        elif isinstance(failure, StratalogError):
            if not isinstance(failure, Unavailable):
                self._has_error = True
                self._results[line] = PartitionFetched(one.index, int(fetch_error_code_of(failure)))
        else:
            raise failure

    # -- answering ------------------------------------------------------------------------------------------------------

    def respond(self) -> None:
        """Send what has been found."""
        context = self._context
        session_id = self._session.session_id if self._session is not None else 0
        parts, size = encode_response(self._by_topic(), context.api_version, session_id=session_id)
        context.respond([response_head(_KEY, context.api_version, context.correlation_id, size), *parts])

    def _by_topic(self) -> list[tuple[bytes, list[PartitionFetched]]]:
        topics: dict[bytes, list[PartitionFetched]] = {}
        for one, found, log in zip(self._wanted, self._results, self._logs, strict=True):
            if self._session is not None:
                told = (found.error_code, found.high_watermark, found.log_start_offset)
                if self._is_incremental and told == one.told and not found.batches_bytes:
                    continue
                one.told = told
                if found.batches_bytes:
                    self._session.served((one.key, one.index))
            # Counted here: a long poll looks at what is there several times before it sends it once.
            if found.batches_bytes and log is not None:
                log.bytes_out += found.batches_bytes
            topics.setdefault(one.key, []).append(found)
        return list(topics.items())


API: Final = HandlerInfo(key=_KEY, min_version=4, max_version=18, handle_raw=handle_raw)
