"""What ``stratalog job erase`` says of the offsets that it has not searched."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import msgspec
import pytest

from stratalog.commands.job_erase import _selection
from stratalog.tier.erasing import not_searched
from stratalog_metadata.client.memory_metadata import MemoryMetadata
from stratalog_metadata.records import Ledger, LedgerRef, LedgerState, Log, ManifestPointer, Topic
from stratalog_metadata.state.commands import Command, Put
from stratalog_pipeline.jobs.erase import SearchedHistory
from stratalog_pipeline.options import Matching, Subscribed
from stratalog_pipeline.planning import OffsetRange, PartitionName

TOPIC = Topic(name="orders", topic_id=UUID(int=7), partition_count=1, replication_factor=1)
NAME = PartitionName(topic=TOPIC.name, topic_id=TOPIC.topic_id, partition=0)
SEARCHED = {NAME: SearchedHistory(offsets=OffsetRange(first=0, end=10), version=1)}


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
    wanted = Subscribed(topics=(TOPIC.name,))
    assert await not_searched(ports, wanted, SEARCHED) == expected


async def test_what_the_bucket_did_not_have_yet_was_not_searched() -> None:
    """A partition that was added, and a topic of the pattern that no worker has described in the bucket."""
    metadata = MemoryMetadata()
    orders = msgspec.structs.replace(TOPIC, partition_count=2)
    new, other = (
        Topic(name=name, topic_id=UUID(int=number), partition_count=1, replication_factor=1)
        for number, name in ((8, "orders-new"), (9, "payments"))
    )
    places = [(orders, 0), (orders, 1), (new, 0), (other, 0)]
    updates: list[Any] = [Put(record=topic) for topic in (orders, new, other)]
    for ledger_id, (topic, partition) in enumerate(places, 1):
        ledger = Ledger(
            ledger_id=ledger_id, topic_id=topic.topic_id, partition=partition, base_offset=10, leader_epoch=0, write_quorum=1,
            ack_quorum=1, fragments=(), state=LedgerState.OPEN,
        )  # fmt: skip
        refs = (LedgerRef(ledger_id=ledger_id, base_offset=10, leader_epoch=0),)
        updates += [Put(record=ledger), Put(record=Log(topic_id=topic.topic_id, index=partition, ledgers=refs))]
    await metadata.propose(Command(updates=tuple(updates)))
    ports: Any = SimpleNamespace(metadata=metadata)
    found = await not_searched(ports, Matching(pattern="orders.*"), SEARCHED)
    assert {str(name): offset for name, offset in found.items()} == {"orders-0": 10, "orders-1": 10, "orders-new-0": 10}


def test_keys_are_taken_as_they_are_given(tmp_path: Path) -> None:
    """A byte that is not UTF-8 ended the command with a traceback; the mark with which some editors begin a file hid a key."""
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbffirst\r\nsecond\n\n")
    found = _selection(("a\udcff",), ("ff00",), file, ("user=\udcfe=", "empty="))
    assert found.keys == {b"a\xff", b"\xff\x00", b"first", b"second"}
    assert found.headers == {(b"user", b"\xfe="), (b"empty", b"")}
