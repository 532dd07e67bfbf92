"""The topics of a bucket as metadata records, so that a broker without a quorum serves their committed history.

One broker owns every partition. Its leader epoch is the last one in the history, or the next one each time that more history
is found. A partition whose manifest is damaged has no owner.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Corrupt, Invalid, NoSuchObject, NotFound
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import (
    NO_OWNER,
    Log,
    ManifestPointer,
    Partition,
    Record,
    Topic,
    manifest_pointer_key,
    partition_key,
)
from stratalog_metadata.state.commands import Command, Delete, Put
from stratalog_tiering.cold.archive import Archive, StoredTopic

_PARTITIONS_AT_ONCE: Final = 64
_log = logging.getLogger(__name__)


class _Place(NamedTuple):
    topic: Topic
    stored: StoredTopic
    partition: int


class ArchivedTopics:
    """Puts the records of a bucket's topics into ``metadata``, which nothing else changes but the broker's registration."""

    def __init__(
        self, archive: Archive, metadata: MetadataClient, broker_id: int, *, hidden: frozenset[str], with_deleted: bool
    ) -> None:
        """``hidden``: names of topics that are not served."""
        self._archive = archive
        self._metadata = metadata
        self._view = metadata.view
        self._broker_id = broker_id
        self._hidden = hidden
        self._with_deleted = with_deleted
        self._keys: set[str] = set()
        """Keys of the records that come from the bucket."""

    async def load(self) -> int:
        """Read the bucket; put what has changed. Return the number of partitions.

        Raises ``NotFound`` for a bucket without topics, ``Invalid`` for objects of a newer format version, ``Unavailable``.
        """
        topics = self._named(await self._archive.all_topics())
        if not topics:
            raise NotFound(f"{self._archive.url} contains no topics: check bucket and prefix; nothing was offloaded to them")
        places = (_Place(topic, stored, index) for topic, stored in topics for index in range(topic.partition_count))
        found = await bounded_map(self._partition, places, _PARTITIONS_AT_ONCE)
        await self._put([topic for topic, _ in topics] + [record for records in found for record in records])
        return len(found)

    def _named(self, stored: Sequence[StoredTopic]) -> list[tuple[Topic, StoredTopic]]:
        """Return the topics to serve. A deleted one is named NAME-ID, and so are several ones of the same name."""
        served = [each for each in stored if each.descriptor.name not in self._hidden]
        served = [each for each in served if self._with_deleted or not each.is_deleted]
        live = Counter(each.descriptor.name for each in served if not each.is_deleted)
        return [
            (_record_of(each, has_own_name=not each.is_deleted and live[each.descriptor.name] == 1), each) for each in served
        ]

    async def _partition(self, place: _Place) -> tuple[Record, ...]:
        """Return the records of one partition: pointer and log first, because the broker reads them when it sees the owner."""
        topic_id, index = place.topic.topic_id, place.partition
        partition = self._view.find(Partition, partition_key(topic_id, index))
        known = self._view.find(ManifestPointer, manifest_pointer_key(topic_id, index))
        try:
            pointer = await self._archive.pointer(place.stored.descriptor, index, known)
            epoch = await self._archive.newest_epoch(pointer) if pointer is not None and pointer != known else 0
        except (Corrupt, Invalid, NoSuchObject) as damaged:
            _log.error("partition %d of topic %s cannot be read: %s", index, place.topic.name, damaged.message)
            pointer, epoch = known, 0
            partition = partition or Partition(topic_id=topic_id, index=index, owner=NO_OWNER)
        if partition is None or pointer != known:
            epoch = max(epoch, partition.leader_epoch + 1 if partition is not None else 0)
            partition = Partition(topic_id=topic_id, index=index, owner=self._broker_id, leader_epoch=epoch)
        if pointer is None:
            return (partition,)
        return (pointer, Log(topic_id=topic_id, index=index, log_start_offset=pointer.start_offset), partition)

    async def _put(self, records: Sequence[Record]) -> None:
        """Put the records that differ from the view and remove those that are no longer in the bucket, in one command."""
        wanted = {record.key(): record for record in records}
        puts = [Put(record=record) for key, record in wanted.items() if self._record_at(key) != record]
        deletes = [Delete(key=key) for key in sorted(self._keys - wanted.keys())]
        self._keys = set(wanted)
        if puts or deletes:
            await self._metadata.propose(Command(updates=(*puts, *deletes)))

    def _record_at(self, key: str) -> Record | None:
        stored = self._view.get(key)
        return stored.record if stored is not None else None


def _record_of(stored: StoredTopic, *, has_own_name: bool) -> Topic:
    descriptor = stored.descriptor
    return Topic(
        name=descriptor.name if has_own_name else f"{descriptor.name}-{descriptor.topic_id}",
        topic_id=descriptor.topic_id,
        partition_count=descriptor.partition_count,
        replication_factor=max(descriptor.replication_factor, 1),
        configs=descriptor.configs,
    )
