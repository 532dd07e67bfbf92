"""A partition that is being handed over holds what producers send, and tells them in one answer who leads now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kio.schema.errors import ErrorCode
from unit.broker.mini_cluster import WAIT_S, MiniCluster, in_thread, run_cluster, until_served
from unit.broker.partitions.test_many_partitions import Counted, create, produce_one_each, until_taken
from unit.broker.raw_client import RawClient, batch, fetch, list_offset, produce, produce_request
from unit.metadata.watching import until

from stratalog_bookies.client.ledger_writer import LedgerWriter
from stratalog_bookies.protocol import messages as bookie_messages
from stratalog_broker.partitions import handover
from stratalog_broker.partitions.ledger_sealing import LedgerSealing
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.protocol.entities import encode_response as encode_entity
from stratalog_metadata.records import NO_OWNER, Ledger, Partition
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import Applied, Command, Put

PRODUCE, LEADER_VERSION = 0, 10


@dataclass(slots=True, kw_only=True)
class Leaving:
    """A partition with one record, whose handover from broker 1 to broker 2 has been begun, and stands until ``go_on``."""

    cluster: MiniCluster
    client: RawClient
    log: PartitionLog
    go_on: asyncio.Event

    async def put(self, next_owner: int) -> None:
        """Give an order, or take it back."""
        partition = self.cluster.metadata.view.find(Partition, self.log.requirement.key)
        assert partition is not None
        await self.cluster.metadata.propose(
            Command(updates=(Put(record=msgspec.structs.replace(partition, next_owner=next_owner)),))
        )

    async def send(self, value: bytes, acks: int = -1, **producer: int) -> None:
        """Send a record and wait until the broker holds it."""
        held = len(self.log.core.queue)
        wanted = produce_request("flights", 0, batch(value, **producer), version=LEADER_VERSION, acks=acks)
        self.client.send(PRODUCE, LEADER_VERSION, encode_entity(wanted))
        async with asyncio.timeout(WAIT_S):
            while acks and len(self.log.core.queue) == held:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.005)

    async def answer(self) -> tuple[Any, Any]:
        """The partition's line of the next answer, and the nodes that the answer names."""
        found = await self.client.receive()
        return found.responses[0].partition_responses[0], found.node_endpoints


@asynccontextmanager
async def leaving(path: Path, monkeypatch: pytest.MonkeyPatch, **producer: int) -> AsyncIterator[Leaving]:
    seal, go_on = LedgerSealing._seal, asyncio.Event()

    async def seal_later(sealing: LedgerSealing, *arguments: Any) -> None:
        await go_on.wait()
        await seal(sealing, *arguments)

    async with run_cluster(path, bookies=1, brokers=2) as cluster:
        await in_thread(lambda: create(cluster.brokers[1].server.kafka_address, 1))
        (partition,) = (each for each in cluster.metadata.view.all(Partition))
        owner = cluster.brokers[partition.owner].server
        await until_served(owner, partition.topic_id)
        log = owner.partitions.find_by_id(partition.topic_id.bytes, 0)
        assert log is not None
        client = await RawClient.connect(owner.kafka_address)
        assert (await produce(client, "flights", batch(b"first", **producer))).error_code == 0
        monkeypatch.setattr(LedgerSealing, "_seal", seal_later)
        found = Leaving(cluster=cluster, client=client, log=log, go_on=go_on)
        await found.put(3 - partition.owner)
        async with asyncio.timeout(WAIT_S):
            while not log.core.is_held:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.005)
        try:
            yield found
        finally:
            go_on.set()
            await client.close()


async def test_what_is_held_is_refused_with_the_name_of_the_next_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with leaving(tmp_path, monkeypatch) as found:
        before = found.log.core.leader_epoch
        await found.send(b"second")
        found.go_on.set()
        line, nodes = await found.answer()
        assert line.error_code is ErrorCode.not_leader_or_follower
        successor = 3 - found.log.requirement.owner
        assert (line.current_leader.leader_id, line.current_leader.leader_epoch) == (successor, before + 1)
        assert [node.node_id for node in nodes] == [successor]
        await found.cluster.refresh()
        (ledger, *_) = sorted(found.cluster.metadata.view.all(Ledger), key=lambda ledger: ledger.ledger_id)
        assert ledger.end_offset == 1, "what was held was never written"


