"""A Kafka client that sends exactly the bytes it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import struct
from typing import Any

# Now, not with the first request: kio makes strategies of its types when Hypothesis is there, which goes through all of
# Unicode in a fresh checkout. That takes two seconds, in which an event loop renews no session; minutes under a profiler.
import kio.schema.types  # noqa: F401
from kio.index import load_payload_module
from kio.serial import entity_reader
from kio.static.constants import EntityType

from stratalog_broker.protocol.entities import encode_response as encode_entity
from stratalog_broker.protocol.frame import is_flexible
from stratalog_core.batches.records import Record, build_batch

TIMEOUT_S = 120
"""For an answer: a machine may be busy."""


class RawClient:
    """One connection. Requests may be pipelined; answers come in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._correlation = 0
        self._sent: list[tuple[int, int, int]] = []

    @classmethod
    async def connect(cls, address: str) -> RawClient:
        host, port = address.rsplit(":", 1)
        return cls(*await asyncio.open_connection(host, int(port), limit=200 * 1024 * 1024))

    def send_bytes(self, content: bytes) -> None:
        self._writer.write(content)

    def send(self, api_key: int, version: int, body: bytes, *, answer_version: int | None = None) -> None:
        self._correlation += 1
        head = struct.pack(">hhih", api_key, version, self._correlation, 3) + b"raw"
        if is_flexible(api_key, version):
            head += b"\x00"
        self._writer.write(struct.pack(">i", len(head) + len(body)) + head + body)
        self._sent.append((self._correlation, api_key, version if answer_version is None else answer_version))

    async def receive(self) -> Any:
        """The next answer, decoded."""
        correlation, api_key, version = self._sent.pop(0)
        content = await self.receive_bytes()
        module: Any = load_payload_module(api_key, version, EntityType.response)
        kind: Any = next(
            value
            for value in vars(module).values()
            if isinstance(value, type) and getattr(value, "__type__", None) is EntityType.response
        )
        assert struct.unpack_from(">i", content)[0] == correlation
        start = 5 if kind.__header_schema__.__flexible__ else 4
        read: Any = entity_reader(kind)
        answer, consumed = read(content, start)
        assert start + consumed == len(content)
        return answer

    async def receive_bytes(self) -> bytes:
        async with asyncio.timeout(TIMEOUT_S):
            (size,) = struct.unpack(">i", await self._reader.readexactly(4))
            return await self._reader.readexactly(size)

    async def call(self, api_key: int, version: int, entity: Any) -> Any:
        self.send(api_key, version, encode_entity(entity))
        return await self.receive()

    async def closed(self) -> bool:
        """Wait for the broker to close the connection."""
        async with asyncio.timeout(TIMEOUT_S):
            try:
                return await self._reader.read(1) == b""
            except ConnectionError:
                return True

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


def request(api_key: int, version: int, kind: str, **values: Any) -> Any:
    """A request struct of that version."""
    return getattr(load_payload_module(api_key, version, EntityType.request), kind)(**values)


def batch(*values: bytes, timestamp_ms: int = 1_000, compression: int = 0, **producer: int) -> bytes:
    """A record batch as a producer sends it."""
    records = [
        Record(offset=number, timestamp_ms=timestamp_ms + number, key=None, value=value) for number, value in enumerate(values)
    ]
    return bytes(build_batch(records, compression=compression, **producer))


def produce_request(
    topic: str,
    partition: int,
    records: bytes | None,
    *,
    version: int = 9,
    acks: int = -1,
    transactional_id: str | None = None,
) -> Any:
    data = request(0, version, "PartitionProduceData", index=partition, records=records)
    return request(
        0,
        version,
        "ProduceRequest",
        transactional_id=transactional_id,
        acks=acks,
        timeout=datetime.timedelta(seconds=60),
        topic_data=(request(0, version, "TopicProduceData", name=topic, partition_data=(data,)),),
    )


async def produce(
    client: RawClient,
    topic: str,
    records: bytes | None,
    *,
    partition: int = 0,
    acks: int = -1,
    transactional_id: str | None = None,
) -> Any:
    """Produce one batch; the partition's line of the answer."""
    sent = produce_request(topic, partition, records, acks=acks, transactional_id=transactional_id)
    answer = await client.call(0, 9, sent)
    return answer.responses[0].partition_responses[0]


def fetch_request(
    topic: str,
    offset: int,
    *,
    version: int = 11,
    partition: int = 0,
    max_wait_ms: int = 0,
    min_bytes: int = 1,
    max_bytes: int = 1_000_000,
    session: tuple[int, int] = (0, -1),
    leader_epoch: int = -1,
    isolation_level: int = 0,
    rack: str = "",
) -> Any:
    wanted = request(
        1,
        version,
        "FetchPartition",
        partition=partition,
        current_leader_epoch=leader_epoch,
        fetch_offset=offset,
        partition_max_bytes=max_bytes,
    )
    return request(
        1,
        version,
        "FetchRequest",
        max_wait=datetime.timedelta(milliseconds=max_wait_ms),
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        isolation_level=isolation_level,
        session_id=session[0],
        session_epoch=session[1],
        topics=(request(1, version, "FetchTopic", topic=topic, partitions=(wanted,)),) if offset >= 0 else (),
        forgotten_topics_data=(),
        **({"rack_id": rack} if rack else {}),
    )


async def fetch(client: RawClient, topic: str, offset: int, **options: Any) -> Any:
    """Fetch one partition; its line of the answer."""
    answer = await client.call(1, 11, fetch_request(topic, offset, **options))
    return answer.responses[0].partitions[0]


async def list_offset(
    client: RawClient, topic: str, timestamp: int, partition: int = 0, version: int = 11, isolation_level: int = 0
) -> Any:
    """ListOffsets of one partition; its line of the answer."""
    wanted = request(2, version, "ListOffsetsPartition", partition_index=partition, timestamp=timestamp)
    answer = await client.call(
        2,
        version,
        request(
            2,
            version,
            "ListOffsetsRequest",
            replica_id=-1,
            isolation_level=isolation_level,
            topics=(request(2, version, "ListOffsetsTopic", name=topic, partitions=(wanted,)),),
            timeout=datetime.timedelta(seconds=60),
        ),
    )
    return answer.topics[0].partitions[0]
