"""Long polls of readers of open ledgers: answered when a group of the log raises the LAC.

A waiter costs nothing per entry: the ledgers with waiters are checked once per durable group. A fence or deletion also ends the
wait, and so does the reader's time limit. The answer is always the ledger's tail at that time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from stratalog_bookies.disk.disk import Disk
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import AwaitLac, LedgerTail, Status
from stratalog_core.errors import Overloaded
from stratalog_core.ports import Request

WAIT_MS_MAX = 60_000


@dataclass(slots=True, eq=False)
class _Waiter:
    request: Request
    ledger_id: int
    above: int
    timer: asyncio.TimerHandle | None = None


class LacWaiters:
    """All waiting readers of one bookie, at most ``waiters_max``."""

    def __init__(self, waiters_max: int) -> None:
        self._waiters_max = waiters_max
        self._count = 0
        self._waiting: dict[Disk, dict[int, list[_Waiter]]] = {}

    def __len__(self) -> int:
        return self._count

    def add(self, disk: Disk, wanted: AwaitLac, request: Request) -> None:
        """Answer ``request`` at once if its condition holds, else later. Raises ``Overloaded`` at the bound."""
        tail = _tail(disk, wanted.ledger_id)
        if _is_news(disk, tail, wanted.above) or wanted.max_wait_ms <= 0:
            request.reply(messages.encode(tail))
            return
        if self._count >= self._waiters_max:
            raise Overloaded(f"{self._count} readers are waiting for a LAC; maximum is lac_waiters_max: ask without waiting")
        waiter = _Waiter(request, wanted.ledger_id, wanted.above)
        wait_s = min(wanted.max_wait_ms, WAIT_MS_MAX) / 1000
        waiter.timer = asyncio.get_running_loop().call_later(wait_s, self._answer, disk, waiter)
        self._waiting.setdefault(disk, {}).setdefault(wanted.ledger_id, []).append(waiter)
        self._count += 1

    def check(self, disk: Disk) -> None:
        """Check the disk's waiters: a group became durable, or the disk failed."""
        waiting = self._waiting.get(disk)
        if not waiting:
            return
        for ledger_id in list(waiting):
            tail = _tail(disk, ledger_id)
            for waiter in list(waiting[ledger_id]):
                if _is_news(disk, tail, waiter.above):
                    self._answer(disk, waiter)

    def close(self) -> None:
        """Answer all waiters."""
        for disk, waiting in list(self._waiting.items()):
            for waiter in [each for waiters in waiting.values() for each in waiters]:
                self._answer(disk, waiter)

    def _answer(self, disk: Disk, waiter: _Waiter) -> None:
        waiting = self._waiting[disk]
        waiting[waiter.ledger_id].remove(waiter)
        if not waiting[waiter.ledger_id]:
            del waiting[waiter.ledger_id]
        self._count -= 1
        if waiter.timer is not None:
            waiter.timer.cancel()
        waiter.request.reply(messages.encode(_tail(disk, waiter.ledger_id)))


def _tail(disk: Disk, ledger_id: int) -> LedgerTail:
    if disk.core.failure:
        return LedgerTail(ledger_id=ledger_id, status=Status.STORAGE_FAILED)
    return disk.core.tails((ledger_id,))[0]


def _is_news(disk: Disk, tail: LedgerTail, above: int) -> bool:
    """Whether the ledger was deleted. A ledger that was never seen may still be written."""
    if tail.status == Status.NO_SUCH_LEDGER:
        return tail.ledger_id in disk.core.contents.tombstones
    return tail.status != Status.OK or tail.fenced or tail.lac > above