async def test_what_is_held_is_written_here_if_the_order_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with leaving(tmp_path, monkeypatch) as found:
        await found.send(b"second")
        await found.send(b"third")
        await found.put(NO_OWNER)
        found.go_on.set()
        assert [((await found.answer())[0]).base_offset for _ in range(2)] == [1, 2]
        assert found.log.is_serving


async def test_a_seal_that_fails_unexpectedly_costs_one_takeover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task that seals is the only one that ends the wait of the handover."""
    seal, failed = LedgerWriter.seal, list[LedgerWriter]()

    async def fail_once(writer: LedgerWriter, *given: Any, **named: Any) -> Ledger:
        if not failed:
            failed.append(writer)
            raise RuntimeError("a defect")
        return await seal(writer, *given, **named)

    async with leaving(tmp_path, monkeypatch) as found:
        monkeypatch.setattr(LedgerWriter, "seal", fail_once)
        found.go_on.set()
        identity = found.log.topic_partition
        await until_served(found.cluster.brokers[3 - found.log.requirement.owner].server, identity.topic_id)
        assert failed
        await found.cluster.refresh()
        assert not found.log.is_serving


async def test_an_owner_that_is_lost_while_it_hands_over_reports_no_inconsistency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The entry with the state for the next owner is confirmed after the batches that it held were given up."""
    monkeypatch.setattr(handover, "HANDED_BYTES_MAX", 0)
    append = LedgerWriter.append

    async with leaving(tmp_path, monkeypatch) as found:

        def append_and_lose(writer: LedgerWriter, payload: Any) -> int:
            entry_id = append(writer, payload)
            found.log.resign()
            return entry_id

        await found.send(b"second")
        monkeypatch.setattr(LedgerWriter, "append", append_and_lose)
        sealing = found.log.sealing.last
        assert sealing is not None
        found.go_on.set()
        await asyncio.wait_for(asyncio.wait([sealing]), WAIT_S)
        assert (await found.answer())[0].error_code is ErrorCode.not_leader_or_follower
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_what_asks_for_no_answer_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with leaving(tmp_path, monkeypatch) as found:
        await found.send(b"second", acks=0)
        assert await found.client.closed()
        assert not found.log.core.queue


@pytest.mark.parametrize("is_taken_back", [False, True])
async def test_readers_wait_until_the_owner_is_certain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_taken_back: bool
) -> None:
    async with leaving(tmp_path, monkeypatch) as found:
        owner = found.cluster.brokers[found.log.requirement.owner].server
        sent, arrives, propose = asyncio.Event(), asyncio.Event(), owner.metadata.propose

        async def propose_later(command: Command, timeout_s: float = 10.0) -> Applied:
            if any(isinstance(each, Put) and isinstance(each.record, Partition) for each in command.updates):
                sent.set()
                await arrives.wait()
            return await propose(command, timeout_s)

        monkeypatch.setattr(owner.metadata, "propose", propose_later)
        assert (await fetch(found.client, "flights", 0)).high_watermark == 1, "nothing is sent yet"
        found.go_on.set()
        async with asyncio.timeout(WAIT_S):
            await sent.wait()
        assert (await list_offset(found.client, "flights", -1)).error_code is ErrorCode.not_leader_or_follower
        assert (await fetch(found.client, "flights", 0)).error_code is ErrorCode.not_leader_or_follower, "it may not wait"
        waiting = asyncio.ensure_future(fetch(found.client, "flights", 0, max_wait_ms=3_600_000))
        assert not (await asyncio.wait([waiting], timeout=0.2))[0]
        if is_taken_back:
            await found.put(NO_OWNER)
        arrives.set()
        line = await waiting
        if is_taken_back:
            assert (line.error_code, line.high_watermark) == (ErrorCode.none, 1)
        else:
            assert line.error_code is ErrorCode.not_leader_or_follower


