"""Lists and describes transactions. confluent-kafka has no calls for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kio.serial.errors import SerialError

from stratalog.kafka_connection import DESCRIBE_TRANSACTIONS, FIND_COORDINATOR, LIST_TRANSACTIONS, METADATA
from stratalog.kafka_requests import ask, ask_any, check, connect, until_available
from stratalog_core.errors import Invalid

_KEY_TYPE: Final = 1
"""FindCoordinator's key type of transactional ids."""


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
