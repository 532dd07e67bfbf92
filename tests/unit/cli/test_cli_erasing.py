"""What ``stratalog job erase`` says of the offsets that it has not searched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from stratalog.tier.erasing import not_searched
from stratalog_metadata.client.memory_metadata import MemoryMetadata
from stratalog_metadata.records import Ledger, LedgerRef, LedgerState, Log, ManifestPointer, Topic
from stratalog_metadata.state.commands import Command, Put
from stratalog_pipeline.planning import OffsetRange, PartitionName

TOPIC = Topic(name="orders", topic_id=UUID(int=7), partition_count=1, replication_factor=1)
NAME = PartitionName(topic=TOPIC.name, topic_id=TOPIC.topic_id, partition=0)


def pointer(end_offset: int) -> ManifestPointer:
    return ManifestPointer(
        topic_id=TOPIC.topic_id, index=0, manifest_version=2, object_key="2.version", sha256="ab", start_offset=0,
        end_offset=end_offset, cold_bytes=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cold_end", "hot_from", "expected"), [(20, None, {NAME: 10}), (20, 20, {NAME: 10}), (10, 5, {NAME: 5}), (10, None, {})]
)
async def test_what_became_cold_during_the_search_was_not_searched(
    cold_end: int, hot_from: int | None, expected: dict[PartitionName, int]
) -> None:
    """Its hot copies may be gone when the job ends, and then nothing else says that it may have the records."""
    metadata, refs, updates = MemoryMetadata(), list[LedgerRef](), list[Any]()
    if hot_from is not None:
        refs.append(LedgerRef(ledger_id=1, base_offset=hot_from, leader_epoch=0))
        updates.append(
            Put(
                record=Ledger(
                    ledger_id=1, topic_id=TOPIC.topic_id, partition=0, base_offset=hot_from, leader_epoch=0, write_quorum=1,
                    ack_quorum=1, fragments=(), state=LedgerState.OPEN,
                )
            )
        )  # fmt: skip
    log = Log(topic_id=TOPIC.topic_id, index=0, ledgers=tuple(refs))
    await metadata.propose(Command(updates=(Put(record=TOPIC), Put(record=log), Put(record=pointer(cold_end)), *updates)))
    ports: Any = SimpleNamespace(metadata=metadata)
    assert await not_searched(ports, {NAME: OffsetRange(first=0, end=10)}) == expected
