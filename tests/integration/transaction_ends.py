"""EndTxn in each state of a transactional id, by hand, and the answer that a client gets at last.

Version 3 stands for clients without an epoch for each transaction, such as librdkafka, and version 5 for those with one. A
client retries CONCURRENT_TRANSACTIONS, so the outcome is the first other answer, with the epoch of the next transaction.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Final

from confluent_kafka.admin import AdminClient, NewTopic
from kio.schema.errors import ErrorCode as E
from unit.broker.wire_client import WireClient, connect, part

REASONS: Final[Mapping[str, str]] = {}
"""Why an answer differs from Apache Kafka's, by its case."""
VERSIONS: Final = (3, 5)
STATES: Final = ("empty", "ongoing", "committed", "aborted", "timed out", "taken over")
_PARTITIONS: Final = 20
"""So that the markers take their time."""
_TIMEOUT_S: Final = 120
_FIND, _INIT, _ADD, _END, _DESCRIBE = 10, 22, 24, 26, 65
_ADDED_BY_BROKERS: Final = 5
_LATER: Final = (
    E.coordinator_not_available, E.coordinator_load_in_progress, E.not_coordinator, E.concurrent_transactions,
    E.unknown_topic_or_partition,
)  # fmt: skip


class _Producer:
    """A producer with a transactional id, at its coordinator, wherever that is."""

    def __init__(self, stack: AsyncExitStack, bootstrap: str, name: str, topic: str, version: int) -> None:
        self._stack = stack
        self._bootstrap = bootstrap
        self._client: WireClient | None = None
        self._name = name
        self._topic = topic
        self._version = version
        self.producer_id, self.epoch = -1, -1

    async def init(self, timeout_ms: int = 60_000) -> None:
        answer = await self._ask(
            _INIT, 4, transactional_id=self._name, transaction_timeout=datetime.timedelta(milliseconds=timeout_ms),
            producer_id=-1, producer_epoch=-1,
        )  # fmt: skip
        assert answer.error_code is E.none
        self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch

    async def add(self) -> None:
        version = 3 if self._version < _ADDED_BY_BROKERS else _ADDED_BY_BROKERS
        topics = (part(_ADD, version, "AddPartitionsToTxnTopic", name=self._topic, partitions=tuple(range(_PARTITIONS))),)
        row = {
            "transactional_id": self._name, "producer_id": self.producer_id, "producer_epoch": self.epoch, "topics": topics,
        }  # fmt: skip
        transaction = part(_ADD, version, "AddPartitionsToTxnTransaction", verify_only=False, **row)
        old = {f"v3_and_below_{name}": value for name, value in row.items()}
        answer = await self._ask(_ADD, version, transactions=(transaction,), **old)
        assert _error_of(answer) is E.none, _error_of(answer)

    async def timed_out(self) -> None:
        """Wait until the coordinator has aborted the transaction."""
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                answer = await self._send(_DESCRIBE, 0, transactional_ids=(self._name,))
                described = None if answer is None else answer.transaction_states[0]
                if described is None or described.error_code is not E.none:
                    self._client = None
                elif described.transaction_state == "CompleteAbort":
                    return
                await asyncio.sleep(0.1)

    async def end(self, *, commit: bool, epoch: int | None = None, version: int | None = None) -> str:
        """Return the error, and by how much the next epoch is higher than the one that was sent."""
        sent = self.epoch if epoch is None else epoch
        answer = await self._ask(
            _END, self._version if version is None else version, transactional_id=self._name, producer_id=self.producer_id,
            producer_epoch=sent, committed=commit,
        )  # fmt: skip
        next_epoch = getattr(answer, "producer_epoch", -1)
        if answer.error_code is not E.none or next_epoch < 0:
            return str(answer.error_code.name)
        self.epoch = next_epoch
        return f"none, epoch +{next_epoch - sent}"

    async def _ask(self, api: int, version: int, **fields: Any) -> Any:
        """Send a request until its answer is not one to retry; return it."""
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                answer = await self._send(api, version, **fields)
                if answer is not None and _error_of(answer) not in _LATER:
                    return answer
                if answer is None or _error_of(answer) is not E.concurrent_transactions:
                    self._client = None
                await asyncio.sleep(0.01)

    async def _send(self, api: int, version: int, **fields: Any) -> Any:
        """Return the coordinator's answer; None if there is none."""
        try:
            if self._client is None:
                async with connect(self._bootstrap) as client:
                    found = await client.send(_FIND, 3, key=self._name, key_type=1)
                if found.error_code is not E.none:
                    return None
                self._client = await self._stack.enter_async_context(connect(f"{found.host}:{found.port}"))
            return await self._client.send(api, version, **fields)
        except (ConnectionError, asyncio.IncompleteReadError):
            return None


def _error_of(answer: Any) -> E:
    rows = getattr(answer, "results_by_topic_v3_and_below", ())
    for transaction in getattr(answer, "results_by_transaction", ()):
        rows = transaction.topic_results
    errors = {row.partition_error_code for topic in rows for row in topic.results_by_partition}
    return next(iter(errors - {E.none}), getattr(answer, "error_code", E.none))


def run_ends(bootstrap: str, topic: str) -> dict[str, str]:
    """Create the topic; return the answers by case."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    for future in admin.create_topics([NewTopic(topic, _PARTITIONS, 1)]).values():
        future.result(_TIMEOUT_S)
    return asyncio.run(_run_all(bootstrap, topic))


async def _run_all(bootstrap: str, topic: str) -> dict[str, str]:
    cases = [
        _case(bootstrap, topic, version, state, commit=commit, is_current=is_current)
        for version in VERSIONS
        for state in STATES
        for commit in (True, False)
        for is_current in (True, False)
        if is_current or state == "empty" or (version >= _ADDED_BY_BROKERS and state in ("committed", "aborted"))
    ]
    return dict(await asyncio.gather(*cases))


async def _case(bootstrap: str, topic: str, version: int, state: str, *, commit: bool, is_current: bool) -> tuple[str, str]:
    name = f"{topic}-{version}-{state}-{commit}-{is_current}"
    async with AsyncExitStack() as stack:
        producer = _Producer(stack, bootstrap, name, topic, version)
        await producer.init()
        await producer.init(1000 if state == "timed out" else 60_000)
        before = producer.epoch - 1
        if state != "empty":
            await producer.add()
        if state in ("committed", "aborted"):
            before = producer.epoch
            # The answer to the first EndTxn comes before the markers are written.
            assert (await producer.end(commit=state == "committed")).startswith("none")
        elif state == "timed out":
            await producer.timed_out()
        elif state == "taken over":
            await _Producer(stack, bootstrap, name, topic, version).init()
        answer = await producer.end(commit=commit, epoch=None if is_current else before)
    how = "commit" if commit else "abort"
    return f"EndTxn {version}, {state}: {how} with {'its' if is_current else 'the last'} epoch", answer
