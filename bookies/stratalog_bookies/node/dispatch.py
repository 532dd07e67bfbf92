"""Routes requests from the network to the disks, and their answers back.

ADD is the hot path: handled in the event loop's callback, without a task. Each other request gets a task; their number is
bounded. A ledger's disk is its id modulo the number of disks, permanently.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

from stratalog_bookies.config import BookieSettings
from stratalog_bookies.disk.core.disk_core import Header
from stratalog_bookies.disk.core.lookup import Budget, Found
from stratalog_bookies.disk.disk import Disk, OnStatuses, StatusGather
from stratalog_bookies.disk.reads import RangeRead
from stratalog_bookies.metrics import BookieMetrics, Counters
from stratalog_bookies.node.collector import Collector
from stratalog_bookies.node.lac_waiters import LacWaiters
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import ENTRIES_MAX, ENTRY_HEADER_BYTES, LEDGERS_MAX, LedgerTail, Range, Status
from stratalog_bookies.repair.scrub import Scrub
from stratalog_core.errors import Corrupt, Invalid, Overloaded, StorageFailed, StratalogError, Unavailable
from stratalog_core.ports import Buffer, Request
from stratalog_core.transient_errors import lacks_resources

_log = logging.getLogger(__name__)

Answer = list[Buffer]
Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class _Share:
    """The body of an ADD while ``parts`` parts of it wait for the disk at ``position``."""

    position: int
    body_bytes: int
    parts: int


class Dispatch:
    """The request handler of a running bookie. ``handle`` is passed to the transport."""

    def __init__(self, settings: BookieSettings, disks: Sequence[Disk], collector: Collector, counters: Counters) -> None:
        self._settings = settings
        self._disks = disks
        self._collector = collector
        self._counters = counters
        self._scrubs: Sequence[Scrub] = ()
        self._waiters = LacWaiters(settings.lac_waiters_max)
        for disk in disks:
            disk.on_group = partial(self._waiters.check, disk)
        self._add_bytes_max = min(disk.add_bytes_max for disk in disks)
        self._in_flight_bytes = [0] * len(disks)
        self._share_bytes = settings.in_flight_bytes_max // len(disks)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._handlers: dict[int, Callable[[memoryview], Awaitable[Answer]]] = {
            messages.READ: self._read,
            messages.READ_HEADERS: self._read_headers,
            messages.FENCE: self._fence,
            messages.LAC: self._lac,
            messages.WRITE_LAC: self._write_lac,
            messages.DELETE: self._delete,
            messages.LIST: self._list,
            messages.INFO: self._info,
            messages.SCRUB: self._scrub,
        }

    def handle(self, request: Request) -> None:
        """Answer a request, now or later. Never raises, never blocks."""
        if self._is_closing:
            request.fail(Unavailable("the bookie is stopping"))
        elif request.method == messages.ADD:
            try:
                self._add(request)
            except Invalid as wrong:
                request.fail(wrong)
        elif request.method == messages.AWAIT_LAC:
            try:
                self._await_lac(request)
            except (Invalid, Overloaded) as refusal:
                request.fail(refusal)
        elif request.method not in self._handlers:
            request.fail(Invalid(f"a bookie has no method {request.method:#06x}"))
        elif len(self._tasks) >= self._settings.requests_max:
            request.fail(Overloaded(f"{len(self._tasks)} requests are waiting; maximum is requests_max: try again later"))
        else:
            task = asyncio.get_running_loop().create_task(self._serve(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def metrics(self) -> BookieMetrics:
        """Metric group of requests in progress, for one scrape."""
        return BookieMetrics(
            in_flight_add_bytes=sum(self._in_flight_bytes),
            requests_in_progress=len(self._tasks),
            lac_waiters=len(self._waiters),
        )

    def scrub_by(self, scrubs: Sequence[Scrub]) -> None:
        """Set the scrubs that SCRUB starts and reports on."""
        self._scrubs = scrubs

    async def close(self) -> None:
        """Refuse new requests, which would keep the disks from coming to rest, and finish accepted ones."""
        self._is_closing = True
        self._waiters.close()
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _serve(self, request: Request) -> None:
        try:
            answer = await self._handlers[request.method](request.body)
        except StratalogError as error:
            request.fail(error)
        except OSError as failure:
            request.fail(StorageFailed(f"reading failed: {failure}", read_only=False))
        except Exception:
            _log.exception("a request of method %#06x failed", request.method)
            request.fail(StratalogError("the bookie failed to handle the request; its log has the details"))
        else:
            request.reply(*answer)

    def _disk(self, ledger_id: int) -> Disk:
        return self._disks[ledger_id % len(self._disks)]

    # -- adds

    def _add(self, request: Request) -> None:
        body = request.body
        headers = messages.decode_add(body)
        self._counters.add_requests += 1
        self._counters.add_entries += len(headers)
        if not headers or len(body) > self._add_bytes_max:
            raise Invalid(
                f"an ADD has {len(headers)} entries and {len(body)} bytes; maximum is {self._add_bytes_max}: send it in parts"
            )
        self._counters.add_bytes += len(body)
        reply = partial(_reply_statuses, request)
        if len(self._disks) == 1:
            add_bytes = len(body) - messages.COUNT_BYTES
            payload_at = messages.payloads_start(len(headers))
            share = self._share(self._disks[0], len(body), 1)
            self._add_to(self._disks[0], share, headers, body, messages.COUNT_BYTES, payload_at, add_bytes, reply)
            return
        parts = self._by_disk(headers)
        gather = StatusGather(bytearray(len(headers)), len(parts), reply)
        counts = Counter(disk.position for disk, *_ in parts)
        shares = {position: self._share(self._disks[position], len(body), count) for position, count in counts.items()}
        for disk, first, end, payload_at, payload_bytes in parts:
            header_at = messages.COUNT_BYTES + first * ENTRY_HEADER_BYTES
            add_bytes = payload_bytes + (end - first) * ENTRY_HEADER_BYTES
            share, done = shares[disk.position], gather.part(first)
            self._add_to(disk, share, headers[first:end], body, header_at, payload_at, add_bytes, done)

    def _share(self, disk: Disk, body_bytes: int, parts: int) -> _Share | None:
        """Count a request's body, once, for a disk that stores ``parts`` parts of it. None: too much waits for the disk, and a
        disk that hangs must not use up the others' shares.
        """
        waiting = self._in_flight_bytes[disk.position]
        if waiting and waiting + body_bytes > self._share_bytes and disk.core.refusal is None:
            self._counters.adds_overloaded += 1
            return None
        # All of it: the body stays in memory until its last part is written.
        self._in_flight_bytes[disk.position] = waiting + body_bytes
        return _Share(disk.position, body_bytes, parts)

    def _add_to(
        self, disk: Disk, share: _Share | None, headers: Sequence[Header], body: memoryview, header_at: int, payload_at: int,
        add_bytes: int, done: OnStatuses,
    ) -> None:  # fmt: skip
        """Add one part of a request to its disk."""
        if share is None:
            done(bytearray((Status.OVERLOADED,)) * len(headers))
        else:
            disk.add(headers, body, header_at, payload_at, add_bytes, partial(self._added, share, done))

    def _added(self, share: _Share, done: OnStatuses, statuses: bytearray) -> None:
        share.parts -= 1
        if not share.parts:
            self._in_flight_bytes[share.position] -= share.body_bytes
        done(statuses)

    def _by_disk(self, headers: Sequence[Header]) -> list[tuple[Disk, int, int, int, int]]:
        """``(disk, first, end, payload position, payload bytes)`` of each run of entries on one disk."""
        start = payload_at = messages.payloads_start(len(headers))
        parts = []
        first = 0
        for index, header in enumerate(headers):
            if self._disk(header[0]) is not self._disk(headers[first][0]):
                parts.append((self._disk(headers[first][0]), first, index, start, payload_at - start))
                first, start = index, payload_at
            payload_at += header[3]
        parts.append((self._disk(headers[first][0]), first, len(headers), start, payload_at - start))
        return parts

    # -- reads

    async def _read(self, body: memoryview) -> Answer:
        ranges, max_bytes, flags = messages.decode_read(body)
        unfenced: AbstractSet[int] = frozenset()
        if flags & messages.FENCE_FIRST:
            tails = await self._fence_all(list(dict.fromkeys(each.ledger_id for each in ranges)))
            unfenced = {self._disk(tail.ledger_id).position for tail in tails if tail.status == Status.STORAGE_FAILED}
        budget = Budget(min(max_bytes, self._settings.read_bytes_max), ENTRIES_MAX)
        return await self._read_ranges(ranges, budget, None, unfenced)

    async def _read_headers(self, body: memoryview) -> Answer:
        ranges, head_bytes, entries_max = messages.decode_read_headers(body)
        return await self._read_ranges(ranges, Budget(self._settings.read_bytes_max, entries_max, head_bytes), head_bytes)

    async def _read_ranges(
        self, ranges: Sequence[Range], budget: Budget, head_bytes: int | None, unfenced: AbstractSet[int] = frozenset()
    ) -> Answer:
        """Nothing is decided about ranges on ``unfenced`` disks, which could not fence their ledgers. The others are read."""
        self._counters.read_requests += 1
        answers: list[RangeRead] = []
        for first, end in _neighbours([each.ledger_id % len(self._disks) for each in ranges]):
            disk = self._disk(ranges[first].ledger_id)
            if disk.is_missing or disk.position in unfenced:
                answers += [_nothing_decided(each, Status.STORAGE_FAILED) for each in ranges[first:end]]
                continue
            try:
                answers += await disk.reads.read(ranges[first:end], budget, head_bytes)
            except (Corrupt, OSError, StorageFailed) as lost:
                _log.error("disk %d cannot be read: %s", disk.position, lost)
                status = Status.OVERLOADED if lacks_resources(lost) else Status.STORAGE_FAILED
                answers += [_nothing_decided(each, status) for each in ranges[first:end]]
        table = [(int(each.found.status), each.found.decided_to, len(each.headers)) for each in answers]
        headers = [header for each in answers for header in each.headers]
        return messages.encode_read_answer(table, headers, [payload for each in answers for payload in each.payloads])

    # -- fences, LACs, deletions

    async def _fence(self, body: memoryview) -> Answer:
        ledger_ids = _bounded(messages.decode(messages.LedgerIds, body).ledger_ids)
        return [messages.encode(messages.LedgerTails(ledgers=tuple(await self._fence_all(ledger_ids))))]

    async def _fence_all(self, ledger_ids: Sequence[int]) -> list[LedgerTail]:
        return await self._tails(ledger_ids, lambda disk, ids: disk.fence(ids))

    async def _lac(self, body: memoryview) -> Answer:
        ledger_ids = _bounded(messages.decode(messages.LedgerIds, body).ledger_ids)
        tails = await self._tails(ledger_ids, lambda disk, ids: disk.tails(ids))
        return [messages.encode(messages.LedgerTails(ledgers=tuple(tails)))]

    async def _tails(
        self, ledger_ids: Sequence[int], ask: Callable[[Disk, list[int]], Awaitable[list[LedgerTail]]]
    ) -> list[LedgerTail]:
        """Ask all disks in parallel about their ledgers; a failed disk answers STORAGE_FAILED for each."""

        async def of_disk(disk: Disk) -> list[LedgerTail]:
            ids = [ledger_id for ledger_id in ledger_ids if self._disk(ledger_id) is disk]
            try:
                return await ask(disk, ids) if ids else []
            except StorageFailed:
                return [LedgerTail(ledger_id=ledger_id, status=Status.STORAGE_FAILED) for ledger_id in ids]

        found = {tail.ledger_id: tail for tails in await asyncio.gather(*map(of_disk, self._disks)) for tail in tails}
        return [found[ledger_id] for ledger_id in ledger_ids]

    def _await_lac(self, request: Request) -> None:
        wanted = messages.decode(messages.AwaitLac, request.body)
        self._waiters.add(self._disk(wanted.ledger_id), wanted, request)

    async def _write_lac(self, body: memoryview) -> Answer:
        """Write to all disks in parallel; a failed disk answers STORAGE_FAILED for its ledgers."""
        lacs = _bounded(messages.decode(messages.ExplicitLacs, body).lacs)
        statuses = bytearray((Status.STORAGE_FAILED,)) * len(lacs)

        async def to_disk(disk: Disk) -> None:
            indexes = [index for index, (ledger_id, _) in enumerate(lacs) if self._disk(ledger_id) is disk]
            with suppress(StorageFailed):
                written = await disk.write_lacs([lacs[index] for index in indexes]) if indexes else ()
                for index, status in zip(indexes, written, strict=True):
                    statuses[index] = status

        await asyncio.gather(*map(to_disk, self._disks))
        return [messages.encode_statuses(statuses)]

    async def _delete(self, body: memoryview) -> Answer:
        ledger_ids = _bounded(messages.decode(messages.LedgerIds, body).ledger_ids)
        return [messages.encode_statuses(await self._collector.delete(ledger_ids))]

    # -- listing

    async def _list(self, body: memoryview) -> Answer:
        wanted = messages.decode(messages.ListLedgers, body)
        limit = max(1, min(wanted.limit, LEDGERS_MAX))
        held = sorted(ledger_id for disk in self._disks for ledger_id in disk.core.contents.ledgers if ledger_id > wanted.after)
        page = tuple(self._disk(ledger_id).core.summary(ledger_id) for ledger_id in held[:limit])
        return [messages.encode(messages.LedgerPage(ledgers=page, more=len(held) > limit))]

    async def _info(self, _: memoryview) -> Answer:
        disks = tuple(disk.info() for disk in self._disks)
        info = messages.BookieInfo(
            bookie_id=self._settings.bookie_id,
            read_only=all(disk.state != "writable" for disk in disks),
            free_bytes=sum([disk.free_bytes for disk in disks]),
            disks=disks,
            counters=self._counters.as_dict(),
            keeps_all=self._collector.refusal,
        )
        return [messages.encode(info)]

    async def _scrub(self, body: memoryview) -> Answer:
        if messages.decode(messages.ScrubDisks, body).start:
            for scrub in self._scrubs:
                scrub.start()
        return [messages.encode(messages.ScrubStatus(disks=tuple(scrub.status() for scrub in self._scrubs)))]


def _reply_statuses(request: Request, statuses: bytearray) -> None:
    request.reply(messages.encode_statuses(statuses))


def _bounded(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """Raises ``Invalid`` for more than ``LEDGERS_MAX`` items."""
    if len(items) > LEDGERS_MAX:
        raise Invalid(f"{len(items)} ledgers in one request; maximum is {LEDGERS_MAX}: send it in parts")
    return items


def _neighbours(keys: Sequence[int]) -> list[tuple[int, int]]:
    """``(first, end)`` of the runs of equal keys."""
    starts = [index for index, key in enumerate(keys) if index == 0 or key != keys[index - 1]]
    return list(pairwise([*starts, len(keys)]))


def _nothing_decided(wanted: Range, status: Status) -> RangeRead:
    return RangeRead(Found(status, wanted.first - 1, []), [], [])
