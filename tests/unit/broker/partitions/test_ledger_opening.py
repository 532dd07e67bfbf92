"""An owner opens a ledger only at the end of the log, and only until it resigns, although its epoch may stay the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode
from unit.broker.mini_cluster import WAIT_S, in_thread, run_cluster, until_served
from unit.broker.partitions.test_many_partitions import create
from unit.broker.raw_client import RawClient, batch, produce

from stratalog_bookies.client import LedgerClient, LedgerSpec
from stratalog_broker.partitions.ledger_opening import LedgerOpening
from stratalog_core.errors import Conflict, LedgerFenced, NotLeader
from stratalog_metadata.client.memory_metadata import MemoryMetadata
from stratalog_metadata.records import (
    Fragment,
    Ledger,
    LedgerRef,
    LedgerState,
    Log,
    ManifestPointer,
    Partition,
    Topic,
    TopicPartition,
    log_key,
    partition_key,
)
from stratalog_metadata.state.commands import Command, EpochIs, Put, Requirement, Update

TOPIC = Topic(name="flights", topic_id=UUID(int=7), partition_count=1, replication_factor=1)
PARTITION = Partition(topic_id=TOPIC.topic_id, index=0, owner=1, leader_epoch=3)
KEY = log_key(TOPIC.topic_id, 0)
OWNER = EpochIs(key=partition_key(TOPIC.topic_id, 0), owner=1, leader_epoch=3)


def ledger(ledger_id: int, base_offset: int, end_offset: int, state: LedgerState = LedgerState.CLOSED) -> Ledger:
    return Ledger(
        ledger_id=ledger_id, topic_id=TOPIC.topic_id, partition=0, base_offset=base_offset, leader_epoch=3,
        write_quorum=1, ack_quorum=1, fragments=(Fragment(first_entry=0, bookies=("bookie-1",)),),
        state=state, last_entry=0, end_offset=end_offset,
    )  # fmt: skip


def ref(ledger_id: int, base_offset: int) -> LedgerRef:
    return LedgerRef(ledger_id=ledger_id, base_offset=base_offset, leader_epoch=3)


class Ledgers:
    """The calls of a ``LedgerClient`` that opening makes. A test replaces ``before_create`` to fail an attempt."""

    def __init__(self, metadata: MemoryMetadata) -> None:
        self._metadata = metadata
        self._next_id = 100
        self.recovered: list[int] = []

    async def before_create(self) -> None:
        pass

    async def create(self, spec: LedgerSpec, *, requirements: tuple[Requirement, ...], updates: Any, listener: Any) -> Writer:
        await self.before_create()
        self._next_id += 1
        created = ledger(self._next_id, spec.base_offset, -1, LedgerState.OPEN)
        await self._metadata.propose(Command(updates=(Put(record=created), *updates(created)), requirements=requirements))
        return Writer(created)

    async def recover(self, ledger_ids: Sequence[int], *, requirements: tuple[Requirement, ...]) -> list[Ledger]:
        """Return ledgers as another recovery closed them: their records are not yet in the view."""
        self.recovered += ledger_ids
        return [ledger(ledger_id, 10, 21) for ledger_id in ledger_ids]


class Writer:
    def __init__(self, created: Ledger) -> None:
        self.ledger = created


async def opening_of(*records: Any) -> tuple[LedgerOpening, Ledgers, MemoryMetadata]:
    metadata = MemoryMetadata()
    updates: tuple[Update, ...] = tuple(Put(record=record) for record in (TOPIC, PARTITION, *records))
    await metadata.propose(Command(updates=updates))
    ledgers: Any = Ledgers(metadata)
    return LedgerOpening(metadata, ledgers, TopicPartition(TOPIC.topic_id, 0), OWNER), ledgers, metadata


def log_of(*refs: LedgerRef) -> Log:
    return Log(topic_id=TOPIC.topic_id, index=0, ledgers=refs)


def pointer_to(end_offset: int) -> ManifestPointer:
    return ManifestPointer(
        topic_id=TOPIC.topic_id, index=0, manifest_version=1, object_key="manifest", sha256="", start_offset=0,
        end_offset=end_offset, cold_bytes=1,
    )  # fmt: skip


async def open_at(opening: LedgerOpening, base_offset: int) -> Any:
    listener: Any = None
    return await asyncio.wait_for(opening.open(TOPIC, base_offset, listener, ()), WAIT_S)


async def test_a_ledger_is_opened_at_the_end_of_the_last_one() -> None:
    opening, _, metadata = await opening_of(log_of(ref(1, 0)), ledger(1, 0, 10))

    writer = await open_at(opening, 10)

    log = metadata.find(Log, KEY)
    assert log is not None
    assert log.ledgers == (ref(1, 0), ref(writer.ledger.ledger_id, 10))


@pytest.mark.parametrize(
    "records",
    [
        pytest.param((log_of(ref(1, 0)), ledger(1, 0, 10)), id="hot"),
        pytest.param((log_of(), pointer_to(10)), id="all data is cold"),
        pytest.param((log_of(ref(1, 10)), ledger(1, 10, -1, LedgerState.OPEN)), id="sealed by this attempt"),
    ],
)
async def test_no_ledger_is_opened_below_the_end_of_the_log(records: tuple[Any, ...]) -> None:
    opening, _, metadata = await opening_of(*records)
    before = metadata.get(KEY)

    with pytest.raises(NotLeader, match=r"ends at offset (10|21); a ledger at 9 would"):
        await open_at(opening, 9)

    assert metadata.get(KEY) == before


async def test_an_owner_that_has_resigned_neither_seals_nor_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its successor on the same broker has the same epoch, so no requirement of a command tells them apart."""
    opening, ledgers, metadata = await opening_of(log_of(ref(1, 0)), ledger(1, 0, 10))
    of_successor = (log_of(ref(1, 0), ref(2, 10)), ledger(2, 10, -1, LedgerState.OPEN))

    async def resign() -> None:
        opening.stop()
        await metadata.propose(Command(updates=tuple(Put(record=record) for record in of_successor)))
        raise Conflict("the log was extended")

    monkeypatch.setattr(ledgers, "before_create", resign)

    for _ in range(2):
        with pytest.raises(NotLeader, match="resigned"):
            await open_at(opening, 10)

    assert ledgers.recovered == []
    assert metadata.find(Log, KEY) == of_successor[0]


