"""Deleted topics for the command line: lists them, restores one, deletes topics permanently."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from stratalog import kafka
from stratalog.moments import format_moment
from stratalog.several import with_each
from stratalog.tier.session import metadata_session
from stratalog_broker.admin.deleted_topics import TIMEOUT_S, delete_for_good, deleted_topic, undelete, until_in_bucket
from stratalog_broker.admin.view_waiting import wait_until
from stratalog_core.errors import NotFound, Unavailable
from stratalog_core.system import SystemClock
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.topic_deletion import restorable_topics
from stratalog_metadata.records import Partition, Topic, partition_key, topic_key

Delete = Callable[[list[str]], Mapping[str, Future[None]]]
"""An admin client's call that deletes topics by name."""
BUCKET_TIMEOUT_S: Final = 60.0
"""How long a command waits for a tiering worker to remove a deletion marker."""
DELETED_COLUMNS: Final = ("name", "topic_id", "partitions", "deleted_at", "restorable_until", "seconds_left")


async def deleted_rows(addresses: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each topic that can be restored, the latest deletion first."""
    now_ms = SystemClock().wall_ms()
    async with metadata_session(addresses) as client:
        deleted = sorted(restorable_topics(client.view), key=lambda each: -each.deleted_at_ms)
    return [
        {
            "name": each.name,
            "topic_id": str(each.topic_id),
            "partitions": len(each.leader_epochs),
            "deleted_at": format_moment(each.deleted_at_ms),
            "restorable_until": format_moment(each.restorable_until_ms),
            "seconds_left": max(0, each.restorable_until_ms - now_ms) // 1000,
        }
        for each in deleted
    ]


class InBucket(StrEnum):
    """State of a restored topic in the bucket."""

    RESTORED = "restored"
    UNCONFIRMED = "unconfirmed"
    """The command did not wait: the topic's deletion marker may still be there."""
    NOTHING = "nothing"
    """Nothing of the topic was offloaded, and no tiering worker runs."""


async def restore(
    addresses: Sequence[str], wanted: str, new_name: str | None, timeout_s: float | None
) -> tuple[Topic, InBucket]:
    """Restore a topic; return when its partitions have owners and the bucket no longer says that it is deleted.

    ``timeout_s`` limits the wait for the bucket; None: do not wait for it. Raises as ``undelete`` and ``until_in_bucket``.
    """
    async with metadata_session(addresses) as client:
        topic = await undelete(client, wanted, new_name)
        await wait_for_owners(client, topic, "restored")
        if timeout_s is None:
            return topic, InBucket.UNCONFIRMED
        return topic, InBucket.RESTORED if await until_in_bucket(client, topic, timeout_s) else InBucket.NOTHING


async def wait_for_owners(client: MetadataClient, topic: Topic, event: str) -> None:
    """Return when the topic's partitions have owners. Raises ``Unavailable``; ``event`` says what was done to the topic."""
    keys = [partition_key(topic.topic_id, index) for index in range(topic.partition_count)]

    def have_owners() -> bool:
        return all((found := client.view.find(Partition, key)) is not None and found.owner >= 0 for key in keys)

    if not await wait_until(client.view, have_owners, TIMEOUT_S):
        text = f"topic {topic.name!r} is {event}, but its partitions have no owner after {TIMEOUT_S:.0f} s: is a broker up?"
        raise Unavailable(text)


async def delete_now(addresses: Sequence[str], names: Sequence[str], delete: Delete) -> None:
    """Delete topics permanently. Existing topics are first deleted by ``delete``, so that brokers can refuse.

    Raises ``NotFound``.
    """
    async with metadata_session(addresses) as client:
        living = {name: topic for name in names if (topic := client.view.find(Topic, topic_key(name))) is not None}
        gone: list[UUID] = [deleted_topic(client.view, name).topic_id for name in names if name not in living]
        if living:
            await asyncio.to_thread(delete_named, delete, list(living))
        for topic_id in [*gone, *(topic.topic_id for topic in living.values())]:
            await delete_for_good(client, topic_id)


def delete_named(delete: Delete, names: list[str]) -> None:
    """Delete the topics; return when the brokers have deleted them. Raises as `with_each`."""
    futures = delete(names)

    def wait(name: str) -> None:
        try:
            kafka.only({name: futures[name]})
        except NotFound as missing:
            raise NotFound(f"no topic {name!r}: see `stratalog topic list`") from missing

    with_each([*futures], wait, "deleted")