async def test_an_order_that_comes_while_the_one_before_fails_is_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner learns of it before it learns that its command was refused. It waited until the order was overdue."""
    async with leaving(tmp_path, monkeypatch) as found:
        metadata, key = found.cluster.brokers[found.log.requirement.owner].server.metadata, found.log.requirement.key
        successor, propose = 3 - found.log.requirement.owner, metadata.propose
        sent, arrives = asyncio.Event(), asyncio.Event()

        async def first_is_late(command: Command, timeout_s: float = 10.0) -> Applied:
            if not sent.is_set() and any(isinstance(each, Put) and each.record.key() == key for each in command.updates):
                sent.set()
                await arrives.wait()
            return await propose(command, timeout_s)

        async with asyncio.timeout(WAIT_S):
            await found.put(NO_OWNER)
            found.go_on.set()
            while found.log.is_leaving:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.005)
            monkeypatch.setattr(metadata, "propose", first_is_late)
            await found.put(successor)
            await sent.wait()
            await found.put(NO_OWNER)
            await found.put(successor)
            await found.cluster.refresh()
            later: list[Partition] = []

            def follow(changes: Sequence[Change]) -> None:
                later.extend(
                    change.after.record
                    for change in changes
                    if change.key == key and change.after is not None and isinstance(change.after.record, Partition)
                )

            stop = found.cluster.metadata.view.subscribe(follow)
            arrives.set()
            await until(found.cluster.metadata, lambda: bool(later), WAIT_S)
            stop()
        assert later[0].owner == successor, "it is not withdrawn first"


async def test_an_earlier_handover_does_not_answer_the_readers_of_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first order is taken back, and the second one's command is sent, before the first handover has refreshed the view."""
    async with leaving(tmp_path, monkeypatch) as found:
        metadata = found.cluster.brokers[found.log.requirement.owner].server.metadata
        propose, refresh = metadata.propose, metadata.refresh
        sent, arrives = [asyncio.Event(), asyncio.Event()], [asyncio.Event(), asyncio.Event()]
        is_refreshing, may_refresh, is_refreshed = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def propose_later(command: Command, timeout_s: float = 10.0) -> Applied:
            if any(isinstance(each, Put) and isinstance(each.record, Partition) for each in command.updates):
                number = int(sent[0].is_set())
                sent[number].set()
                await arrives[number].wait()
            return await propose(command, timeout_s)

        async def refresh_later(timeout_s: float = 10.0) -> int:
            is_refreshing.set()
            await may_refresh.wait()
            index = await refresh(timeout_s)
            is_refreshed.set()
            return index

        monkeypatch.setattr(metadata, "propose", propose_later)
        monkeypatch.setattr(metadata, "refresh", refresh_later)
        found.go_on.set()
        async with asyncio.timeout(WAIT_S):
            await sent[0].wait()
            await found.put(NO_OWNER)
            arrives[0].set()
            await is_refreshing.wait()
            await found.put(3 - found.log.requirement.owner)
            await sent[1].wait()
            may_refresh.set()
            await is_refreshed.wait()
        assert (await list_offset(found.client, "flights", -1)).error_code is ErrorCode.not_leader_or_follower
        arrives[1].set()


@pytest.mark.parametrize("in_flight", [1, 5])
async def test_a_producer_whose_whole_pipeline_was_held_goes_on_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_flight: int
) -> None:
    producer = {"producer_id": 7, "producer_epoch": 0}
    async with leaving(tmp_path, monkeypatch, **producer, base_sequence=0) as found:
        for sequence in range(1, in_flight + 1):
            await found.send(b"held", **producer, base_sequence=sequence)
        found.go_on.set()
        for _ in range(in_flight):
            assert (await found.answer())[0].error_code is ErrorCode.not_leader_or_follower
        successor = found.cluster.brokers[3 - found.log.requirement.owner].server
        await until_served(successor, found.log.topic_partition.topic_id)
        client = await RawClient.connect(successor.kafka_address)
        for sequence in range(in_flight + 1):
            answer = await produce(client, "flights", batch(b"again", **producer, base_sequence=sequence))
            assert (answer.error_code, answer.base_offset) == (ErrorCode.none, sequence)
        await client.close()


