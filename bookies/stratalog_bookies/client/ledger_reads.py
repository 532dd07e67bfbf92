"""Reads ledgers: carries out read plans, hedges slow bookies, stops at the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from stratalog_bookies.client.bookie_requests import BookieRequests
from stratalog_bookies.client.core.entry import Entry, EntryHead
from stratalog_bookies.client.core.read_plan import STRIPED_ENTRIES_MAX, Ask, ReadPlan
from stratalog_bookies.client.directory import BookieDirectory
from stratalog_bookies.protocol.messages import HEAD_BYTES_MAX, LedgerTail, Range, RangeAnswer, ReadEntry, Status, entry_matches
from stratalog_core.errors import StratalogError, Unavailable
from stratalog_core.ports import Random
from stratalog_core.quorum import fencing_complete
from stratalog_metadata.records import Ledger, LedgerState

HEAD_BYTES: Final = HEAD_BYTES_MAX
"""Size of a record batch's header, from which an index is rebuilt."""

OnAnswer = Callable[[Ask, RangeAnswer | StratalogError], None]
Fetch = Callable[[list[Ask], OnAnswer], None]
"""Asks one bookie for several pieces; the callback is called once per piece."""


class LacNews(NamedTuple):
    """A LAC, and whether the writer has ended: the ledger is fenced, deleted or closed, and its record tells which."""

    lac: int
    ended: bool


