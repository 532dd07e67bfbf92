"""Asks the coordinators of transactions. confluent-kafka has no calls for it, so the requests are made here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from kio.schema.errors import ErrorCode
from kio.serial.errors import SerialError

from stratalog.kafka import TIMEOUT_S
from stratalog.kafka_connection import (
    DESCRIBE_TRANSACTIONS,
    FIND_COORDINATOR,
    LIST_TRANSACTIONS,
    METADATA,
    Connection,
    NotAnswered,
    connect,
)
from stratalog_core.errors import Invalid, NotFound, Unavailable

Result = TypeVar("Result")
_KEY_TYPE: Final = 1
_RETRY_S: Final = 0.2
_LATER: Final = {
    ErrorCode.coordinator_not_available,
    ErrorCode.coordinator_load_in_progress,
    ErrorCode.not_coordinator,
    ErrorCode.request_timed_out,
    ErrorCode.not_leader_or_follower,
    ErrorCode.leader_not_available,
}


async def list_transactions(bootstrap: str, states: Sequence[str], producer_ids: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Return a row per transactional id, sorted. ``states`` (Kafka's names) and ``producer_ids`` filter them.

    Raises ``Invalid`` for an unknown state, ``Unavailable`` after the time-out.
    """
    return await until_available(lambda: _list_once(bootstrap, states, producer_ids))


async def _list_once(bootstrap: str, states: Sequence[str], producer_ids: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    metadata = await ask_any(
        bootstrap, METADATA, topics=(), allow_auto_topic_creation=False, include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )  # fmt: skip
    for broker in metadata.brokers:
        answer = await ask(
            await connect(f"{broker.host}:{broker.port}"),
            LIST_TRANSACTIONS,
            state_filters=tuple(states),
            producer_id_filters=tuple(producer_ids),
        )
        check(answer.error_code, f"broker {broker.node_id}")
        if answer.unknown_state_filters:
            raise Invalid(
                f"unknown state {answer.unknown_state_filters[0]!r}: use Kafka's names, such as Ongoing or CompleteCommit"
            )
        rows += [
            {
                "transactional_id": each.transactional_id,
                "state": each.transaction_state,
                "producer_id": each.producer_id,
                "coordinator": broker.node_id,
            }
            for each in answer.transaction_states
        ]
    return sorted(rows, key=lambda row: row["transactional_id"])


async def describe_transaction(bootstrap: str, transactional_id: str) -> dict[str, Any]:
    """Return the state of one transactional id, with the partitions of its transaction.

    Raises ``NotFound``, and ``Unavailable`` after a time.
    """
    return await until_available(lambda: _describe_once(bootstrap, transactional_id))


async def _describe_once(bootstrap: str, transactional_id: str) -> dict[str, Any]:
    found = await ask_any(bootstrap, FIND_COORDINATOR, key=transactional_id, key_type=_KEY_TYPE)
    check(found.error_code, transactional_id)
    connection = await connect(f"{found.host}:{found.port}")
    try:
        answer = await ask(connection, DESCRIBE_TRANSACTIONS, transactional_ids=(transactional_id,))
    except SerialError:
        # The start time of an id without a transaction is -1, which kio cannot decode.
        return {"transactional_id": transactional_id, "state": "Empty", "coordinator": found.node_id, "partitions": []}
    (row,) = answer.transaction_states
    check(row.error_code, transactional_id)
    return {
        "transactional_id": transactional_id,
        "state": row.transaction_state,
        "producer_id": row.producer_id,
        "producer_epoch": row.producer_epoch,
        "coordinator": found.node_id,
        "timeout_ms": round(row.transaction_timeout.total_seconds() * 1000),
        "started_at": row.transaction_start_time.isoformat(timespec="milliseconds"),
        "partitions": [f"{topic.topic}-{index}" for topic in row.topics for index in topic.partitions],
    }


async def until_available(call: Callable[[], Awaitable[Result]]) -> Result:
    """Return the result of ``call``, which is repeated for a time while it raises ``Unavailable`` or ``NotAnswered``."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return await call()
        except (Unavailable, NotAnswered) as failure:
            if time.monotonic() >= deadline:
                raise Unavailable(f"the coordinator did not answer: {failure.message}") from failure
        await asyncio.sleep(_RETRY_S)


async def ask_any(bootstrap: str, api: int, **fields: Any) -> Any:
    """Ask the first broker that can be reached."""
    *others, last = bootstrap.split(",")
    for address in others:
        try:
            return await ask(await connect(address), api, **fields)
        except NotAnswered:
            continue
    return await ask(await connect(last), api, **fields)


async def ask(connection: Connection, api: int, **fields: Any) -> Any:
    """Ask one broker, and close the connection."""
    try:
        return await connection.ask(api, **fields)
    finally:
        connection.close()


def check(code: ErrorCode, what: str) -> None:
    """Raise ``Unavailable`` for a code that is worth a retry, and another error for every other one but NONE."""
    if code is ErrorCode.none:
        return
    if code in _LATER:
        raise Unavailable(f"{what}: {code.name}")
    if code is ErrorCode.unknown_topic_or_partition:
        raise NotFound(f"no such topic or partition: {what}")
    if code is ErrorCode.transactional_id_not_found:
        raise NotFound(f"no transactional id {what!r}: see `stratalog txn list`")
    raise Invalid(f"{what}: {code.name}")
