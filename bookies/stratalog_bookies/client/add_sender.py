"""Sends entries to bookies: all entries appended in one event-loop turn, by all writers, become one ADD per bookie.

An ADD has at most ``request_bytes_max`` payload bytes (or one entry), and a bookie at most ``bookie_in_flight_bytes_max`` in
flight; the rest is queued, bounded by what writers may hold.

A bookie fails when its connection breaks, when it confirms nothing for ``bookie_silence_ms`` although it has adds to answer, or
when it reports that it cannot write. Silence is counted in ticks, not by the clock, so that a stall of this process is not
taken for a failure of every bookie.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from stratalog_bookies.client.config import LedgerClientSettings
from stratalog_bookies.client.core.entry import AddSink, PendingEntry
from stratalog_bookies.client.directory import BookieDirectory
from stratalog_bookies.metrics import AddMetrics
from stratalog_bookies.protocol.messages import ADD, Status, decode_statuses, encode_add, encode_statuses
from stratalog_core.errors import Invalid, Overloaded, StratalogError
from stratalog_core.ports import Buffer

_RETRY_S: Final = 0.02
_log = logging.getLogger(__name__)


class _BookieQueue:
    """The adds for one bookie. ``generation`` identifies answers to requests sent before its last failure."""

    __slots__ = ("bookie", "generation", "in_flight_bytes", "outstanding", "queued", "retrying", "silent_ticks")

    def __init__(self, bookie: str) -> None:
        self.bookie = bookie
        self.queued: list[PendingEntry] = []
        self.retrying: list[PendingEntry] = []
        self.in_flight_bytes = 0
        self.outstanding = 0
        self.silent_ticks = 0
        self.generation = 0


class _Request(NamedTuple):
    """An ADD, and the answer that means that all its entries are stored."""

    entries: list[PendingEntry]
    payload_bytes: int
    parts: list[Buffer]
    all_stored: bytes

    @classmethod
    def of(cls, entries: list[PendingEntry]) -> _Request:
        payloads: list[Buffer] = []
        for entry in entries:
            payloads.extend(entry.payload)
        parts = encode_add([entry.header for entry in entries], payloads)
        payload_bytes = sum([entry.payload_bytes for entry in entries])
        return cls(entries, payload_bytes, parts, encode_statuses(bytes(len(entries))))


class AddSender:
    """Batches and sends adds, and distributes the answers. Calls ``on_bookie_failed`` when a bookie fails for all writers."""

    def __init__(
        self, directory: BookieDirectory, settings: LedgerClientSettings, on_bookie_failed: Callable[[str], None]
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._on_bookie_failed = on_bookie_failed
        self._silent_ticks_max = max(1, settings.bookie_silence_ms // settings.tick_ms)
        self._timeout_s = settings.request_timeout_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._queues: dict[str, _BookieQueue] = {}
        self._scheduled = False
        self._closed = False
        self._request: _Request | None = None

    def metrics(self) -> list[AddMetrics]:
        """Metric groups: one per bookie, most bytes in flight first."""
        queues = sorted(self._queues.values(), key=lambda queue: -queue.in_flight_bytes)
        return [
            AddMetrics(
                bookie=queue.bookie,
                in_flight_add_bytes=queue.in_flight_bytes,
                in_flight_adds=queue.outstanding,
                queued_entries=len(queue.queued) + len(queue.retrying),
                failures=queue.generation,
            )
            for queue in queues
        ]

    def send(self, targets: Sequence[str], entry: PendingEntry) -> None:
        """Queue ``entry`` for each of ``targets``; it is sent at the end of this event-loop turn."""
        queues = self._queues
        for bookie in targets:
            queue = queues.get(bookie)
            if queue is None:
                queue = queues[bookie] = _BookieQueue(bookie)
            queue.queued.append(entry)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        for queue in list(self._queues.values()):
            while queue.queued and queue.in_flight_bytes < self._settings.bookie_in_flight_bytes_max:
                self._send_request(queue)
        self._request = None

    def _send_request(self, queue: _BookieQueue) -> None:
        channel = self._directory.channel(queue.bookie)
        if channel is None:
            self._fail(queue, "it is not registered")
            return
        request = self._next_request(queue)
        queue.in_flight_bytes += request.payload_bytes
        queue.outstanding += 1
        channel.send(ADD, request.parts, partial(self._on_reply, queue, queue.generation, request), self._timeout_s)

    def _next_request(self, queue: _BookieQueue) -> _Request:
        """Take the first entries of the queue that fit into one request, at least one.

        The bookies of an ensemble mostly get the same entries in one turn and share one encoded request.
        """
        queued, request = queue.queued, self._request
        if request is not None and queued == request.entries:
            queue.queued = []
            return request
        count = self._count_fitting(queued)
        queue.queued = queued[count:]
        self._request = request = _Request.of(queued[:count])
        return request

    def _count_fitting(self, queued: list[PendingEntry]) -> int:
        bytes_max = self._settings.request_bytes_max
        count = payload_bytes = 0
        for entry in queued[: self._settings.request_entries_max]:
            payload_bytes += entry.payload_bytes
            if count and payload_bytes > bytes_max:
                break
            count += 1
        return count

    def _on_reply(self, queue: _BookieQueue, generation: int, request: _Request, answer: memoryview | StratalogError) -> None:
        if self._closed:
            return
        queue.in_flight_bytes -= request.payload_bytes
        if generation == queue.generation:
            queue.outstanding -= 1
        if not isinstance(answer, StratalogError) and answer == request.all_stored:
            self._on_all_stored(queue, request.entries)
        else:
            refusal = answer if isinstance(answer, StratalogError) else self._on_statuses(queue, request.entries, answer)
            if refusal is not None and generation == queue.generation:
                self._on_error(queue, request.entries, refusal)
        if queue.queued and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _on_all_stored(self, queue: _BookieQueue, entries: list[PendingEntry]) -> None:
        """Report the answer for each entry, then call each writer's ``deliver`` once. Hot path."""
        bookie = queue.bookie
        queue.silent_ticks = 0
        self._directory.health.answered(bookie)
        touched: dict[AddSink, None] = {}
        for entry in entries:
            sink = entry.sink
            if sink.on_added(entry, bookie):
                touched[sink] = None
        for sink in touched:
            sink.deliver()

    def _on_statuses(self, queue: _BookieQueue, entries: list[PendingEntry], answer: memoryview) -> StratalogError | None:
        """Handle an answer that is not OK for all entries. Returns an error if it is malformed."""
        try:
            statuses = decode_statuses(answer)
        except Invalid as malformed:
            return malformed
        if len(statuses) != len(entries):
            return Invalid(f"the answer has {len(statuses)} statuses for {len(entries)} entries")
        touched: dict[AddSink, None] = {}
        self._on_mixed(queue, entries, statuses, touched)
        for sink in touched:
            sink.deliver()
        return None

    def _on_mixed(
        self, queue: _BookieQueue, entries: list[PendingEntry], statuses: bytes, touched: dict[AddSink, None]
    ) -> None:
        again = []
        for entry, status in zip(entries, statuses, strict=True):
            touched[entry.sink] = None
            if status == Status.OK:
                queue.silent_ticks = 0
                entry.sink.on_added(entry, queue.bookie)
            elif entry.sink.on_refused(entry, queue.bookie, status):
                again.append(entry)
        if Status.READ_ONLY in statuses or Status.STORAGE_FAILED in statuses:
            self._directory.failed(queue.bookie)
        if again:
            self._send_later(queue, again)

    def _on_error(self, queue: _BookieQueue, entries: list[PendingEntry], error: StratalogError) -> None:
        if isinstance(error, Overloaded):
            self._send_later(queue, entries)
        else:
            self._fail(queue, error.message)

    def _send_later(self, queue: _BookieQueue, entries: list[PendingEntry]) -> None:
        if not queue.retrying:
            self._loop.call_later(_RETRY_S, self._retry, queue)
        queue.retrying.extend(entries)

    def _retry(self, queue: _BookieQueue) -> None:
        queue.queued[:0] = queue.retrying
        queue.retrying = []
        self._flush()

    def on_tick(self) -> None:
        """Fail silent bookies. Call every ``tick_ms``."""
        for queue in list(self._queues.values()):
            if not queue.outstanding and not queue.retrying:
                queue.silent_ticks = 0
                continue
            queue.silent_ticks += 1
            if queue.silent_ticks > self._silent_ticks_max:
                self._fail(queue, f"it confirmed nothing for {self._settings.bookie_silence_ms} ms")

    def close(self) -> None:
        """Stop sending, and ignore all answers."""
        self._closed = True
        self._queues.clear()

    def _fail(self, queue: _BookieQueue, reason: str) -> None:
        """Drop the bookie's queue. Writers resend what they still hold when they replace or revive the bookie."""
        _log.warning("bookie %s failed for writing: %s", queue.bookie, reason)
        queue.generation += 1
        queue.outstanding = queue.silent_ticks = 0
        queue.queued, queue.retrying = [], []
        self._directory.failed(queue.bookie)
        self._on_bookie_failed(queue.bookie)