class LedgerReads:
    """Reads of closed ledgers, and of open ones up to a LAC known to the caller."""

    def __init__(
        self, requests: BookieRequests, directory: BookieDirectory, random: Random, *, hedge_s: float, deadline_s: float
    ) -> None:
        self._requests = requests
        self._directory = directory
        self._random = random
        self._hedge_s = hedge_s
        self._deadline_s = deadline_s

    async def entries(self, ledger: Ledger, first: int, last: int, bytes_max: int) -> list[Entry]:
        """A contiguous run from ``first`` on. Raises ``NoSuchEntry``, ``Unavailable``."""
        return [Entry(entry.entry_id, entry.payload) for entry in await self.stored(ledger, first, last, bytes_max)]

    async def stored(self, ledger: Ledger, first: int, last: int, bytes_max: int) -> list[ReadEntry]:
        """``entries`` with LAC and CRC as stored, so that copies have the same bytes."""
        # Request as many entries of a striped ledger as may fit: most have 1 KiB or more.
        striped_max = min(max(bytes_max // 1024, 16), STRIPED_ENTRIES_MAX)
        plan = self._plan(ledger, first, last, striped_max, accept=partial(entry_matches, ledger.ledger_id))
        await self._carry_out(plan, partial(self._fetch_entries, ledger, bytes_max))
        return plan.result(bytes_max)

    async def together(self, ledger: Ledger, first: int, last: int) -> list[Entry]:
        """``entries`` without a bound of its own, batched with the reads of other ledgers. Raises as ``entries`` does."""
        plan = self._plan(ledger, first, last, STRIPED_ENTRIES_MAX, accept=partial(entry_matches, ledger.ledger_id))
        await self._carry_out(plan, partial(self._fetch_together, ledger))
        return [Entry(entry.entry_id, entry.payload) for entry in plan.result()]

    async def heads(self, ledger: Ledger, first: int, last: int, head_bytes: int = HEAD_BYTES) -> list[EntryHead]:
        """Every entry from ``first`` to ``last``, in as many requests as needed. Raises ``NoSuchEntry``, ``Unavailable``."""
        heads: list[EntryHead] = []
        while first <= last:
            plan = self._plan(ledger, first, last, STRIPED_ENTRIES_MAX, accept=_accept_any)
            await self._carry_out(plan, partial(self._fetch_heads, ledger, head_bytes))
            run = plan.result()
            heads.extend(EntryHead(entry.entry_id, entry.payload_bytes, bytes(entry.payload)) for entry in run)
            first = run[-1].entry_id + 1
        return heads

    async def lac(self, ledger: Ledger) -> int:
        """A LAC no lower than what was confirmed when the latest entry was added. Raises ``Unavailable``.

        Waits for so many bookies that every Qa bookies of a write set include one of them.
        """
        if ledger.state is LedgerState.CLOSED:
            return ledger.last_entry
        fragment = ledger.fragments[-1]
        asked = (self._requests.lac(name, ledger.ledger_id) for name in fragment.bookies)
        waiting = {_let_fail(future): place for place, future in enumerate(asked)}
        lac, answered, reasons = fragment.first_entry - 1, set[int](), list[str]()
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                position = waiting.pop(future)
                tail = _tail(future, reasons)
                if tail is not None:
                    lac = max(lac, tail.lac)
                    answered.add(position)
            if fencing_complete(len(fragment.bookies), ledger.write_quorum, ledger.ack_quorum, answered):
                return lac
        raise Unavailable(f"too few bookies answered the LAC of ledger {ledger.ledger_id} ({'; '.join(reasons)})")

    async def await_lac(self, ledger: Ledger, above: int, max_wait_s: float) -> LacNews:
        """Ask one bookie of the last fragment to answer when its LAC exceeds ``above``; if it fails, the next one.

        Raises ``Unavailable`` if all fail.
        """
        if ledger.state is LedgerState.CLOSED or max_wait_s < 0:
            return LacNews(max(ledger.last_entry, above), True)
        names, reasons = list(ledger.fragments[-1].bookies), list[str]()
        turn, avoid = self._random.randrange(len(names)), self._directory.avoided()
        for name in sorted([*names[turn:], *names[:turn]], key=lambda name: name in avoid):
            future = _let_fail(self._requests.await_lac(name, ledger.ledger_id, above, max_wait_s))
            await asyncio.wait((future,))
            tail = _tail(future, reasons, absent_is_news=True)
            if tail is not None:
                return LacNews(max(tail.lac, above), tail.fenced or tail.status == Status.NO_SUCH_LEDGER)
            self._directory.read_failed(name)
        raise Unavailable(f"no bookie answered the LAC of ledger {ledger.ledger_id} ({'; '.join(reasons)})")

    def _plan(self, ledger: Ledger, first: int, last: int, striped_max: int, accept: Callable[[ReadEntry], bool]) -> ReadPlan:
        turn = self._random.randrange(ledger.ensemble_size)
        avoid = self._directory.avoided()
        return ReadPlan(ledger, first, last, avoid=avoid, accept=accept, turn=turn, striped_max=striped_max)

    async def _carry_out(self, plan: ReadPlan, fetch: Fetch) -> None:
        """Carry out the plan until it is finished or the deadline passes; its result then is what was read."""
        run = _Run(plan, fetch, self._directory, hedge_s=self._hedge_s, deadline_s=self._deadline_s)
        try:
            await run.finished
        finally:
            run.stop()

    def _fetch_entries(self, ledger: Ledger, bytes_max: int, asks: list[Ask], on_answer: OnAnswer) -> None:
        """Send all pieces for one bookie in one request; striped pieces share the byte bound among the bookies."""
        share = bytes_max if len(asks) == 1 else bytes_max // ledger.ensemble_size + 1
        ranges = [Range(ledger.ledger_id, ask.first, ask.last) for ask in asks]
        future = self._requests.read(asks[0].bookie, ranges, share)
        future.add_done_callback(partial(_hand_over, asks, on_answer))

    def _fetch_together(self, ledger: Ledger, asks: list[Ask], on_answer: OnAnswer) -> None:
        for ask in asks:
            future = self._requests.read_together(ask.bookie, Range(ledger.ledger_id, ask.first, ask.last))
            future.add_done_callback(partial(_hand_over_one, ask, on_answer))

    def _fetch_heads(self, ledger: Ledger, head_bytes: int, asks: list[Ask], on_answer: OnAnswer) -> None:
        for ask in asks:
            future = self._requests.heads(ask.bookie, Range(ledger.ledger_id, ask.first, ask.last), head_bytes)
            future.add_done_callback(partial(_hand_over_one, ask, on_answer))


class _Run:
    """One plan being carried out."""

    def __init__(self, plan: ReadPlan, fetch: Fetch, directory: BookieDirectory, *, hedge_s: float, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._directory = directory
        self._waiting_for: set[str] = set()
        self._plan = plan
        self._fetch = fetch
        self._hedge_s = hedge_s
        self._hedges_left = max(1, round(deadline_s / hedge_s))
        self.finished: asyncio.Future[None] = loop.create_future()
        self._timer = loop.call_later(hedge_s, self._hedge)
        self._ask(plan.start())

    def _ask(self, asks: list[Ask]) -> None:
        by_bookie: dict[str, list[Ask]] = {}
        for ask in asks:
            by_bookie.setdefault(ask.bookie, []).append(ask)
        for bookie, asked in by_bookie.items():
            self._waiting_for.add(bookie)
            self._fetch(asked, self._on_answer)
        if self._plan.is_finished and not self.finished.done():
            self.finished.set_result(None)

    def _on_answer(self, ask: Ask, answer: RangeAnswer | StratalogError) -> None:
        self._waiting_for.discard(ask.bookie)
        if isinstance(answer, StratalogError):
            self._directory.read_failed(ask.bookie)
            self._ask(self._plan.on_failure(ask, answer.message))
        else:
            self._directory.read_health.answered(ask.bookie)
            self._ask(self._plan.on_answer(ask, answer))

    def _hedge(self) -> None:
        """One timer for hedges and deadline: a takeover causes thousands of reads."""
        self._hedges_left -= 1
        if not self._hedges_left and not self.finished.done():
            self.finished.set_result(None)
            return
        self._timer = asyncio.get_running_loop().call_later(self._hedge_s, self._hedge)
        for bookie in self._waiting_for:
            self._directory.read_failed(bookie)
        self._waiting_for.clear()
        self._ask(self._plan.on_slow())

    def stop(self) -> None:
        self._timer.cancel()
        self.finished.cancel()


def _hand_over(asks: list[Ask], on_answer: OnAnswer, future: asyncio.Future[list[RangeAnswer]]) -> None:
    failure = _failure(future)
    answers = future.result() if failure is None else []
    if failure is None and len(answers) != len(asks):
        failure = Unavailable(f"the answer has {len(answers)} parts for {len(asks)} ranges")
    for index, ask in enumerate(asks):
        on_answer(ask, failure or answers[index])


def _hand_over_one(ask: Ask, on_answer: OnAnswer, future: asyncio.Future[RangeAnswer]) -> None:
    failure = _failure(future)
    on_answer(ask, future.result() if failure is None else failure)


def _failure(future: asyncio.Future[RangeAnswer] | asyncio.Future[list[RangeAnswer]]) -> StratalogError | None:
    if future.cancelled():
        return Unavailable("the client is closing")
    failure = future.exception()
    assert failure is None or isinstance(failure, StratalogError)
    return failure


def _let_fail(future: asyncio.Future[LedgerTail]) -> asyncio.Future[LedgerTail]:
    """Return ``future``, whose failure may find nobody who waits for it."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _tail(future: asyncio.Future[LedgerTail], reasons: list[str], *, absent_is_news: bool = False) -> LedgerTail | None:
    failure = future.exception()
    if failure is not None:
        reasons.append(str(failure))
        return None
    tail = future.result()
    if tail.status != Status.OK and not (absent_is_news and tail.status == Status.NO_SUCH_LEDGER):
        reasons.append(Status(tail.status).name)
        return None
    return tail


def _accept_any(entry: ReadEntry) -> bool:
    """Accept a head: the bookie has checked it against a CRC that only the bookie has."""
    return True