async def orderly_stop(path: Path, partitions: int, open_ledgers: int, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Count the requests until all partitions have moved to another broker; ``open_ledgers`` of them have a ledger to seal."""
    async with run_cluster(path, bookies=1, brokers=1, balance_interval_s=0, lease_ms=60_000, shutdown_ms=60_000) as cluster:
        bootstrap = cluster.bootstrap
        await in_thread(lambda: create(bootstrap, partitions))
        await in_thread(lambda: produce_one_each(bootstrap, range(open_ledgers)))
        await cluster.start_broker(2, lease_ms=60_000)
        with monkeypatch.context() as patched:
            counted = Counted(patched)
            await cluster.brokers.pop(1).stop()
            await until_taken(cluster, 2, partitions)
        await until(cluster.metadata, lambda: all(one.owner == 2 for one in cluster.metadata.view.all(Partition)), WAIT_S)
        return counted


@pytest.mark.parametrize("open_ledgers", [0, 400])
async def test_a_broker_that_stops_shares_commands_among_its_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_ledgers: int
) -> None:
    """It took two for each: one to seal, one to name the next owner."""
    partitions = 400
    counted = await orderly_stop(tmp_path, partitions, open_ledgers, monkeypatch)
    assert len(counted.commands) <= partitions / 4
    bytes_of_each = sum(map(len, counted.commands)) / partitions
    assert bytes_of_each <= (1500 if open_ledgers else 500), "a ledger is closed, and the next one opened"
    asked = counted.sent[bookie_messages.READ_HEADERS] + counted.sent[bookie_messages.READ]
    assert asked == 0, "the record that names the next owner says what it must know"


@pytest.mark.parametrize(("producers", "entries_behind"), [(1, 0), (60, 1)])
async def test_the_next_owner_knows_what_producers_have_sent(tmp_path: Path, producers: int, entries_behind: int) -> None:
    """From the partition's record, or from an entry behind the last batch where there are more than the record takes."""
    async with run_cluster(tmp_path, bookies=1, brokers=2) as cluster:
        await in_thread(lambda: create(cluster.brokers[1].server.kafka_address, 1))
        (partition,) = (each for each in cluster.metadata.view.all(Partition))
        owner, successor = cluster.brokers[partition.owner].server, cluster.brokers[3 - partition.owner].server
        await until_served(owner, partition.topic_id)
        batches = [batch(b"x", producer_id=1 + each, producer_epoch=0, base_sequence=0) for each in range(producers)]
        client = await RawClient.connect(owner.kafka_address)
        assert [(await produce(client, "flights", each)).base_offset for each in batches] == list(range(producers))
        await cluster.metadata.propose(
            Command(updates=(Put(record=msgspec.structs.replace(partition, next_owner=3 - partition.owner)),))
        )
        await until_served(successor, partition.topic_id)
        await cluster.refresh()
        (closed, *_) = sorted(cluster.metadata.view.all(Ledger), key=lambda ledger: ledger.ledger_id)
        assert closed.last_entry == producers + entries_behind, (
            "the first entry is the checkpoint that every ledger begins with"
        )
        again = await RawClient.connect(successor.kafka_address)
        assert [(await produce(again, "flights", each)).base_offset for each in batches] == list(range(producers))
        assert (await produce(again, "flights", batch(b"y"))).base_offset == producers
        found = await fetch(again, "flights", 0)
        assert found.error_code is ErrorCode.none
        assert found.high_watermark == producers + 1
        await client.close()
        await again.close()
