"""Fetch (key 1), versions 4–18: sessions (KIP-227), long poll, leader epochs (KIP-320), topic ids (KIP-516).

Batches in the tail cache are returned immediately and without copying; the others are read from bookies and the object
store (``requests/fetch_reads.py``). A partition's first batch is always returned whole, so that every consumer makes progress
(KIP-74). A fetch parked at the tail is a watcher of its partitions and one timer, without a task or a future.

A ``read_committed`` fetch reads below the last stable offset and gets the aborted transactions that overlap its batches, from
memory or, for older batches, with the reads (``reads/aborted_transactions.py``). There are no followers, so what only they send
is ignored. History that is only in the object store is served by any broker: a client with a rack is sent to one in its rack
(``requests/replica_reads.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.errors import fetch_error_code_of
from stratalog_broker.protocol.fetch import TOPIC_ID_VERSION, PartitionFetched, encode_response
from stratalog_broker.protocol.fetch_request import SESSION_VERSION, FetchRequest, FetchWanted, parse_request
from stratalog_broker.protocol.frame import response_head
from stratalog_broker.reads.aborted_transactions import AbortedRun, AbortedTransactions
from stratalog_broker.reads.pending_reads import NOTHING, Batches, PendingReads
from stratalog_broker.reads.readable_log import ColdHistory, ReadableLog
from stratalog_broker.reads.replay_pace import ReplayPace
from stratalog_broker.requests.access import Access, Operation, Resource
from stratalog_broker.requests.context import RequestContext
from stratalog_broker.requests.fetch_positions import readable_end, refused_position
from stratalog_broker.requests.fetch_reads import FetchReads, aborted_at_once
from stratalog_broker.requests.fetch_sessions import FetchSession, FetchSessions, SessionRefused
from stratalog_broker.requests.handler_info import HandlerInfo, Waiting
from stratalog_broker.requests.held_fetch import HeldFetch, wants_history_only
from stratalog_broker.requests.permissions import FindPartition, Permissions, except_denied
from stratalog_broker.requests.replica_fetch import ReplicaFetch
from stratalog_broker.requests.replica_reads import ReplicaReads
from stratalog_broker.requests.unsent_responses import UnsentResponses
from stratalog_core.errors import StratalogError
from stratalog_core.memory.retained import retained_bytes
from stratalog_core.ports import Clock
from stratalog_metadata.records import TopicPartition

_ACCESS: Final = Access(Operation.READ, Resource.TOPIC)
_KEY: Final = 1
_READ_COMMITTED: Final = 1
_NEWER_EPOCH: Final = ErrorCode.unknown_leader_epoch
_NOT_LOOKED_AT: Final = PartitionFetched(-1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchHandler:
    """Handles all Fetch requests of the broker."""

    partitions: Partitions
    permissions: Permissions
    pending_reads: PendingReads
    pace: ReplayPace
    aborted: AbortedTransactions
    replica_reads: ReplicaReads
    sessions: FetchSessions
    responses: UnsentResponses
    clock: Clock
    settings: BrokerSettings

    def __call__(self, context: RequestContext, body: memoryview) -> Waiting | None:
        """Respond immediately, or return the parked fetch."""
        request = parse_request(body, context.api_version)
        try:
            fetch = FetchCall(self, context, request)
        except SessionRefused as refused:
            parts, size = encode_response(
                (), context.api_version, error_code=int(refused.code), throttle_ms=context.throttle_ms
            )
            context.respond([response_head(_KEY, context.api_version, context.correlation_id, size), *parts])
            return None
        if self.pace.limit and wants_history_only(fetch.places(), self.pending_reads, is_near=bool(request.rack)):
            return HeldFetch(fetch, self.pace)
        return None if fetch.start() else fetch


class FetchCall:
    """One request with its results so far; a ``Watcher`` of its partitions while it is parked."""

    __slots__ = (
        "_by_id", "_bytes", "_bytes_max", "_bytes_min", "_context", "_deadline", "_denied", "_fetches", "_find",
        "_found_bytes", "_has_error", "_is_committed", "_is_incremental", "_is_watching", "_logs", "_moved", "_reading",
        "_reads", "_replicas", "_results", "_saw_releasing", "_seen", "_session", "_timer", "_unread", "_wait_s", "_wanted",
    )  # fmt: skip
    _seen: list[int]  # each partition's readable end when reads began; not set before

    def __init__(self, fetches: FetchHandler, context: RequestContext, request: FetchRequest) -> None:
        self._context = context
        self._fetches = fetches
        self._by_id = context.api_version >= TOPIC_ID_VERSION
        self._find: FindPartition = fetches.partitions.find_by_id if self._by_id else fetches.partitions.find_by_name
        self._session: FetchSession | None = None
        self._wanted, self._is_incremental = request.wanted, False
        if context.api_version >= SESSION_VERSION:
            now_s = fetches.clock.monotonic()
            self._session, self._wanted, self._is_incremental = fetches.sessions.of(request, now_s)
        self._denied: frozenset[bytes] = frozenset()
        if not fetches.permissions.is_open:
            topic_by_id = fetches.partitions.topic_by_id if self._by_id else None
            keys = (one.key for one in self._wanted)
            self._denied = fetches.permissions.denied_keys(context, _ACCESS, keys, topic_by_id)
            self._find = except_denied(self._find, self._denied)
        self._bytes_max = min(max(request.bytes_max, 1), fetches.settings.response_bytes_max, fetches.responses.room)
        self._bytes_min = min(request.bytes_min, self._bytes_max)
        self._wait_s = max(request.max_wait_ms, 0) / 1000
        self._deadline = fetches.clock.monotonic() + self._wait_s
        self._is_committed = request.isolation_level == _READ_COMMITTED
        self._replicas = ReplicaFetch(fetches.replica_reads, request.rack) if request.rack else None
        self._results = [_NOT_LOOKED_AT] * len(self._wanted)
        self._logs: list[PartitionLog | None] = [None] * len(self._wanted)
        self._reads: FetchReads | None = None  # those that the request has to wait for
        self._bytes = 0
        self._found_bytes = 0
        self._has_error = False  # an error or another rare result, to be returned at once
        self._saw_releasing = False
        self._is_watching = False
        self._moved: list[PartitionLog] = []
        self._unread: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.Task[None] | None = None

    # -- checking -------------------------------------------------------------------------------------------------------

    def places(self) -> Iterator[tuple[FetchWanted, PartitionLog | None]]:
        """Yield what is wanted, and its partition if it is here."""
        return ((one, self._find(one.key, one.index)) for one in self._wanted)

    def start_late(self, bytes_max: int) -> None:
        """Start after a wait, for ``bytes_max`` bytes at most."""
        self._bytes_max = min(self._bytes_max, bytes_max)
        self._bytes_min = min(self._bytes_min, self._bytes_max)
        self._deadline = self._fetches.clock.monotonic() + self._wait_s
        self._or_fail(self.start)

    def start(self) -> bool:
        """Check every partition, then respond or wait; return True if it responded."""
        for line in range(len(self._wanted)):
            self._look_at(line)
        return self._answer_or_wait()

    def _look_again(self, lines: Iterable[int]) -> bool:
        """Check again the partitions at ``lines``, then respond or wait; return True if it responded."""
        for line in sorted(lines):
            self._bytes -= self._results[line].batches_bytes
            self._look_at(line)
        return self._answer_or_wait()

    def _look_at(self, line: int) -> None:
        one = self._wanted[line]
        if self._replicas is not None:
            self._replicas.begin(line)
        self._logs[line] = log = self._find(one.key, one.index)
        if log is not None and log.is_releasing:
            self._saw_releasing = True
            self._results[line] = PartitionFetched(one.index, int(ErrorCode.not_leader_or_follower))
            return
        found = self._not_here(line, one) if log is None else self._look(line, one, log)
        if found.error_code or found.has_rare_fields:
            self._has_error = True
        self._bytes += found.batches_bytes
        self._results[line] = found

    def _look(self, line: int, one: FetchWanted, log: PartitionLog) -> PartitionFetched:
        core = log.core
        if one.leader_epoch != core.leader_epoch and one.leader_epoch != -1:
            older = one.leader_epoch < core.leader_epoch
            code = ErrorCode.fenced_leader_epoch if older else ErrorCode.unknown_leader_epoch
            return PartitionFetched(one.index, int(code), leader=self._leader(log.topic_partition) if older else None)
        if one.last_epoch >= 0 or not core.log_start_offset <= one.offset <= core.next_offset:
            refused = refused_position(one, core)
            if refused is not None:
                return refused
        unstable = core.first_unstable_offset
        end_offset = unstable if unstable is not None and self._is_committed else core.high_watermark
        room = min(max(one.bytes_max, 1), self._bytes_max - self._bytes) if one.offset < end_offset else 0
        if room <= 0:
            return self._fetched(one, log, NOTHING)
        found: Batches | None = log.tail.read(one.offset, end_offset, room)
        if found is None and self._replicas is not None and (replica := self._replicas.preferred_replica(one, log)) >= 0:
            return self._fetched(one, log, NOTHING)._replace(preferred_replica=replica)
        if found is None:
            found = self._fetches.pending_reads.ready(log, one.offset, end_offset, room)
        return self._explained(line, one, log, end_offset, found)

    def _explained(
        self, line: int, one: FetchWanted, log: ReadableLog, end_offset: int, found: Batches | None
    ) -> PartitionFetched:
        """Return batches with the transactions aborted in them; empty if either has to be read first, which begins later."""
        if found is None:
            self._reads_to_run().read_later(line, one, log, end_offset)
            return self._fetched(one, log, NOTHING)
        aborted = aborted_at_once(self._fetches.aborted, one, log, found) if self._is_committed else ()
        if aborted is None:
            self._reads_to_run().explain_later(line, one, log, found)
            return self._fetched(one, log, NOTHING)
        return self._fetched(one, log, found, aborted)

    def _reads_to_run(self) -> FetchReads:
        if self._reads is None:
            fetches = self._fetches
            self._reads = FetchReads(
                fetches.pending_reads, fetches.aborted, fetches.clock, self, is_committed=self._is_committed
            )
        return self._reads

    def _fetched(
        self, one: FetchWanted, log: ReadableLog, found: Batches, aborted: Sequence[AbortedRun] = ()
    ) -> PartitionFetched:
        core = log.core
        high_watermark, unstable = core.high_watermark, core.first_unstable_offset
        stable = high_watermark if unstable is None else unstable
        reported = aborted if self._is_committed else None
        return PartitionFetched(one.index, 0, high_watermark, stable, core.log_start_offset, *found, reported)

    def _not_here(self, line: int, one: FetchWanted) -> PartitionFetched:
        if one.key in self._denied:
            return PartitionFetched(one.index, int(ErrorCode.topic_authorization_failed))
        partitions = self._fetches.partitions
        topic = partitions.topic_by_id(one.key) if self._by_id else partitions.topic_by_name(one.key)
        if topic is None and self._by_id:
            return PartitionFetched(one.index, int(ErrorCode.unknown_topic_id))
        if topic is None or not 0 <= one.index < topic.partition_count:
            return PartitionFetched(one.index, int(ErrorCode.unknown_topic_or_partition))
        code = ErrorCode.not_leader_or_follower
        if self._replicas is not None:
            code, history = self._replicas.history(line, one, topic)
            if history is not None:
                return self._look_at_history(line, one, history)
        leader = self._leader(TopicPartition(topic.topic_id, one.index)) if code is not _NEWER_EPOCH else None
        return PartitionFetched(one.index, int(code), leader=leader)

    def _look_at_history(self, line: int, one: FetchWanted, history: ColdHistory) -> PartitionFetched:
        """Serve cold history of a partition that another broker owns."""
        room = min(max(one.bytes_max, 1), self._bytes_max - self._bytes)
        if room <= 0 or (self._replicas is not None and self._replicas.is_stale):
            return self._fetched(one, history, NOTHING)
        return self._explained(line, one, history, history.core.end_offset, None)

    def _leader(self, topic_partition: TopicPartition) -> Any:
        return self._fetches.partitions.leader_of(topic_partition, self._context.listener)

    # -- waiting --------------------------------------------------------------------------------------------------------

    def _answer_or_wait(self) -> bool:
        """Respond, read partitions that are not in memory, or wait for a change; return True if it responded."""
        if self._replicas is not None and self._replicas.is_stale:
            self._reading = asyncio.get_running_loop().create_task(self._refresh(self._replicas))
            return False
        if self._reads is not None:
            reads, self._reads = self._reads, None
            self._seen = [readable_end(log) for log in self._logs]
            self._reading = asyncio.get_running_loop().create_task(self._read(reads))
            return False
        if self._is_enough() or self._wait_s == 0 or not self._wanted or self._fetches.partitions.is_stopping:
            self._respond()
            return True
        self._unread = []
        return self._watch_or_respond()

    def _is_enough(self) -> bool:
        if self._saw_releasing and any(log is not None and log.is_releasing for log in self._logs):
            return False
        return self._bytes >= self._bytes_min or self._has_error

    def _watch_or_respond(self) -> bool:
        """Wait until a readable end moves or the deadline, or respond if the batches found take too much memory to keep.

        Return True if it responded.
        """
        found_bytes = retained_bytes(chain.from_iterable(result.batches for result in self._results)) if self._bytes else 0
        if not self._fetches.responses.may_wait(found_bytes):
            self._respond()
            return True
        self._found_bytes = found_bytes
        self._is_watching = True
        for log in self._logs:
            if log is not None:
                log.watchers[self] = None
        left_s = max(self._deadline - self._fetches.clock.monotonic(), 0.0)
        self._timer = asyncio.get_running_loop().call_later(left_s, self._or_fail, self._respond)
        return False

    def moved(self, log: PartitionLog) -> None:
        """See ``Watcher``. All partitions that move in one event loop iteration are checked together."""
        if not self._moved:
            asyncio.get_running_loop().call_soon(self._on_moved)
        self._moved.append(log)

    def _on_moved(self) -> None:
        if not self._is_watching:
            return
        moved, self._moved = set(self._moved), []
        self._end_waiting()
        self._or_fail(self._look_again, {*self._unread, *(line for line, log in enumerate(self._logs) if log in moved)})

    async def _refresh(self, replicas: ReplicaFetch) -> None:
        try:
            await replicas.refresh()
            # Any partition may have changed meanwhile, when no watcher was set. No read has begun.
            self._reading = self._reads = None
            self._look_again(range(len(self._wanted)))
        except Exception:
            self._fail()

    async def _read(self, reads: FetchReads) -> None:
        """Read partitions that are not in memory, then respond or keep waiting."""
        try:
            lines = reads.lines
            await reads.run(self._bytes_max - self._bytes, self._bytes_min, self._deadline)
            self._reading = None
            self._unread = [line for line in lines if not self._results[line].batches_bytes]
            is_late = self._deadline <= self._fetches.clock.monotonic()
            if is_late or self._is_enough() or self._fetches.partitions.is_stopping:
                self._respond()
            elif moved := self._moved_meanwhile():
                self._look_again({*moved, *self._unread})
            else:
                self._watch_or_respond()
        except Exception:
            self._fail()

    def _moved_meanwhile(self) -> list[int]:
        """Return lines of partitions that changed during the read, when no watcher was set; no notification would follow."""
        moved = []
        for line, (one, log, seen) in enumerate(zip(self._wanted, self._logs, self._seen, strict=True)):
            if self._find(one.key, one.index) is not log or readable_end(log) != seen:
                moved.append(line)
        return moved

    def _end_waiting(self) -> None:
        if self._is_watching:
            self._is_watching = False
            self._fetches.responses.waited(self._found_bytes)
            for log in self._logs:
                if log is not None:
                    log.watchers.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def cancel(self) -> None:
        """See ``Waiting``."""
        self._end_waiting()
        if self._reading is not None:
            self._reading.cancel()
        self._context.release()

    def _or_fail(self, step: Callable[..., object], *arguments: object) -> None:
        try:
            step(*arguments)
        except Exception:
            self._fail()

    def _fail(self) -> None:
        self._end_waiting()
        self._context.fail()

    # -- results of reads (FetchSink) -----------------------------------------------------------------------------------

    @property
    def bytes_found(self) -> int:
        """Bytes of the batches found so far."""
        return self._bytes

    def found(self, line: int, one: FetchWanted, log: ReadableLog, batches: Batches, aborted: Sequence[AbortedRun]) -> None:
        """Keep batches that were read."""
        self._results[line] = found = self._fetched(one, log, batches, aborted)
        if log is self._logs[line]:
            self._seen[line] = found.high_watermark
        self._bytes += batches[1]

    def failed(self, line: int, one: FetchWanted, failure: StratalogError) -> None:
        """Keep an error for the response."""
        self._has_error = True
        self._results[line] = PartitionFetched(one.index, int(fetch_error_code_of(failure)))

    # -- responding -----------------------------------------------------------------------------------------------------

    def _respond(self) -> None:
        """Send the results found so far."""
        self._end_waiting()
        context = self._context
        session_id = self._session.session_id if self._session is not None else 0
        parts, size = encode_response(
            self._by_topic(), context.api_version, session_id=session_id, throttle_ms=context.throttle_ms
        )
        context.respond([response_head(_KEY, context.api_version, context.correlation_id, size), *parts])

    def _by_topic(self) -> list[tuple[bytes, list[PartitionFetched]]]:
        topics: dict[bytes, list[PartitionFetched]] = {}
        for line, (one, found, log) in enumerate(zip(self._wanted, self._results, self._logs, strict=True)):
            if self._session is not None:
                told = (found.error_code, found.high_watermark, found.log_start_offset)
                is_news = told != one.told or found.error_code or found.batches_bytes or found.has_rare_fields
                if self._is_incremental and not is_news:
                    continue
                one.told = told
                if found.batches_bytes:
                    self._session.served((one.key, one.index))
            # Counted here because a long poll may check the same batches several times before it sends them once.
            if found.batches_bytes and log is not None:
                log.bytes_out += found.batches_bytes
            elif self._replicas is not None:
                self._replicas.count(line, found, is_owned=log is not None)
            topics.setdefault(one.key, []).append(found)
        return list(topics.items())


API: Final = HandlerInfo(key=_KEY, min_version=4, max_version=18, handle_raw=FetchHandler, access=_ACCESS)
