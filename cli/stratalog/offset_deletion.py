"""Deletes committed offsets of a group. confluent-kafka has no call for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stratalog.kafka_connection import FIND_COORDINATOR, OFFSET_DELETE, request_part
from stratalog.kafka_requests import ask, ask_any, check, connect, until_available

_GROUP: Final = 0
"""FindCoordinator's key type of groups."""


async def delete_offsets(bootstrap: str, group: str, topic: str, partitions: Sequence[int]) -> None:
    """Delete the offsets. Retries while the group has no coordinator.

    Raises ``NotFound``, ``Conflict`` (a member subscribes to the topic), ``Unavailable``, ``Invalid``.
    """
    await until_available(lambda: _delete_once(bootstrap, group, topic, partitions))


async def _delete_once(bootstrap: str, group: str, topic: str, partitions: Sequence[int]) -> None:
    found = await ask_any(bootstrap, FIND_COORDINATOR, key=group, key_type=_GROUP)
    check(found.error_code, group)
    wanted = tuple(request_part(OFFSET_DELETE, "OffsetDeleteRequestPartition")(partition_index=one) for one in partitions)
    topics = (request_part(OFFSET_DELETE, "OffsetDeleteRequestTopic")(name=topic, partitions=wanted),)
    answer = await ask(await connect(f"{found.host}:{found.port}"), OFFSET_DELETE, group_id=group, topics=topics)
    check(answer.error_code, group)
    for row in (row for one in answer.topics for row in one.partitions):
        check(row.error_code, f"{topic}-{row.partition_index}")
