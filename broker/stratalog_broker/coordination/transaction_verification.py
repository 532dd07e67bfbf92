"""Asks the coordinators of transactions whether partitions of this broker belong to them (KIP-890).

A partition's owner asks before it appends the first batch of a transaction. Producers of transaction version 1 have added the
partition before, so the question is whether they have (``verify_only``); for version 2 the question itself adds it. A producer
epoch has one question under way at a time; partitions that are asked for meanwhile share the next one, and batches of one
partition share one answer. A question without an answer gets a code that the producer retries.

The questions of all producers go to each partition of ``__transaction_state`` in one request at a time, over a connection of
their own: what is added together is one write there, and a partition that confirms no writes delays the producers of no other.

The transaction before is often about to end when the next one begins. While it has markers to write, the answer is
CONCURRENT_TRANSACTIONS, and a marker removes the guard that stood when the question was sent. Then the question is asked again
for a short time, with a new guard. All batches of a partition that ask meanwhile wait behind each other for its one answer: a
producer whose batch overtakes another one takes the refusal of the second for a loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.locator import CoordinatorLocator
from stratalog_broker.partitions.appended_transactions import VerificationGuard
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.peers.peers import Peers
from stratalog_broker.protocol.entities import Structs, request_factory
from stratalog_broker.protocol.errors import KafkaError
from stratalog_core.batches.batch import BatchHeader
from stratalog_core.errors import StratalogError
from stratalog_core.ports import Clock

TRANSACTION_KEY_TYPE: Final = 1
"""FindCoordinator's key type of transactional ids."""
ANSWER_TIMEOUT_S: Final = 5.0
CONCURRENT_RETRY_S: Final = 0.005
"""About the time that markers take. Kafka's ``add.partitions.to.txn.retry.backoff.ms`` is 20: long for a short transaction."""
CONCURRENT_PATIENCE_S: Final = 0.1
"""For how long to ask again: Kafka's ``add.partitions.to.txn.retry.backoff.max.ms``."""
REQUEST_PLACES_MAX: Final = 1_000
"""No further question is added to a request that asks about so many partitions."""
_API_KEY: Final = 24
_API_VERSION: Final = 5


class Transaction(NamedTuple):
    """A producer's transaction. ``adds``: its partitions are added to it, instead of verified (transaction version 2)."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    adds: bool


_Place = tuple[str, int]


class Verified(NamedTuple):
    """The coordinator's answer, and the guard that stood when it was asked."""

    code: ErrorCode
    guard: VerificationGuard


class _Question:
    """One partition, with the headers of the batches that wait for the answer about it."""

    def __init__(self, log: PartitionLog) -> None:
        self.log = log
        self.headers: list[BatchHeader] = []
        self.answer: asyncio.Future[Verified] = asyncio.get_running_loop().create_future()
        self.guard: VerificationGuard

    @property
    def place(self) -> _Place:
        return self.log.topic.name, self.log.topic_partition.partition

    def renew(self) -> None:
        """Set up the guard for the next request: it knows the lowest sequence of all that wait."""
        for header in self.headers:
            self.guard = self.log.core.appended_transactions.guard(header)

    def is_outdated(self, code: ErrorCode, *, adds: bool) -> bool:
        """Whether the answer says nothing of the present, so that the question is to be asked again."""
        if code is ErrorCode.concurrent_transactions:
            return adds
        core, header = self.log.core, self.headers[0]
        is_stale = not core.appended_transactions.is_standing(header.producer_id, self.guard)
        return code is ErrorCode.none and is_stale and self.log.is_serving and not core.has_open_transaction(header)


class _Questions:
    """The partitions of one transaction: those that were asked about, and those for the next request."""

    def __init__(self) -> None:
        self.asked: dict[PartitionLog, _Question] = {}
        self.next: dict[PartitionLog, _Question] = {}


class _Asked(NamedTuple):
    """The questions of one transaction as they are sent: ``codes`` gets the answers."""

    transaction: Transaction
    questions: Sequence[_Question]
    codes: asyncio.Future[Mapping[_Place, ErrorCode]]

    @property
    def places(self) -> Sequence[_Place]:
        return [question.place for question in self.questions]


class _Lane:
    """The questions to one partition of transactional ids."""

    def __init__(self) -> None:
        self.asked: list[_Asked] = []
        """Those of the request under way."""
        self.waiting: list[_Asked] = []
        self.is_busy = False

    def take(self) -> Sequence[_Asked]:
        """Move the questions of the next request to ``asked`` and return them; a response names each transactional id once."""
        taken, count = dict[str, _Asked](), 0
        for each in self.waiting:
            if count < REQUEST_PLACES_MAX and each.transaction.transactional_id not in taken:
                taken[each.transaction.transactional_id] = each
                count += len(each.questions)
                for question in each.questions:
                    question.renew()
        self.asked = list(taken.values())
        self.waiting = [each for each in self.waiting if taken.get(each.transaction.transactional_id) is not each]
        return self.asked


