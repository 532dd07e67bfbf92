"""Topic descriptors in the bucket: a new version is written when a topic has changed, and only then.

A worker compares each version of a topic's record with the bucket once: an unchanged topic costs one listing and one read per
worker, and nothing per offload. A changed record is compared again even if the change was taken back: another worker may have
described the topic meanwhile. Versions are never overwritten.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final
from uuid import UUID

import msgspec
from msgspec import UNSET, UnsetType

from stratalog_core.errors import Conflict, Corrupt
from stratalog_metadata.records import Topic
from stratalog_tiering.cold.archive import read_topic
from stratalog_tiering.cold.block_cache import LruCache
from stratalog_tiering.format.descriptor import Detachment, TopicDescriptor, encode_descriptor
from stratalog_tiering.format.object_keys import parse_topic_key, topic_key, topic_prefix
from stratalog_tiering.store import ObjectStore

_KNOWN_MAX: Final = 10_000
_log = logging.getLogger(__name__)


class TopicDescriptors:
    """The descriptors that one worker has seen or written.

    ``confirm`` is awaited before one is written. It raises ``Invalid`` if the bucket is another cluster's.
    """

    def __init__(self, store: ObjectStore, confirm: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._confirm = confirm
        self._known: LruCache[UUID, int] = LruCache(_KNOWN_MAX)

    async def ensure(self, topic: Topic, version: int) -> None:
        """Return once the bucket's newest descriptor describes ``topic``, whose record has ``version``.

        Raises what the store and ``confirm`` raise.
        """
        if self._known.get(topic.topic_id) != version:
            await self._confirm()
            await describe_topic(self._store, topic)
            self._known.put(topic.topic_id, version)


async def describe_topic(store: ObjectStore, topic: Topic, detached: Detachment | UnsetType = UNSET) -> None:
    """Write the next version of the topic's descriptor, unless the newest one says the same or has more partitions.

    Partitions are only added, so ``topic`` is outdated then: its writer has looked at metadata before another one has.
    ``detached`` is written before the topic is detached. Without it the descriptor repeats that of the one before: a worker may
    describe the topic while it is being detached, and the marker of an earlier deletion may come after the topic was restored
    by the bucket's next owner. If the newest one is damaged, the one before it is compared, and the next one is written even
    if that says the same. Raises the store's errors, ``Invalid`` if a later release may have written the newest one.
    """
    wanted, found, version, is_damaged = descriptor_of(topic), None, 0, False
    async for info in store.list(topic_prefix(topic.topic_id)):
        if (parsed := parse_topic_key(info.key)) is None:
            continue
        version = max(version, parsed.version)
        try:
            found = await read_topic(store, info.key)
            break
        except Corrupt as damaged:
            is_damaged = True
            _log.warning("%s: topic %s is described again", damaged.message, topic.name)
    while True:
        wanted = msgspec.structs.replace(wanted, detached=detached or (found.detached if found is not None else UNSET))
        if found is not None and ((found == wanted and not is_damaged) or found.partition_count > wanted.partition_count):
            return
        version += 1
        key = topic_key(topic.topic_id, version)
        try:
            await store.put(key, [encode_descriptor(wanted)])
        except Conflict:
            # Another worker has written this version since the listing.
            found, is_damaged = await read_topic(store, key), False
        else:
            return


def descriptor_of(topic: Topic) -> TopicDescriptor:
    """The descriptor of a topic as it is in metadata."""
    return TopicDescriptor(
        topic_id=topic.topic_id,
        name=topic.name,
        partition_count=topic.partition_count,
        replication_factor=topic.replication_factor,
        configs=topic.configs,
    )
