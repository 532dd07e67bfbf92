"""Copies what was committed of topics just before they were detached.

Metadata no longer has such a topic. Its descriptor in the first bucket says that it was detached, and the newest commit marker
of each partition names its last version, which nobody replaces. A listing may not show them yet, or a write that got no answer
may come later: a topic is looked at until a grace period after the first time.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from typing import Final
from uuid import UUID

from stratalog_core.errors import Corrupt, Invalid, NoSuchObject, StratalogError
from stratalog_tiering.cold.archive import Archive, is_hidden, newest_descriptor_key, read_topic
from stratalog_tiering.copies.deletions import known_topics
from stratalog_tiering.copies.replication import copy_committed, copy_descriptors
from stratalog_tiering.copies.second import WHOLE, SecondCopy
from stratalog_tiering.format.object_keys import TOPICS_PREFIX, parse_topic_key
from stratalog_tiering.offload.ports import WorkerPorts

_TIMEOUT_S: Final = 30.0
_log = logging.getLogger(__name__)


async def copy_detached_topics(ports: WorkerPorts, second: SecondCopy) -> int:
    """Bring the second copy to the last versions of all detached topics; returns the number of objects copied.

    Raises as `copy_partition` does. ``Corrupt`` if a topic is damaged in the first store; all others are copied.
    """
    await second.confirm(ports)
    described = {parsed.topic_id async for key in ports.store.list_keys(TOPICS_PREFIX) if (parsed := parse_topic_key(key))}
    # After the listing: metadata knows a topic before it is described, so one that it does not know has left it.
    await ports.metadata.refresh(_TIMEOUT_S)
    gone = described - known_topics(ports.metadata.view)
    await _note_losses(ports, second, gone)
    copied, failures = 0, list[StratalogError]()
    for topic_id in sorted(gone):
        try:
            copied += await _copy_topic(ports, second, topic_id)
        except (Corrupt, Invalid, NoSuchObject) as failure:
            failures.append(failure)
    if failures:
        raise Corrupt(f"{len(failures)} detached topics cannot be copied, first: {failures[0].message}") from failures[0]
    return copied


async def _note_losses(ports: WorkerPorts, second: SecondCopy, topic_ids: Set[UUID]) -> None:
    """Have those of the topics copied again that were copied, and of which the second copy no longer has a descriptor."""
    described = {parsed.topic_id async for key in second.store.list_keys(TOPICS_PREFIX) if (parsed := parse_topic_key(key))}
    lost = [topic_id for topic_id in topic_ids - described if topic_id in second.detached]
    for topic_id in lost:
        _log.warning("%s no longer has detached topic %s: it is copied again", second.store.url, topic_id)
        second.lost_topic(topic_id)
    if lost:
        await second.confirm(ports)


async def _copy_topic(ports: WorkerPorts, second: SecondCopy, topic_id: UUID) -> int:
    now_ms, due_ms = ports.clock.wall_ms(), second.detached.get(topic_id)
    if due_ms == WHOLE:
        return 0
    key = await newest_descriptor_key(ports.store, topic_id)
    if key is None:
        return 0
    try:
        topic = await read_topic(ports.store, key)
    except NoSuchObject:
        return 0  # A worker deletes the topic.
    copied = 0
    if topic.detached and not await is_hidden(ports.store, topic_id):
        await copy_descriptors(ports.store, second, topic_id)
        archive = Archive(ports.store)
        for index in range(topic.partition_count):
            pointer = await archive.pointer(topic, index)
            if pointer is not None:
                copied += await copy_committed(ports, second, pointer, await ports.source.manifest(pointer))
        if due_ms is None:
            due_ms = now_ms + second.grace_ms
        second.detached.put(topic_id, WHOLE if now_ms >= due_ms else due_ms)
    return copied
