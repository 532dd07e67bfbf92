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


class _Lane:
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
        self._lanes: dict[str, _Lane] = {}
        self._scheduled = False
        self._closed = False
        self._request: _Request | None = None

    def metrics(self) -> list[AddMetrics]:
        """For a scrape: one group for each bookie, the one that owes most first."""
        lanes = sorted(self._lanes.values(), key=lambda lane: -lane.in_flight_bytes)
        return [
            AddMetrics(
                bookie=lane.bookie,
                in_flight_add_bytes=lane.in_flight_bytes,
                in_flight_adds=lane.outstanding,
                queued_entries=len(lane.queued) + len(lane.retrying),
                failures=lane.generation,
            )
            for lane in lanes
        ]

    def send(self, targets: Sequence[str], entry: PendingEntry) -> None:
        """Queue ``entry`` for each of ``targets``; it is sent at the end of this event-loop turn."""
        lanes = self._lanes
        for bookie in targets:
            lane = lanes.get(bookie)
            if lane is None:
                lane = lanes[bookie] = _Lane(bookie)
            lane.queued.append(entry)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        for lane in list(self._lanes.values()):
            while lane.queued and lane.in_flight_bytes < self._settings.bookie_in_flight_bytes_max:
                self._send_request(lane)
        self._request = None

    def _send_request(self, lane: _Lane) -> None:
        channel = self._directory.channel(lane.bookie)
        if channel is None:
            self._fail(lane, "it is not registered")
            return
        request = self._next_request(lane)
        lane.in_flight_bytes += request.payload_bytes
        lane.outstanding += 1
        channel.send(ADD, request.parts, partial(self._on_reply, lane, lane.generation, request), self._timeout_s)

    def _next_request(self, lane: _Lane) -> _Request:
        """Take the first entries of the queue that fit into one request, at least one.

        The bookies of an ensemble mostly get the same entries in one turn and share one encoded request.
        """
        queued, request = lane.queued, self._request
        if request is not None and queued == request.entries:
            lane.queued = []
            return request
        count = self._count_fitting(queued)
        lane.queued = queued[count:]
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

    def _on_reply(self, lane: _Lane, generation: int, request: _Request, answer: memoryview | StratalogError) -> None:
        if self._closed:
            return
        lane.in_flight_bytes -= request.payload_bytes
        if generation == lane.generation:
            lane.outstanding -= 1
        if not isinstance(answer, StratalogError) and answer == request.all_stored:
            self._on_all_stored(lane, request.entries)
        else:
            refusal = answer if isinstance(answer, StratalogError) else self._on_statuses(lane, request.entries, answer)
            if refusal is not None and generation == lane.generation:
                self._on_error(lane, request.entries, refusal)
        if lane.queued and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _on_all_stored(self, lane: _Lane, entries: list[PendingEntry]) -> None:
        """Report the answer for each entry, then call each writer's ``deliver`` once. Hot path."""
        bookie = lane.bookie
        lane.silent_ticks = 0
        self._directory.health.answered(bookie)
        touched: dict[AddSink, None] = {}
        for entry in entries:
            sink = entry.sink
            if sink.on_added(entry, bookie):
                touched[sink] = None
        for sink in touched:
            sink.deliver()

    def _on_statuses(self, lane: _Lane, entries: list[PendingEntry], answer: memoryview) -> StratalogError | None:
        """Handle an answer that is not OK for all entries. Returns an error if it is malformed."""
        try:
            statuses = decode_statuses(answer)
        except Invalid as malformed:
            return malformed
        if len(statuses) != len(entries):
            return Invalid(f"the answer has {len(statuses)} statuses for {len(entries)} entries")
        touched: dict[AddSink, None] = {}
        self._on_mixed(lane, entries, statuses, touched)
        for sink in touched:
            sink.deliver()
        return None

    def _on_mixed(self, lane: _Lane, entries: list[PendingEntry], statuses: bytes, touched: dict[AddSink, None]) -> None:
        again = []
        for entry, status in zip(entries, statuses, strict=True):
            touched[entry.sink] = None
            if status == Status.OK:
                lane.silent_ticks = 0
                entry.sink.on_added(entry, lane.bookie)
            elif entry.sink.on_refused(entry, lane.bookie, status):
                again.append(entry)
        if Status.READ_ONLY in statuses or Status.STORAGE_FAILED in statuses:
            self._directory.failed(lane.bookie)
        if again:
            self._send_later(lane, again)

    def _on_error(self, lane: _Lane, entries: list[PendingEntry], error: StratalogError) -> None:
        if isinstance(error, Overloaded):
            self._send_later(lane, entries)
        else:
            self._fail(lane, error.message)

    def _send_later(self, lane: _Lane, entries: list[PendingEntry]) -> None:
        if not lane.retrying:
            self._loop.call_later(_RETRY_S, self._retry, lane)
        lane.retrying.extend(entries)

    def _retry(self, lane: _Lane) -> None:
        lane.queued[:0] = lane.retrying
        lane.retrying = []
        self._flush()

    def on_tick(self) -> None:
        """Fail silent bookies. Call every ``tick_ms``."""
        for lane in list(self._lanes.values()):
            if not lane.outstanding and not lane.retrying:
                lane.silent_ticks = 0
                continue
            lane.silent_ticks += 1
            if lane.silent_ticks > self._silent_ticks_max:
                self._fail(lane, f"it confirmed nothing for {self._settings.bookie_silence_ms} ms")

    def close(self) -> None:
        """Stop sending, and ignore all answers."""
        self._closed = True
        self._lanes.clear()

    def _fail(self, lane: _Lane, reason: str) -> None:
        """Drop the bookie's queue. Writers resend what they still hold when they replace or revive the bookie."""
        _log.warning("bookie %s failed for writing: %s", lane.bookie, reason)
        lane.generation += 1
        lane.outstanding = lane.silent_ticks = 0
        lane.queued, lane.retrying = [], []
        self._directory.failed(lane.bookie)
        self._on_bookie_failed(lane.bookie)
