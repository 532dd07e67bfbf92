"""Reads of a LAC that do not wait for every bookie: what the others answer later is ignored, failures, too."""

from __future__ import annotations

import asyncio
import gc
from random import Random
from typing import Any, cast
from uuid import UUID

import pytest

from stratalog_bookies.client.bookie_requests import BookieRequests
from stratalog_bookies.client.directory import BookieDirectory
from stratalog_bookies.client.ledger_reads import LedgerReads
from stratalog_bookies.protocol.messages import LedgerTail
from stratalog_core.errors import OutcomeUnknown
from stratalog_metadata.records import Fragment, Ledger, LedgerState

LEDGER = Ledger(
    ledger_id=7, topic_id=UUID(int=1), partition=0, base_offset=0, leader_epoch=1, write_quorum=3, ack_quorum=2,
    fragments=(Fragment(first_entry=0, bookies=("a", "b", "c")),), state=LedgerState.OPEN,
)  # fmt: skip


class Answers:
    """Requests whose answers a test gives."""

    def __init__(self) -> None:
        self.asked: dict[str, asyncio.Future[LedgerTail]] = {}

    def lac(self, bookie: str, ledger_id: int) -> asyncio.Future[LedgerTail]:
        return self.asked.setdefault(bookie, asyncio.get_running_loop().create_future())

    def await_lac(self, bookie: str, ledger_id: int, above: int, max_wait_s: float) -> asyncio.Future[LedgerTail]:
        return self.lac(bookie, ledger_id)


class NoneAvoided:
    def avoided(self) -> frozenset[str]:
        return frozenset()


@pytest.fixture
def unhandled() -> list[dict[str, Any]]:
    return []


async def forget(answers: Answers) -> None:
    """Let the futures be collected, so that the loop reports an exception that nobody has retrieved."""
    await asyncio.sleep(0)
    answers.asked.clear()
    gc.collect()


def reads_of(answers: Answers) -> LedgerReads:
    requests, directory = cast(BookieRequests, answers), cast(BookieDirectory, NoneAvoided())
    return LedgerReads(requests, directory, Random(1), hedge_s=1.0, deadline_s=10.0)


async def test_a_bookie_may_fail_after_enough_others_have_told_the_lac(unhandled: list[dict[str, Any]]) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    answers = Answers()
    reading = asyncio.ensure_future(reads_of(answers).lac(LEDGER))
    await asyncio.sleep(0)
    for name, lac in (("a", 4), ("b", 5)):
        answers.asked[name].set_result(LedgerTail(ledger_id=7, last_entry=9, lac=lac))
    assert await reading == 5
    answers.asked["c"].set_exception(OutcomeUnknown("no answer from c in time"))
    await forget(answers)
    assert unhandled == []


async def test_a_bookie_may_fail_after_nobody_waits_for_its_lac_any_more(unhandled: list[dict[str, Any]]) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    answers = Answers()
    reading = asyncio.ensure_future(reads_of(answers).await_lac(LEDGER, 3, 1.0))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    (asked,) = answers.asked.values()
    asked.set_exception(OutcomeUnknown("no answer in time"))
    del asked, reading
    await forget(answers)
    assert unhandled == []