async def test_a_lost_partition_that_is_served_here_again_keeps_its_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_ledger, is_blocked, attempts = LedgerClient.create, True, asyncio.Event()

    async def create_later(self: LedgerClient, *spec: Any, **others: Any) -> Any:
        if is_blocked:
            attempts.set()
            raise Conflict("the log was trimmed")
        return await create_ledger(self, *spec, **others)

    async with run_cluster(tmp_path, bookies=1, brokers=1, lease_ms=60_000) as cluster:
        broker = cluster.broker
        await in_thread(lambda: create(broker.kafka_address, 1))
        (partition,) = (each for each in cluster.metadata.view.all(Partition))
        await until_served(broker, partition.topic_id)
        log = broker.partitions.find_by_id(partition.topic_id.bytes, 0)
        assert log is not None
        client = await cluster.connect()
        assert (await produce(client, "flights", batch(b"first"))).error_code == 0
        await log.seal_all()

        monkeypatch.setattr(LedgerClient, "create", create_later)
        other = await RawClient.connect(broker.kafka_address)
        lost = asyncio.ensure_future(produce(other, "flights", batch(b"lost")))
        await asyncio.wait_for(attempts.wait(), WAIT_S)
        log._lose(LedgerFenced("the ledger before was taken over before it was sealed"))
        assert (await asyncio.wait_for(lost, WAIT_S)).error_code is ErrorCode.not_leader_or_follower
        await until_served(broker, partition.topic_id)
        is_blocked = False
        for value in (b"second", b"third"):
            assert (await produce(client, "flights", batch(value))).error_code == 0
        assert log._opening is not None
        await asyncio.wait_for(asyncio.wait([log._opening]), WAIT_S)
        assert (await produce(client, "flights", batch(b"fourth"))).error_code == 0

        await cluster.refresh()
        record = broker.partitions.find_by_id(partition.topic_id.bytes, 0)
        stored = cluster.metadata.view.find(Log, log_key(partition.topic_id, 0))
        assert record is not None
        assert stored is not None
        assert [each.base_offset for each in stored.ledgers] == [0, 1]
        assert record.core.next_offset == 4
        await other.close()
