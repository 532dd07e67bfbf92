"""Transactions without a coordinator: batches that are appended as if verified, markers, and a reader of committed records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from unit.broker.mini_cluster import MiniCluster
from unit.broker.raw_client import RawClient, fetch, request

from stratalog_core.batches.batch import TRANSACTIONAL_BIT, iterate_headers
from stratalog_core.batches.records import Record, build_batch, iterate_records
from stratalog_core.partition_state.transactions import ABORT, COMMIT, read_marker
from stratalog_metadata.records import Topic, TopicPartition

COMMITTED = 1


def transactional(producer_id: int, sequence: int, *values: bytes, epoch: int = 0) -> bytearray:
    """A transactional batch as a producer sends it."""
    records = [Record(offset=number, timestamp_ms=1000 + number, key=None, value=value) for number, value in enumerate(values)]
    identity = {"producer_id": producer_id, "producer_epoch": epoch, "base_sequence": sequence}
    return build_batch(records, attributes=TRANSACTIONAL_BIT, **identity)


def partition_of(cluster: MiniCluster, topic: str, partition: int = 0) -> TopicPartition:
    found = next(one for one in cluster.metadata.view.all(Topic) if one.name == topic)
    return TopicPartition(found.topic_id, partition)


async def append(cluster: MiniCluster, topic: str, batch: bytearray) -> int:
    """Append a batch to the topic's first partition as its owner does once the coordinator has answered."""
    return await cluster.broker.partitions.append_internal(partition_of(cluster, topic), batch)


def marker_request(
    topic: str,
    producer_id: int,
    kind: int,
    *,
    epoch: int = 0,
    coordinator_epoch: int = 0,
    partitions: tuple[int, ...] = (0,),
    version: int = 1,
) -> Any:
    """WriteTxnMarkers with one marker; ``version`` is that of the transaction."""
    api_version = 2 if version >= 2 else 1
    fields: dict[str, Any] = {"transaction_version": version} if api_version >= 2 else {}
    topics = (request(27, api_version, "WritableTxnMarkerTopic", name=topic, partition_indexes=partitions),)
    marker = request(
        27, api_version, "WritableTxnMarker", producer_id=producer_id, producer_epoch=epoch,
        transaction_result=kind == COMMIT, topics=topics, coordinator_epoch=coordinator_epoch, **fields,
    )  # fmt: skip
    return request(27, api_version, "WriteTxnMarkersRequest", markers=(marker,))


async def mark(client: RawClient, topic: str, producer_id: int, kind: int, **options: Any) -> Any:
    """End a transaction in the topic's first partition; the code of the answer."""
    api_version = 2 if options.get("version", 1) >= 2 else 1
    answer = await client.call(27, api_version, marker_request(topic, producer_id, kind, **options))
    return answer.markers[0].topics[0].partitions[0].error_code


def committed(batches: bytes, aborted: Sequence[tuple[int, int]], offset: int) -> Iterator[Record]:
    """The records from ``offset`` on that Kafka's consumers keep of a response.

    ``aborted``: producer id and first offset, as the response has them. As consumers do, it skips all batches of such a
    producer from there to its abort marker, so that a transaction too many in ``aborted`` hides records.
    """
    aborted_producers, ahead = set[int](), sorted(aborted, key=lambda one: one[1])
    for position, header in iterate_headers(batches):
        while ahead and ahead[0][1] <= header.last_offset:
            aborted_producers.add(ahead.pop(0)[0])
        batch = memoryview(batches)[position : position + header.size_bytes]
        if header.is_control:
            if read_marker(batch, header).kind == ABORT:
                aborted_producers.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in aborted_producers):
            yield from (record for record in iterate_records(batch, header) if record.offset >= offset)


async def read_committed(client: RawClient, topic: str, offset: int = 0, *, max_bytes: int = 1_000_000) -> list[bytes | None]:
    """The values of all committed records from ``offset`` to the last stable offset."""
    values: list[bytes | None] = []
    while True:
        row = await fetch(client, topic, offset, isolation_level=COMMITTED, max_bytes=max_bytes, max_wait_ms=50)
        assert row.error_code == 0
        batches = bytes(row.records or b"")
        aborted = [(one.producer_id, one.first_offset) for one in row.aborted_transactions]
        values += [record.value for record in committed(batches, aborted, offset)]
        headers = [header for _, header in iterate_headers(batches)]
        offset = headers[-1].next_offset if headers else offset
        assert offset <= row.last_stable_offset
        if offset == row.last_stable_offset:
            return values


class TransactionalHistory:
    """Random transactions of a few producers in a topic's only partition, and what readers of committed records must see."""

    def __init__(self, topic: str, random: Random) -> None:
        self._topic = topic
        self._random = random
        self._sequences = dict.fromkeys(range(1, 5), 0)
        self._open: dict[int, list[tuple[int, bytes]]] = {}
        self._decided: list[tuple[int, bytes]] = []

    @property
    def committed(self) -> list[tuple[int, bytes]]:
        """Offset and value of each committed record, in order."""
        return sorted(self._decided)

    async def step(self, cluster: MiniCluster, client: RawClient) -> None:
        """Send a batch or end a transaction."""
        producer_id = self._random.choice(list(self._sequences))
        if producer_id in self._open and self._random.random() < 0.4:
            await self._end(client, producer_id, self._random.choice((COMMIT, ABORT)))
            return
        values = [b"%d" % self._random.randrange(10**9) for _ in range(self._random.randint(1, 3))]
        batch = transactional(producer_id, self._sequences[producer_id], *values)
        offset = await append(cluster, self._topic, batch)
        self._sequences[producer_id] += len(values)
        self._open.setdefault(producer_id, []).extend((offset + number, value) for number, value in enumerate(values))

    async def end_all(self, client: RawClient) -> None:
        for producer_id in list(self._open):
            await self._end(client, producer_id, self._random.choice((COMMIT, ABORT)))

    async def _end(self, client: RawClient, producer_id: int, kind: int) -> None:
        assert await mark(client, self._topic, producer_id, kind) == 0
        sent = self._open.pop(producer_id)
        if kind == COMMIT:
            self._decided += sent

    async def check(self, client: RawClient, last_stable_offset: int) -> None:
        """Read from every offset, batch by batch and in one go."""
        for offset in range(last_stable_offset + 1):
            expected = [value for place, value in self.committed if offset <= place < last_stable_offset]
            assert await read_committed(client, self._topic, offset) == expected
        values = await read_committed(client, self._topic, max_bytes=1)
        assert values == [value for place, value in self.committed if place < last_stable_offset]
