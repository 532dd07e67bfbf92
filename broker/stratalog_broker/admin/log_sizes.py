"""Hot and cold bytes of the partitions that this broker owns, from metadata alone."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.ownership import Partitions
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Ledger, Log, ManifestPointer, ledger_key, log_key, manifest_pointer_key

_AT_ONCE: Final = 500
"""Partitions measured in one turn of the event loop: a millisecond or two."""


class PartitionSize(NamedTuple):
    """Bytes of one partition: batches in its ledgers, once for all copies, and objects of its manifest."""

    partition: int
    hot_bytes: int
    cold_bytes: int


TopicSizes = Mapping[str, Sequence[PartitionSize]]


async def sizes_of_owned(
    view: MetadataView, partitions: Partitions, wanted: Mapping[str, Collection[int]] | None
) -> TopicSizes:
    """Return the sizes by topic of all partitions owned here, or of those in ``wanted``."""
    found: defaultdict[str, list[PartitionSize]] = defaultdict(list)
    for number, log in enumerate(list(partitions.all()), 1):
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
        name = log.topic.name
        if wanted is None or log.topic_partition.partition in wanted.get(name, ()):
            found[name].append(size_of(view, log))
    return found


def size_of(view: MetadataView, log: PartitionLog) -> PartitionSize:
    """Return the size of one partition. Of an open ledger, what this broker has appended counts."""
    topic_id, index = log.topic_partition.topic_id, log.topic_partition.partition
    stored = view.find(Log, log_key(topic_id, index))
    ledgers = [view.find(Ledger, ledger_key(one.ledger_id)) for one in stored.ledgers] if stored is not None else []
    hot = sum(ledger.payload_bytes for ledger in ledgers if ledger is not None)
    if log.core.open is not None:
        hot += log.core.open.payload_bytes
    pointer = view.find(ManifestPointer, manifest_pointer_key(topic_id, index))
    return PartitionSize(index, hot, pointer.cold_bytes if pointer is not None else 0)
