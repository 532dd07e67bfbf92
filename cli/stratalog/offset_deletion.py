"""Deletes committed offsets of a group. confluent-kafka has no call for it, so the requests are made here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

from kio.schema.errors import ErrorCode

from stratalog.kafka import TIMEOUT_S
from stratalog.kafka_connection import FIND_COORDINATOR, OFFSET_DELETE, Connection, NotAnswered, connect, request_part
from stratalog_core.errors import Conflict, Invalid, NotFound, StratalogError, Unavailable

_RETRY_S: Final = 0.2
_GROUP: Final = 0
_LATER: Final = {
    ErrorCode.coordinator_not_available,
    ErrorCode.coordinator_load_in_progress,
    ErrorCode.not_coordinator,
    ErrorCode.request_timed_out,
}


async def delete_offsets(bootstrap: str, group: str, topic: str, partitions: Sequence[int]) -> None:
    """Delete the offsets. Retries while the group has no coordinator.

    Raises ``NotFound``, ``Conflict`` (a member subscribes to the topic), ``Unavailable``, ``Invalid``.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            await _delete_once(bootstrap, group, topic, partitions)
            return
        except (Unavailable, NotAnswered) as failure:
            if time.monotonic() >= deadline:
                raise Unavailable(f"offsets of group {group!r} were not deleted: {failure.message}") from failure
        await asyncio.sleep(_RETRY_S)


async def _delete_once(bootstrap: str, group: str, topic: str, partitions: Sequence[int]) -> None:
    found = await _ask(await _first(bootstrap), FIND_COORDINATOR, key=group, key_type=_GROUP)
    _check(found.error_code, f"group {group!r}")
    wanted = tuple(request_part(OFFSET_DELETE, "OffsetDeleteRequestPartition")(partition_index=one) for one in partitions)
    topics = (request_part(OFFSET_DELETE, "OffsetDeleteRequestTopic")(name=topic, partitions=wanted),)
    answer = await _ask(await connect(f"{found.host}:{found.port}"), OFFSET_DELETE, group_id=group, topics=topics)
    _check(answer.error_code, f"group {group!r}")
    for row in (row for one in answer.topics for row in one.partitions):
        _check(row.error_code, f"{topic}-{row.partition_index}")


async def _first(bootstrap: str) -> Connection:
    """Connect to the first broker that can be reached."""
    addresses = bootstrap.split(",")
    for address in addresses[:-1]:
        try:
            return await connect(address)
        except NotAnswered:
            continue
    return await connect(addresses[-1])


async def _ask(connection: Connection, api: int, **fields: Any) -> Any:
    try:
        return await connection.ask(api, **fields)
    finally:
        connection.close()


def _check(code: ErrorCode, what: str) -> None:
    if code is not ErrorCode.none:
        raise _as_ours(code, what)


def _as_ours(code: ErrorCode, what: str) -> StratalogError:
    if code in _LATER:
        return Unavailable(f"{what}: {code.name}")
    if code in (ErrorCode.group_id_not_found, ErrorCode.unknown_topic_or_partition):
        return NotFound(f"{what}: {code.name}; see `stratalog group list` and `stratalog topic list`")
    if code in (ErrorCode.non_empty_group, ErrorCode.group_subscribed_to_topic):
        return Conflict(f"{what}: {code.name}; stop the group's consumers of the topic first")
    return Invalid(f"{what}: {code.name}")
