"""Asks the coordinators of transactions whether partitions of this broker belong to them (KIP-890).

A partition's owner asks before it appends the first batch of a transaction. Producers of transaction version 1 have added the
partition before, so the question is whether they have (``verify_only``); for version 2 the question itself adds it. One request
per producer and epoch is under way at a time; partitions that are asked for meanwhile share the next one, and batches of one
partition share one answer. A question without an answer gets a code that the producer retries.

The transaction before is often about to end when the next one begins. While it has markers to write, the answer is
CONCURRENT_TRANSACTIONS, and a marker outdates what was asked before it. ``is_outdated`` says when to ask again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.locator import CoordinatorLocator
from stratalog_broker.partitions.appended_transactions import VerificationGuard
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.peers.peers import Peers
from stratalog_broker.protocol.entities import request_factory
from stratalog_broker.protocol.errors import KafkaError
from stratalog_core.batches.batch import BatchHeader
from stratalog_core.errors import StratalogError

TRANSACTION_KEY_TYPE: Final = 1
"""FindCoordinator's key type of transactional ids."""
ANSWER_TIMEOUT_S: Final = 5.0
CONCURRENT_RETRY_S: Final = 0.005
"""About the time that markers take. Kafka's ``add.partitions.to.txn.retry.backoff.ms`` is 20: long for a short transaction."""
CONCURRENT_PATIENCE_S: Final = 0.1
"""For how long to ask again: Kafka's ``add.partitions.to.txn.retry.backoff.max.ms``."""
_API_KEY: Final = 24
_API_VERSION: Final = 5


class Transaction(NamedTuple):
    """A producer's transaction. ``adds``: its partitions are added to it, instead of verified (transaction version 2)."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    adds: bool


_Place = tuple[str, int]


def is_outdated(code: ErrorCode, *, adds: bool, log: PartitionLog, header: BatchHeader, guard: VerificationGuard) -> bool:
    """Whether the answer about a transaction's first batch says nothing of the present: ask again, with a new guard."""
    if code is ErrorCode.concurrent_transactions:
        return adds
    is_stale = not log.core.appended_transactions.is_standing(header.producer_id, guard)
    return code is ErrorCode.none and log.is_serving and is_stale and not log.core.has_open_transaction(header)


class _Question(NamedTuple):
    guard: object
    answer: asyncio.Future[ErrorCode]


class _Questions:
    """The partitions of one transaction: those that were asked about, and those for the next request."""

    def __init__(self) -> None:
        self.asked: dict[_Place, _Question] = {}
        self.next: dict[_Place, _Question] = {}


class TransactionVerifier:
    """One instance per broker. The number of questions is bounded by the memory of the requests that wait for them."""

    def __init__(self, locator: CoordinatorLocator, peers: Peers) -> None:
        self._locator = locator
        self._peers = peers
        self._questions: dict[Transaction, _Questions] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, transaction: Transaction, topic: str, partition: int, guard: object) -> asyncio.Future[ErrorCode]:
        """Return the coordinator's answer about one partition: ``none``, or the code with which it refuses.

        A question that was sent before ``guard`` stood answers nothing about it, so it is not shared.
        """
        questions = self._questions.get(transaction)
        if questions is None:
            questions = self._questions[transaction] = _Questions()
            self._spawn(transaction, questions)
        place = topic, partition
        asked = questions.asked.get(place)
        if asked is not None and asked.guard is guard:
            return asked.answer
        waiting = questions.next.get(place)
        if waiting is None:
            waiting = questions.next[place] = _Question(guard, asyncio.get_running_loop().create_future())
        return waiting.answer

    def _spawn(self, transaction: Transaction, questions: _Questions) -> None:
        task = asyncio.get_running_loop().create_task(self._run(transaction, questions))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, transaction: Transaction, questions: _Questions) -> None:
        try:
            while questions.next:
                questions.asked, questions.next = questions.next, {}
                codes = await self._ask_once(transaction, list(questions.asked))
                for place, question in questions.asked.items():
                    if not question.answer.done():
                        question.answer.set_result(codes.get(place, ErrorCode.network_exception))
                questions.asked = {}
                if transaction.adds and ErrorCode.concurrent_transactions in codes.values():
                    # Those who ask again share the next request.
                    await asyncio.sleep(CONCURRENT_RETRY_S)
        finally:
            del self._questions[transaction]
            for question in (*questions.asked.values(), *questions.next.values()):
                question.answer.cancel()

    async def _ask_once(self, transaction: Transaction, places: Sequence[_Place]) -> dict[_Place, ErrorCode]:
        try:
            coordinator = self._locator.owner(TRANSACTION_KEY_TYPE, transaction.transactional_id)
            request = _request(transaction, places)
            response = await self._peers.call(coordinator.broker_id, _API_KEY, _API_VERSION, request, ANSWER_TIMEOUT_S)
        except KafkaError as refused:
            return dict.fromkeys(places, refused.code)
        except StratalogError:
            return dict.fromkeys(places, ErrorCode.network_exception)
        if response.error_code is not ErrorCode.none:
            return dict.fromkeys(places, response.error_code)
        return {
            (topic.name, row.partition_index): row.partition_error_code
            for result in response.results_by_transaction
            for topic in result.topic_results
            for row in topic.results_by_partition
        }

    async def close(self) -> None:
        """Cancel all questions; the batches that wait for them get no answer."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _request(transaction: Transaction, places: Sequence[_Place]) -> Any:
    new = request_factory(_API_KEY, _API_VERSION)
    by_topic: dict[str, list[int]] = {}
    for topic, partition in places:
        by_topic.setdefault(topic, []).append(partition)
    asked = new(
        "AddPartitionsToTxnTransaction",
        transactional_id=transaction.transactional_id,
        producer_id=transaction.producer_id,
        producer_epoch=transaction.producer_epoch,
        verify_only=not transaction.adds,
        topics=tuple(
            new("AddPartitionsToTxnTopic", name=topic, partitions=tuple(partitions)) for topic, partitions in by_topic.items()
        ),
    )
    return new("AddPartitionsToTxnRequest", transactions=(asked,))
