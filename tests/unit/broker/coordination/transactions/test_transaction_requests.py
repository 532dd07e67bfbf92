"""Requests of transactional producers over the wire, in every version, and a coordinator that is killed between them."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kio.schema.errors import ErrorCode as E
from unit.broker.mini_cluster import WAIT_S, MiniCluster, RunningBroker, run_cluster
from unit.broker.wire_client import WireClient, connect, part

from stratalog_broker.coordination.transactions.core.transaction import EPOCH_MAX
from stratalog_broker.handlers import HANDLERS

ID = "copier"
TOPIC = "events"
FIND, INIT, ADD, ADD_OFFSETS, END, COMMIT_OFFSETS, DESCRIBE, LIST = 10, 22, 24, 25, 26, 28, 65, 66
MINUTE = datetime.timedelta(minutes=1)
_LATER = (E.coordinator_not_available, E.coordinator_load_in_progress, E.not_coordinator, E.concurrent_transactions)


def versions(api_key: int) -> range:
    return range(HANDLERS[api_key].min_version, HANDLERS[api_key].max_version + 1)


class Producer:
    """A producer with a transactional id that speaks the protocol by hand, always to the present coordinator."""

    def __init__(self, cluster: MiniCluster) -> None:
        self._cluster = cluster
        self.producer_id = -1
        self.epoch = -1

    @asynccontextmanager
    async def coordinator(self) -> AsyncIterator[WireClient]:
        async with asyncio.timeout(WAIT_S):
            while True:
                async with connect(self._cluster.bootstrap) as client:
                    found = await client.send(FIND, 3, key=ID, key_type=1)
                if found.error_code is E.none:
                    break
                await asyncio.sleep(0.02)
        async with connect(f"{found.host}:{found.port}") as client:
            yield client

    async def send(self, api_key: int, version: int, **values: Any) -> Any:
        """Send a request until it is answered with something else than an error that clients retry."""
        identity = {"transactional_id": ID, "producer_id": self.producer_id, "producer_epoch": self.epoch}
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                    async with self.coordinator() as client:
                        answer = await client.send(api_key, version, **{**identity, **values})
                    if getattr(answer, "error_code", E.none) not in _LATER:
                        return answer
                await asyncio.sleep(0.02)

    async def init(self, version: int = 4, **values: Any) -> E:
        fresh = {"producer_id": -1, "producer_epoch": -1, "transaction_timeout": MINUTE}
        answer = await self.send(INIT, version, **{**fresh, **values})
        if answer.error_code is E.none:
            self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
        found: E = answer.error_code
        return found

    async def add(self, *indexes: int, topic: str = TOPIC, version: int = 3) -> list[E]:
        topics = (part(ADD, version, "AddPartitionsToTxnTopic", name=topic, partitions=indexes),)
        answer = await self.send(
            ADD, version, v3_and_below_transactional_id=ID, v3_and_below_producer_id=self.producer_id,
            v3_and_below_producer_epoch=self.epoch, v3_and_below_topics=topics,
        )  # fmt: skip
        (row,) = answer.results_by_topic_v3_and_below
        return [result.partition_error_code for result in row.results_by_partition]

    async def of_broker(self, indexes: Sequence[int], *, verify_only: bool, version: int = 5) -> list[E]:
        topics = (part(ADD, version, "AddPartitionsToTxnTopic", name=TOPIC, partitions=tuple(indexes)),)
        transaction = part(
            ADD, version, "AddPartitionsToTxnTransaction", transactional_id=ID, producer_id=self.producer_id,
            producer_epoch=self.epoch, verify_only=verify_only, topics=topics,
        )  # fmt: skip
        answer = await self.send(ADD, version, transactions=(transaction,))
        ((row,),) = (result.topic_results for result in answer.results_by_transaction)
        return [result.partition_error_code for result in row.results_by_partition]

    async def describe(self) -> Any:
        answer = await self.send(DESCRIBE, 0, transactional_ids=(ID,))
        return answer.transaction_states[0]


def coordinates(broker: RunningBroker) -> bool:
    assert broker.server.transactions is not None
    return any(broker.server.transactions.coordinators())


async def create_topic(cluster: MiniCluster) -> None:
    async with connect(cluster.bootstrap) as client:
        topic = part(19, 5, "CreatableTopic", name=TOPIC, num_partitions=3, replication_factor=1, assignments=(), configs=())
        answer = await client.send(19, 5, topics=(topic,), timeout=MINUTE, validate_only=False)
    assert answer.topics[0].error_code is E.none
    await cluster.refresh()


async def test_every_version_begins_epochs_and_adds_partitions(mini_cluster: MiniCluster) -> None:
    await create_topic(mini_cluster)
    producer = Producer(mini_cluster)
    for epoch, version in enumerate(versions(INIT)):
        assert await producer.init(version) is E.none
        assert producer.epoch == epoch
    for version in range(4):
        assert await producer.add(0, 1, version=version) == [E.none, E.none]
    assert await producer.add(0, topic="absent") == [E.unknown_topic_or_partition]
    assert await producer.add(0, 7) == [E.operation_not_attempted, E.unknown_topic_or_partition]
    assert await producer.add(0, topic="__transaction_state") == [E.unknown_topic_or_partition]
    for version, missing in ((4, E.invalid_txn_state), (5, E.transaction_abortable)):
        assert await producer.of_broker((0, 2), verify_only=True, version=version) == [E.none, missing]
    assert await producer.of_broker((2, 7), verify_only=False) == [E.none, E.unknown_topic_or_partition]
    assert await producer.of_broker((0, 1, 2), verify_only=True) == [E.none] * 3
    described = await producer.describe()
    assert (described.error_code, described.transaction_state, described.producer_epoch) == (E.none, "Ongoing", producer.epoch)
    assert [(row.topic, row.partitions) for row in described.topics] == [(TOPIC, (0, 1, 2))]
    await list_all(producer)


async def list_all(producer: Producer) -> None:
    for version in versions(LIST):
        for states, producer_ids, duration, expected in (
            ((), (), -1, [ID]),
            (("Ongoing",), (producer.producer_id,), 0, [ID]),
            (("Empty",), (), -1, []),
            ((), (producer.producer_id + 1,), -1, []),
        ):
            answer = await producer.send(
                LIST, version, state_filters=states, producer_id_filters=producer_ids, duration_filter=duration
            )
            assert [row.transactional_id for row in answer.transaction_states] == expected
    for pattern, expected in (("cop.*", [ID]), ("co", []), ("x|copier", [ID]), ("", [ID]), (None, [ID])):
        answer = await list_matching(producer, pattern)
        assert [row.transactional_id for row in answer.transaction_states] == expected
    assert (await list_matching(producer, "(")).error_code is E.invalid_regular_expression
    answer = await producer.send(LIST, 1, state_filters=("Nonsense",), producer_id_filters=(), duration_filter=-1)
    assert (answer.unknown_state_filters, answer.transaction_states) == (("Nonsense",), ())
    answer = await producer.send(LIST, 1, state_filters=(), producer_id_filters=(), duration_filter=3_600_000)
    assert answer.transaction_states == ()


async def list_matching(producer: Producer, pattern: str | None) -> Any:
    fields = {"state_filters": (), "producer_id_filters": (), "duration_filter": -1}
    return await producer.send(LIST, 2, **fields, transactional_id_pattern=pattern)


async def test_what_a_wrong_producer_is_told(mini_cluster: MiniCluster) -> None:
    await create_topic(mini_cluster)
    producer = Producer(mini_cluster)
    assert await producer.init(transaction_timeout=datetime.timedelta(hours=1)) is E.invalid_transaction_timeout
    assert await producer.init(producer_epoch=3) is E.invalid_request
    assert await producer.init() is E.none
    (listed,) = (await producer.send(LIST, 0, state_filters=(), producer_id_filters=())).transaction_states
    assert listed.transaction_state == "Empty"
    assert (await producer.send(END, 3, committed=True)).error_code is E.invalid_txn_state
    producer.epoch -= 1
    for version in versions(END):
        expected = E.producer_fenced if version >= 2 else E.invalid_producer_epoch
        assert (await producer.send(END, version, committed=True)).error_code is expected
    for version in range(4):
        assert await producer.add(0, version=version) == [E.producer_fenced if version >= 2 else E.invalid_producer_epoch]
    producer.producer_id += 1
    assert (await producer.send(END, 3, committed=True)).error_code is E.invalid_producer_id_mapping
    async with producer.coordinator() as client:
        answer = await client.send(DESCRIBE, 0, transactional_ids=("absent", ""))
        codes = [row.error_code for row in answer.transaction_states]
        assert codes[1] is E.invalid_request
        assert codes[0] in (E.transactional_id_not_found, E.not_coordinator)


async def test_a_producer_whose_transaction_timed_out_at_its_last_epoch_goes_on(mini_cluster: MiniCluster) -> None:
    await create_topic(mini_cluster)
    producer = Producer(mini_cluster)
    assert await producer.init(transaction_timeout=datetime.timedelta(milliseconds=100)) is E.none
    assert mini_cluster.broker.transactions is not None
    application = mini_cluster.broker.transactions.coordinator_of(ID)
    known = application.find(ID)
    assert known is not None
    # As after 32,766 transactions: the next record makes it durable.
    application._store.transactions[ID] = known.initialized(EPOCH_MAX - 1, -1, known.timeout_ms, known.updated_at_ms)
    producer.epoch = EPOCH_MAX - 1
    assert await producer.of_broker((0,), verify_only=False) == [E.none]
    async with asyncio.timeout(WAIT_S):
        while (await producer.describe()).transaction_state != "CompleteAbort":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    ended = await producer.send(END, 5, committed=False)
    assert (ended.error_code, ended.producer_epoch) == (E.none, 0)
    assert ended.producer_id != producer.producer_id
    producer.producer_id, producer.epoch = ended.producer_id, ended.producer_epoch
    assert await producer.of_broker((0,), verify_only=False) == [E.none]


async def test_offsets_of_a_group_are_a_partition_of_the_transaction(mini_cluster: MiniCluster) -> None:
    producer = Producer(mini_cluster)
    assert await producer.init() is E.none
    async with connect(mini_cluster.bootstrap) as client:
        while (await client.send(FIND, 3, key="group", key_type=0)).error_code is not E.none:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    for version in versions(ADD_OFFSETS):
        assert (await producer.send(ADD_OFFSETS, version, group_id="group")).error_code is E.none
    ((topic,),) = ((row.topic for row in (await producer.describe()).topics),)
    assert topic == "__consumer_offsets"


async def test_offsets_are_refused_by_a_broker_that_does_not_coordinate_their_group(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, brokers=2) as cluster:
        await create_topic(cluster)
        producer = Producer(cluster)
        assert await producer.init() is E.none
        async with asyncio.timeout(WAIT_S), connect(cluster.bootstrap) as client:
            while (found := await client.send(FIND, 3, key="group", key_type=0)).error_code is not E.none:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await cluster.refresh()
        other = next(broker for number, broker in cluster.brokers.items() if number != found.node_id)
        for version in versions(COMMIT_OFFSETS):
            row = part(
                COMMIT_OFFSETS, version, "TxnOffsetCommitRequestPartition", partition_index=0, committed_offset=1,
                committed_metadata=None,
            )  # fmt: skip
            topic = part(COMMIT_OFFSETS, version, "TxnOffsetCommitRequestTopic", name=TOPIC, partitions=(row,))
            async with connect(other.server.kafka_address) as client:
                answer = await client.send(
                    COMMIT_OFFSETS, version, transactional_id=ID, producer_id=producer.producer_id,
                    producer_epoch=producer.epoch, group_id="group", topics=(topic,),
                )  # fmt: skip
            ((refused,),) = (one.partitions for one in answer.topics)
            assert refused.error_code is E.not_coordinator, "the client looks for the coordinator again"


async def test_a_coordinator_that_dies_leaves_the_transaction_to_the_next_one(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, brokers=2, transaction_state_log_num_partitions=1) as cluster:
        await create_topic(cluster)
        producer = Producer(cluster)
        assert await producer.init() is E.none
        first = producer.producer_id, producer.epoch
        assert await producer.add(0) == [E.none]
        owner = next(number for number, broker in cluster.brokers.items() if coordinates(broker))
        await cluster.brokers.pop(owner).kill()
        async with asyncio.timeout(WAIT_S):
            while (found := await producer.of_broker((0, 1), verify_only=True))[0] in _LATER:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert found == [E.none, E.transaction_abortable]
        assert await producer.add(1) == [E.none]
        assert (producer.producer_id, producer.epoch) == first
