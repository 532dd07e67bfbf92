"""Raises the first readable offset of a partition that this broker owns. Retention removes ledgers and segments later."""

from __future__ import annotations

from typing import Final

from stratalog_broker.admin.errors import InvalidTopic, OffsetOutOfRange, OnlyCompacted, Protected
from stratalog_broker.admin.locked_history import require_unlocked_below
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.ownership import Partitions
from stratalog_core.errors import NotFound, NotLeader
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.guarded_updates import decide_again, propose_guarded
from stratalog_metadata.client.protection import is_protected
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.records import Log, Topic, configs_in_force, log_key, topic_key
from stratalog_metadata.state.commands import Command, Put, VersionIs
from stratalog_metadata.topic_rules.cleanup_policy import COMPACT, cleanup_policies
from stratalog_tiering.cold.reader import ColdReader

ALL: Final = -1
"""The offset that means everything below the high watermark."""


async def delete_records(
    metadata: MetadataClient,
    partitions: Partitions,
    cold: ColdReader,
    clock: Clock,
    topic: str,
    index: int,
    offset: int,
    timeout_s: float,
) -> int:
    """Delete the records below ``offset``; return the first offset that is readable afterwards.

    Raises ``NotFound``, ``NotLeader``, ``InvalidTopic`` (internal), ``Protected``, ``OnlyCompacted``, ``ObjectsLocked``,
    ``OffsetOutOfRange``, and failures of the quorum and of the store.
    """
    log = _owned(partitions, topic, index)
    key = log_key(log.topic_partition.topic_id, index)

    async def attempt() -> int:
        end = log.core.high_watermark
        wanted = end if offset == ALL else offset
        if not 0 <= wanted <= end:
            raise OffsetOutOfRange(f"offset {offset} of {topic!r}-{index}: choose 0 to {end}, or {ALL} for all records")
        found, topic_version = _deletable(metadata.view, topic)
        stored = metadata.view.get(key)
        if stored is None or not isinstance(stored.record, Log):
            raise NotFound(f"topic {topic!r} was deleted")
        record = stored.record
        if wanted <= record.log_start_offset:
            return record.log_start_offset
        unlocked = await require_unlocked_below(found, index, wanted, metadata.view, cold, clock.wall_ms())
        changed = Log(topic_id=record.topic_id, index=record.index, ledgers=record.ledgers, log_start_offset=wanted)
        requirements = (log.requirement, VersionIs(key=key, version=stored.version), topic_version, unlocked)
        await propose_guarded(metadata, Command(updates=(Put(record=changed),), requirements=requirements), key, timeout_s)
        return wanted

    return await decide_again(f"the log of {topic!r}-{index}", attempt)  # the list of ledgers may change concurrently


def _deletable(view: MetadataView, name: str) -> tuple[Topic, VersionIs]:
    """Return the topic, and the requirement that its configs do not change.

    Raises ``NotFound``, ``Protected``, and, as in Kafka, ``OnlyCompacted``.
    """
    found = view.get(topic_key(name))
    if found is None or not isinstance(found.record, Topic):
        raise NotFound(f"topic {name!r} was deleted")
    if is_protected(found.record, view):
        raise Protected(name)
    if cleanup_policies(configs_in_force(found.record, topic_defaults(view))) == {COMPACT}:
        raise OnlyCompacted(name)
    return found.record, VersionIs(key=topic_key(name), version=found.version)


def _owned(partitions: Partitions, topic: str, index: int) -> PartitionLog:
    log = partitions.find_by_name(topic.encode(), index)
    if log is not None and not log.topic.internal:
        return log
    known = partitions.topic_by_name(topic.encode())
    if known is None or not 0 <= index < known.partition_count:
        raise NotFound(f"topic {topic!r} has no partition {index}")
    if known.internal:
        raise InvalidTopic(f"topic {topic!r} is internal: its records cannot be deleted")
    raise NotLeader(f"this broker does not own partition {index} of {topic!r}")