class TransactionVerifier:
    """One instance per broker. The number of questions is bounded by the memory of the requests that wait for them."""

    def __init__(self, locator: CoordinatorLocator, peers: Peers, clock: Clock) -> None:
        self._locator = locator
        self._peers = peers
        self._clock = clock
        self._questions: dict[Transaction, _Questions] = {}
        self._lanes: dict[int, _Lane] = {}
        """By partition of transactional ids."""
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, transaction: Transaction, log: PartitionLog, header: BatchHeader) -> asyncio.Future[Verified]:
        """Return the coordinator's answer about one partition: ``none``, or the code with which it refuses."""
        questions = self._questions.get(transaction)
        if questions is None:
            questions = self._questions[transaction] = _Questions()
            self._spawn(self._run(transaction, questions))
        question = questions.asked.get(log) or questions.next.get(log)
        if question is None:
            question = questions.next[log] = _Question(log)
        question.headers.append(header)
        # Registers the sequence; if the guard of the question under way was removed, that is asked again.
        log.core.appended_transactions.guard(header)
        return question.answer

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, transaction: Transaction, questions: _Questions) -> None:
        try:
            while questions.next:
                questions.asked, questions.next = questions.next, {}
                codes = await self._answers(transaction, list(questions.asked.values()))
                for question in questions.asked.values():
                    if not question.answer.done():
                        code = codes.get(question.place, ErrorCode.network_exception)
                        question.answer.set_result(Verified(code, question.guard))
                # Those who ask before the ones that waited have run share the answer, behind them.
                await asyncio.sleep(0)
                questions.asked = {}
        finally:
            del self._questions[transaction]
            for question in (*questions.asked.values(), *questions.next.values()):
                question.answer.cancel()

    async def _answers(self, transaction: Transaction, questions: Sequence[_Question]) -> Mapping[_Place, ErrorCode]:
        """Ask until no answer is outdated, for a short time."""
        deadline = self._clock.monotonic() + CONCURRENT_PATIENCE_S
        while True:
            for question in questions:
                question.renew()
            codes = await self._ask_once(transaction, questions)
            found = [(question, codes.get(question.place, ErrorCode.network_exception)) for question in questions]
            is_outdated = any(question.is_outdated(code, adds=transaction.adds) for question, code in found)
            if not is_outdated or self._clock.monotonic() >= deadline:
                return codes
            if ErrorCode.concurrent_transactions in codes.values():
                await asyncio.sleep(CONCURRENT_RETRY_S)

    async def _ask_once(self, transaction: Transaction, questions: Sequence[_Question]) -> Mapping[_Place, ErrorCode]:
        try:
            _, index = self._locator.partition(TRANSACTION_KEY_TYPE, transaction.transactional_id)
        except KafkaError as refused:
            return {question.place: refused.code for question in questions}
        lane = self._lanes.setdefault(index, _Lane())
        asked = _Asked(transaction, questions, asyncio.get_running_loop().create_future())
        lane.waiting.append(asked)
        if not lane.is_busy:
            lane.is_busy = True
            self._spawn(self._send_all(index, lane))
        return await asked.codes

    async def _send_all(self, index: int, lane: _Lane) -> None:
        """Send what waits in a lane, one request after the other."""
        try:
            while lane.waiting:
                answers = await self._send(index, lane.take())
                for asked, codes in zip(lane.asked, answers, strict=True):
                    if not asked.codes.done():
                        asked.codes.set_result(codes)
        finally:
            lane.is_busy = False
            for asked in (*lane.asked, *lane.waiting):
                asked.codes.cancel()

    async def _send(self, index: int, batch: Sequence[_Asked]) -> Sequence[Mapping[_Place, ErrorCode]]:
        """Send one request; return the answer to each of its questions."""
        try:
            coordinator = self._locator.owner(TRANSACTION_KEY_TYPE, batch[0].transaction.transactional_id)
            request = _request(batch)
            response = await self._peers.call(
                coordinator.broker_id, _API_KEY, _API_VERSION, request, ANSWER_TIMEOUT_S, lane=index
            )
        except KafkaError as refused:
            return _same(batch, refused.code)
        except StratalogError:
            return _same(batch, ErrorCode.network_exception)
        if response.error_code is not ErrorCode.none:
            return _same(batch, response.error_code)
        results = {result.transactional_id: result.topic_results for result in response.results_by_transaction}
        return [_codes(results.get(each.transaction.transactional_id, ())) for each in batch]

    async def close(self) -> None:
        """Cancel all questions; the batches that wait for them get no answer."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _same(batch: Sequence[_Asked], code: ErrorCode) -> Sequence[Mapping[_Place, ErrorCode]]:
    return [dict.fromkeys(each.places, code) for each in batch]


def _codes(topic_results: Any) -> Mapping[_Place, ErrorCode]:
    return {
        (topic.name, row.partition_index): row.partition_error_code
        for topic in topic_results
        for row in topic.results_by_partition
    }


def _request(batch: Sequence[_Asked]) -> Any:
    new = request_factory(_API_KEY, _API_VERSION)
    return new("AddPartitionsToTxnRequest", transactions=tuple(_asked_row(new, each) for each in batch))


def _asked_row(new: Structs, asked: _Asked) -> Any:
    by_topic: dict[str, list[int]] = {}
    for topic, partition in asked.places:
        by_topic.setdefault(topic, []).append(partition)
    topics = (new("AddPartitionsToTxnTopic", name=topic, partitions=tuple(indexes)) for topic, indexes in by_topic.items())
    return new(
        "AddPartitionsToTxnTransaction",
        transactional_id=asked.transaction.transactional_id,
        producer_id=asked.transaction.producer_id,
        producer_epoch=asked.transaction.producer_epoch,
        verify_only=not asked.transaction.adds,
        topics=tuple(topics),
    )
