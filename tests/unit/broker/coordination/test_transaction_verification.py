"""First batches of transactions are appended only when their coordinator knows the partition; batches keep their order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from unit.broker.coordination.transactions.test_transaction_requests import END, ID, TOPIC, Producer, create_topic
from unit.broker.mini_cluster import WAIT_S, MiniCluster, run_cluster, until_all_served, until_served
from unit.broker.raw_client import RawClient, produce_request
from unit.broker.transactional import partition_of, read_committed, transactional

from stratalog_broker.coordination import transaction_verification
from stratalog_broker.coordination.routing import partition_of as partition_of_id
from stratalog_broker.coordination.transaction_verification import CONCURRENT_RETRY_S
from stratalog_broker.coordination.transactions.application import KEY_TYPE
from stratalog_broker.coordination.transactions.core.coordinator import ProducerEpoch
from stratalog_broker.coordination.transactions.marker_sender import MarkerSender
from stratalog_broker.peers import channel
from stratalog_broker.protocol.entities import encode_response as encode_entity


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator is asked once, however slow the machine is: a client would send its batch again."""
    monkeypatch.setattr(transaction_verification, "ANSWER_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(channel, "CONNECT_TIMEOUT_S", WAIT_S)


def sent(topic: str, producer: Producer, sequence: int, value: bytes, *, version: int = 9) -> Any:
    batch = transactional(producer.producer_id, sequence, value, epoch=producer.epoch)
    return produce_request(topic, 0, bytes(batch), version=version, transactional_id=ID)


async def produce(client: RawClient, producer: Producer, sequence: int, value: bytes, *, version: int = 9) -> ErrorCode:
    answer = await client.call(0, version, sent(TOPIC, producer, sequence, value, version=version))
    code: ErrorCode = answer.responses[0].partition_responses[0].error_code
    return code


async def until_committed(client: RawClient, producer: Producer, values: list[bytes]) -> None:
    """Wait until the transaction is complete: EndTxn is answered before the markers are written."""
    async with asyncio.timeout(WAIT_S):
        while not (await producer.describe()).transaction_state.startswith("Complete"):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
    assert await read_committed(client, TOPIC) == values


async def begin(cluster: MiniCluster) -> tuple[Producer, RawClient]:
    await create_topic(cluster)
    await until_served(cluster.broker, partition_of(cluster, TOPIC).topic_id)
    producer = Producer(cluster)
    assert await producer.init() is ErrorCode.none
    return producer, await cluster.connect()


async def test_a_partition_must_have_been_added(mini_cluster: MiniCluster) -> None:
    producer, client = await begin(mini_cluster)
    assert await produce(client, producer, 0, b"early") is ErrorCode.invalid_txn_state
    assert await produce(client, producer, 0, b"early", version=11) is ErrorCode.transaction_abortable
    assert await producer.add(0) == [ErrorCode.none]
    assert await produce(client, producer, 0, b"a") is ErrorCode.none
    assert await produce(client, producer, 0, b"a") is ErrorCode.none, "a retry"
    assert await produce(client, producer, 1, b"b") is ErrorCode.none
    assert await read_committed(client, TOPIC) == []
    assert (await producer.send(END, 3, committed=True)).error_code is ErrorCode.none
    await until_committed(client, producer, [b"a", b"b"])
    assert await produce(client, producer, 2, b"late") is ErrorCode.invalid_txn_state
    assert await producer.add(0) == [ErrorCode.none]
    assert await produce(client, producer, 2, b"c") is ErrorCode.none
    assert (await producer.send(END, 3, committed=False)).error_code is ErrorCode.none
    await until_committed(client, producer, [b"a", b"b"])


async def test_batches_in_flight_are_appended_in_their_order(mini_cluster: MiniCluster) -> None:
    producer, client = await begin(mini_cluster)
    assert await producer.add(0) == [ErrorCode.none]
    for sequence in range(5):
        client.send(0, 9, encode_entity(sent(TOPIC, producer, sequence, b"%d" % sequence)))
    rows = [(await client.receive()).responses[0].partition_responses[0] for _ in range(5)]
    assert [(row.error_code, row.base_offset) for row in rows] == [(0, offset) for offset in range(5)]
    assert (await producer.send(END, 3, committed=True)).error_code is ErrorCode.none
    await until_committed(client, producer, [b"0", b"1", b"2", b"3", b"4"])


async def test_from_version_12_on_the_first_batch_adds_the_partition(mini_cluster: MiniCluster) -> None:
    producer, client = await begin(mini_cluster)
    for number in range(3):
        assert await produce(client, producer, 0, b"%d" % number, version=12) is ErrorCode.none
        assert await produce(client, producer, 7, b"gap", version=12) in (
            ErrorCode.out_of_order_sequence_number,
            ErrorCode.not_leader_or_follower,
        )
        ended = await producer.send(END, 5, committed=number != 1)
        assert ended.error_code is ErrorCode.none
        await until_committed(client, producer, [b"0", b"2"][: 1 + number // 2])
        assert await produce(client, producer, 1, b"fenced", version=12) is ErrorCode.invalid_producer_epoch
        producer.producer_id, producer.epoch = ended.producer_id, ended.producer_epoch


async def test_older_producers_and_missing_coordinators_are_refused(mini_cluster: MiniCluster) -> None:
    await create_topic(mini_cluster)
    await until_served(mini_cluster.broker, partition_of(mini_cluster, TOPIC).topic_id)
    client, unknown = await mini_cluster.connect(), Producer(mini_cluster)
    unknown.producer_id, unknown.epoch = 99, 0
    assert await produce(client, unknown, 0, b"x") is ErrorCode.not_enough_replicas, "there is no coordinator yet"
    older, newer = Producer(mini_cluster), Producer(mini_cluster)
    assert [await older.init(), await newer.init()] == [ErrorCode.none] * 2
    assert await newer.add(0) == [ErrorCode.none]
    assert await produce(client, older, 0, b"x") is ErrorCode.invalid_producer_epoch
    assert await produce(client, unknown, 0, b"x") is ErrorCode.invalid_producer_id_mapping
    assert await produce(client, newer, 0, b"a") is ErrorCode.none


async def test_the_first_batch_waits_for_the_markers_of_the_transaction_before(
    mini_cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The markers outdate the coordinator's answer, so the partition's owner asks again."""
    producer, client = await begin(mini_cluster)
    add = MarkerSender.add
    monkeypatch.setattr(
        MarkerSender, "add", lambda *given: asyncio.get_running_loop().call_later(CONCURRENT_RETRY_S * 1.5, add, *given)
    )
    # On a busy machine markers take longer than the tenth of a second after which the client asks again itself.
    monkeypatch.setattr(transaction_verification, "CONCURRENT_PATIENCE_S", WAIT_S)
    for number in range(3):
        for sequence in range(5):
            client.send(0, 12, encode_entity(sent(TOPIC, producer, sequence, b"%d" % number, version=12)))
            await asyncio.sleep(CONCURRENT_RETRY_S / 2)
        rows = [(await client.receive()).responses[0].partition_responses[0] for _ in range(5)]
        assert [row.error_code for row in rows] == [ErrorCode.none] * 5, "no batch overtakes another one"
        ended = await producer.send(END, 5, committed=True)
        producer.producer_id, producer.epoch = ended.producer_id, ended.producer_epoch
    await until_committed(client, producer, [b"0"] * 5 + [b"1"] * 5 + [b"2"] * 5)


# -- coordinators that confirm no writes


class StuckCoordinator:
    """A cluster whose coordinator of one transactional id confirms no writes until ``go_on``."""

    def __init__(self, cluster: MiniCluster) -> None:
        self.cluster = cluster
        self.broker = cluster.broker

    async def begin(self, stuck_id: str) -> None:
        await create_topic(self.cluster)
        name, index = await self.broker.locator.created_partition(KEY_TYPE, stuck_id)
        await until_all_served(self.cluster)
        log = self.broker.partitions.find(partition_of(self.cluster, name, index))
        assert log is not None
        self.log = log

    async def producer(self, transactional_id: str) -> Producer:
        producer = Producer(self.cluster)
        assert self.broker.transactions is not None
        begun = await self.broker.transactions.init_producer_id(transactional_id, 60_000, None)
        assert isinstance(begun, ProducerEpoch)
        producer.producer_id, producer.epoch = begun
        return producer

    async def stop(self) -> None:
        """Write nothing more to the log of the id's coordinator."""
        self.log.core.hold()
        self.log.roll()
        await self.log.seal_all()

    async def produce(self, producer: Producer, transactional_id: str) -> ErrorCode:
        """Send the first batch of a transaction over a connection of its own."""
        client = await self.cluster.connect()
        batch = transactional(producer.producer_id, 0, b"x", epoch=producer.epoch)
        asked = produce_request(TOPIC, 0, bytes(batch), version=12, transactional_id=transactional_id)
        code: ErrorCode = (await client.call(0, 12, asked)).responses[0].partition_responses[0].error_code
        return code

    async def until_asked(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while not self.log.core.queue:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.005)

    @property
    def requests(self) -> int:
        """Number of AddPartitionsToTxn requests that were answered."""
        return sum(self.broker.connections.requests.seconds[24].counts)


async def test_a_coordinator_that_confirms_no_writes_delays_no_transactions_of_others(tmp_path: Path) -> None:
    ids = [name for name in map("id-{}".format, range(20)) if partition_of_id(name, 2) == 0][:1]
    ids += [name for name in map("id-{}".format, range(20)) if partition_of_id(name, 2) == 1][:1]
    async with run_cluster(tmp_path, bookies=1, brokers=1, transaction_state_log_num_partitions=2) as cluster:
        stuck = StuckCoordinator(cluster)
        await stuck.begin(ids[0])
        producers = [await stuck.producer(each) for each in ids]
        await stuck.stop()
        waiting = asyncio.ensure_future(stuck.produce(producers[0], ids[0]))
        await stuck.until_asked()
        async with asyncio.timeout(WAIT_S / 2):
            assert await stuck.produce(producers[1], ids[1]) is ErrorCode.none
        assert not waiting.done()
        stuck.log.go_on()
        assert await waiting is ErrorCode.none


async def test_transactions_that_begin_together_share_a_request(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, bookies=1, brokers=1, transaction_state_log_num_partitions=1) as cluster:
        stuck = StuckCoordinator(cluster)
        await stuck.begin("first")
        first, others = await stuck.producer("first"), {each: await stuck.producer(each) for each in "abcdefgh"}
        await stuck.stop()
        waiting = [asyncio.ensure_future(stuck.produce(first, "first"))]
        await stuck.until_asked()
        waiting += [asyncio.ensure_future(stuck.produce(producer, each)) for each, producer in others.items()]
        async with asyncio.timeout(WAIT_S):
            while len(stuck.broker.verifier._questions) <= len(others):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.005)
        stuck.log.go_on()
        assert set(await asyncio.gather(*waiting)) == {ErrorCode.none}
        assert stuck.requests <= 3, "one, and then one for all that have come meanwhile; those that had to ask again share it"
