"""A small Kafka client for the simulation: requests are pipelined on one connection to each broker, encoded by kio.

It finds leaders with Metadata requests. It does not retry; its caller does.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import io
import struct
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID

from kio.index import load_request_schema, load_response_schema
from kio.schema.types import BrokerId, TopicName
from kio.serial import entity_reader, entity_writer

from simulation.world.machine import Ports, World
from simulation.world.streams import End
from stratalog.kafka_connection import taken_frames
from stratalog_broker.protocol.entities import load_message
from stratalog_core.batches.batch import iterate_headers
from stratalog_core.batches.records import Record, iterate_records
from stratalog_core.partition_state.transactions import ABORT, read_marker

PRODUCE, FETCH, LIST_OFFSETS, METADATA, CREATE_TOPICS, INIT_PRODUCER_ID = 0, 1, 2, 3, 19, 22
DELETE_TOPICS, DELETE_RECORDS, CREATE_PARTITIONS = 20, 21, 37
DESCRIBE_GROUPS, DELETE_GROUPS, OFFSET_DELETE = 15, 42, 47
ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN, END_TXN, TXN_OFFSET_COMMIT = 24, 25, 26, 28
OFFSET_COMMIT, OFFSET_FETCH, FIND_COORDINATOR, JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, SYNC_GROUP = 8, 9, 10, 11, 12, 13, 14
VERSIONS: Final = {
    PRODUCE: 9, FETCH: 11, LIST_OFFSETS: 5, METADATA: 9, OFFSET_COMMIT: 7, OFFSET_FETCH: 7, FIND_COORDINATOR: 3, JOIN_GROUP: 5,
    HEARTBEAT: 3, LEAVE_GROUP: 3, SYNC_GROUP: 3, CREATE_TOPICS: 5, INIT_PRODUCER_ID: 4, DELETE_TOPICS: 4, DELETE_RECORDS: 2,
    CREATE_PARTITIONS: 2, ADD_PARTITIONS_TO_TXN: 3, ADD_OFFSETS_TO_TXN: 3, END_TXN: 3, TXN_OFFSET_COMMIT: 3,
    DESCRIBE_GROUPS: 4, DELETE_GROUPS: 2, OFFSET_DELETE: 0,
}  # fmt: skip
BY_TOPIC_ID: Final = {**VERSIONS, FETCH: 16, METADATA: 12}
"""The versions of a client that fetches by topic id."""
WITHOUT_CLUSTER_OPERATIONS: Final = 11
"""The version of Metadata that has one field fewer."""
REQUEST_TIMEOUT_S: Final = 5.0
ADMIN_TIMEOUT: Final = datetime.timedelta(seconds=4)
EARLIEST, LATEST = -2, -1
NONE: Final = 0
DUPLICATE_SEQUENCE: Final = 46


@functools.cache
def _request_schema(api: int, version: int) -> type[Any]:
    return load_request_schema(api, version)


@functools.cache
def _response_schema(api: int, version: int) -> type[Any]:
    return load_response_schema(api, version)


def load_versions(versions: Mapping[int, int]) -> None:
    """Load the messages of these versions, for clients and brokers: several ms each, which every run would spend otherwise."""
    for api, version in versions.items():
        request, response = _request_schema(api, version), _response_schema(api, version)
        entity_writer(request)
        entity_reader(response)
        load_message(api, version)


def request_schema(api: int) -> type[Any]:
    """Return the request schema of the version in ``VERSIONS``."""
    return _request_schema(api, VERSIONS[api])


def request_struct(api: int, name: str) -> type[Any]:
    """Return a nested struct of a request by kio's name for it."""
    return _struct(request_schema(api), name)


def _no_check() -> None:
    pass


class Fetched(NamedTuple):
    """The answer to a fetch; the next one begins at ``next_offset``."""

    error: int
    high_watermark: int
    last_stable_offset: int
    records: list[Record]
    next_offset: int
    first_offset: int = -1
    """The base offset of the first batch; -1 if there is none."""


class NotServed(Exception):
    """No answer, or a broken connection: whether the request took effect is unknown."""


class _Connection(asyncio.Protocol):
    """One connection to a broker. Answers arrive in the order of their requests."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._answers: deque[asyncio.Future[bytes]] = deque()
        self.is_lost = False

    def data_received(self, data: bytes) -> None:
        self._received += data
        for frame in taken_frames(self._received):
            answer = self._answers.popleft()
            if not answer.done():
                answer.set_result(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(NotServed("the connection broke"))
        self._answers.clear()

    def expect(self) -> asyncio.Future[bytes]:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        return answer


class KafkaClient:
    """Sends requests to brokers by address, and remembers partition leaders. ``versions``: those of ``VERSIONS`` or others.

    With a ``rack`` it fetches from the replicas that owners name, until they answer with an error (KIP-392).
    """

    def __init__(
        self, world: World, ports: Ports, machine: str, bootstrap: list[str], versions: Mapping[int, int] = VERSIONS,
        rack: str = "",
    ) -> None:  # fmt: skip
        self._versions = versions
        self._rack = rack
        self._near: dict[tuple[str, int], str] = {}
        """Replicas to fetch from, by partition."""
        self.was_near = False
        """Whether the last fetch was answered by a replica."""
        self._epochs: dict[tuple[str, int], int] = {}
        self._addresses: dict[int, str] = {}
        self._world = world
        self._ports = ports
        self._machine = machine
        self._bootstrap = bootstrap
        self._connections: dict[str, tuple[_Connection, End]] = {}
        self._asking = asyncio.Lock()
        self._connecting: dict[str, asyncio.Lock] = {}
        self._correlation = 0
        self._leaders: dict[tuple[str, int], str] = {}
        self._topic_ids: dict[str, UUID] = {}

    def struct(self, api: int, name: str) -> type[Any]:
        """Return a nested struct of this client's version of a request by kio's name for it."""
        return _struct(self._schema(api), name)

    def _schema(self, api: int) -> type[Any]:
        return _request_schema(api, self._versions[api])

    async def request(self, address: str, api: int, *, before_write: Callable[[], None] = _no_check, **fields: Any) -> Any:
        """Send one request of this client's version and return its answer. Raises ``NotServed``.

        ``before_write`` is called once there is a connection; the request is not written if it raises.
        """
        connection, end = await self._connect(address)
        before_write()
        correlation, frame = self._frame(api, fields)
        answer = connection.expect()
        end.write(frame)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                content = await answer
        except TimeoutError:
            self._drop(address)
            raise NotServed(f"{address} did not answer in time") from None
        response = _response_schema(api, self._versions[api])
        header_read, at = entity_reader(response.__header_schema__)(memoryview(content).toreadonly(), 0)
        assert header_read.correlation_id == correlation, "answers come in order"
        return entity_reader(response)(memoryview(content).toreadonly(), at)[0]

    def _frame(self, api: int, fields: dict[str, Any]) -> tuple[int, bytes]:
        """Return the correlation id and the bytes of a request."""
        self._correlation += 1
        schema = self._schema(api)
        with io.BytesIO() as body:
            header_kind: Any = schema.__header_schema__
            header = header_kind(
                request_api_key=api,
                request_api_version=self._versions[api],
                correlation_id=self._correlation,
                client_id=self._machine,
            )
            entity_writer(header_kind)(body, header)
            entity_writer(schema)(body, schema(**fields))
            frame = body.getvalue()
        return self._correlation, struct.pack(">i", len(frame)) + frame

    async def _connect(self, address: str) -> tuple[_Connection, End]:
        """Return the connection to ``address``. Callers that wait for a new one get it in the order of their calls."""
        async with self._connecting.setdefault(address, asyncio.Lock()):
            return await self._connect_once(address)

    async def _connect_once(self, address: str) -> tuple[_Connection, End]:
        known = self._connections.get(address)
        if known is not None and not known[0].is_lost:
            return known
        connection = _Connection()
        host, _, port = address.rpartition(":")
        try:
            end = await self._world.streams.create_connection(connection, self._machine, host, int(port))
        except OSError as failure:
            raise NotServed(f"{address}: {failure!r}") from failure
        self._connections[address] = connection, end
        return connection, end

    def _drop(self, address: str) -> None:
        known = self._connections.pop(address, None)
        if known is not None:
            known[1].abort()

    async def any_broker(self, api: int, **fields: Any) -> Any:
        """Return the first answer from any bootstrap address. Raises ``NotServed``."""
        start = self._ports.random.randrange(len(self._bootstrap))
        last: NotServed | None = None
        for step in range(len(self._bootstrap)):
            try:
                return await self.request(self._bootstrap[(start + step) % len(self._bootstrap)], api, **fields)
            except NotServed as failure:
                last = failure
        assert last is not None
        raise last

    async def leader(self, topic: str, partition: int) -> str | None:
        """Return the leader's address, requested once and cached until ``forget``. Callers are answered in order."""
        async with self._asking:
            if (topic, partition) not in self._leaders:
                await self._refresh(topic)
            return self._leaders.get((topic, partition))

    def topic_key(self, topic: str) -> dict[str, Any]:
        """Return the field by which this client's version of Fetch names a topic whose leaders are known."""
        is_by_id = self._versions[FETCH] >= BY_TOPIC_ID[FETCH]
        return {"topic_id": self._topic_ids[topic]} if is_by_id else {"topic": TopicName(topic)}

    def leader_epoch(self, topic: str, partition: int) -> int:
        """Return the leader epoch that came with the leader."""
        return self._epochs[topic, partition]

    def forget(self, topic: str, partition: int) -> None:
        self._leaders.pop((topic, partition), None)
        self._near.pop((topic, partition), None)

    def prefer(self, topic: str, partition: int, address: str) -> None:
        """Fetch from this replica, as if an owner had named it: a preference outlives owners."""
        self._near[topic, partition] = address

    async def _refresh(self, topic: str) -> None:
        schema, names = self._schema(METADATA), {"name": TopicName(topic)}
        is_by_id = self._versions[METADATA] >= WITHOUT_CLUSTER_OPERATIONS
        wanted = _struct(schema, "MetadataRequestTopic")(**names, **({"topic_id": None} if is_by_id else {}))
        metadata = await self.any_broker(
            METADATA,
            topics=(wanted,),
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=False,
            **({} if is_by_id else {"include_cluster_authorized_operations": False}),
        )
        brokers = {broker.node_id: f"{broker.host}:{broker.port}" for broker in metadata.brokers}
        self._addresses.update(brokers)
        for found in metadata.topics:
            if is_by_id and found.error_code == NONE:
                self._topic_ids[topic] = found.topic_id
            for place in found.partitions:
                self._epochs[topic, place.partition_index] = place.leader_epoch
                if place.leader_id in brokers:
                    self._leaders[topic, place.partition_index] = brokers[place.leader_id]

    async def create_topic(
        self, topic: str, partitions: int, replication: int, configs: dict[str, str], address: str = ""
    ) -> int:
        """Create a topic; return the error code. ``address``: the only broker to ask, once."""
        schema = self._schema(CREATE_TOPICS)
        items = tuple(_struct(schema, "CreatableTopicConfig")(name=k, value=v) for k, v in configs.items())
        wanted = _struct(schema, "CreatableTopic")(
            name=TopicName(topic), num_partitions=partitions, replication_factor=replication, assignments=(), configs=items
        )
        fields: dict[str, Any] = {"topics": (wanted,), "timeout": ADMIN_TIMEOUT, "validate_only": False}
        asked = self.request(address, CREATE_TOPICS, **fields) if address else self.any_broker(CREATE_TOPICS, **fields)
        answer = await asked
        return int(answer.topics[0].error_code)

    async def delete_topic(self, topic: str, address: str = "") -> int:
        """Delete a topic; return the error code. ``address``: the only broker to ask, once."""
        fields: dict[str, Any] = {"topic_names": (TopicName(topic),), "timeout": ADMIN_TIMEOUT}
        asked = self.request(address, DELETE_TOPICS, **fields) if address else self.any_broker(DELETE_TOPICS, **fields)
        answer = await asked
        return int(answer.responses[0].error_code)

    async def create_partitions(self, topic: str, count: int) -> int:
        """Add partitions up to ``count``; return the error code."""
        wanted = request_struct(CREATE_PARTITIONS, "CreatePartitionsTopic")(
            name=TopicName(topic), count=count, assignments=None
        )
        answer = await self.any_broker(CREATE_PARTITIONS, topics=(wanted,), timeout=ADMIN_TIMEOUT, validate_only=False)
        return int(answer.results[0].error_code)

    async def delete_records(self, topic: str, partition: int, offset: int) -> int:
        """Delete the records below ``offset``; return the error code."""
        below = request_struct(DELETE_RECORDS, "DeleteRecordsPartition")(partition_index=partition, offset=offset)
        wanted = request_struct(DELETE_RECORDS, "DeleteRecordsTopic")(name=TopicName(topic), partitions=(below,))
        answer = await self._ask_leader(topic, partition, DELETE_RECORDS, topics=(wanted,), timeout=ADMIN_TIMEOUT)
        return int(answer.topics[0].partitions[0].error_code)

    async def start_offset(self, topic: str, partition: int) -> int:
        """Return the first readable offset. Raises ``NotServed``, also for an error code."""
        return await self._list_offset(topic, partition, EARLIEST)

    async def end_offset(self, topic: str, partition: int) -> int:
        """Return the high watermark. Raises ``NotServed``, also for an error code."""
        return await self._list_offset(topic, partition, LATEST)

    async def _list_offset(self, topic: str, partition: int, timestamp: int) -> int:
        asked = request_struct(LIST_OFFSETS, "ListOffsetsPartition")(
            partition_index=partition, current_leader_epoch=-1, timestamp=timestamp
        )
        wanted = request_struct(LIST_OFFSETS, "ListOffsetsTopic")(name=TopicName(topic), partitions=(asked,))
        answer = await self._ask_leader(
            topic, partition, LIST_OFFSETS, replica_id=BrokerId(-1), isolation_level=0, topics=(wanted,)
        )
        found = answer.topics[0].partitions[0]
        if found.error_code != NONE:
            raise NotServed(f"ListOffsets answers {found.error_code}")
        return int(found.offset)

    async def _ask_leader(self, topic: str, partition: int, api: int, **fields: Any) -> Any:
        address = await self.leader(topic, partition)
        if address is None:
            raise NotServed("no leader is known")
        return await self.request(address, api, **fields)

    async def init_producer_id(self) -> tuple[int, int]:
        answer = await self.any_broker(
            INIT_PRODUCER_ID, transactional_id=None, transaction_timeout=datetime.timedelta(seconds=60), producer_id=-1,
            producer_epoch=-1,
        )  # fmt: skip
        if answer.error_code != NONE:
            raise NotServed(f"InitProducerId answers {answer.error_code}")
        return answer.producer_id, answer.producer_epoch

    async def produce(
        self,
        topic: str,
        partition: int,
        batch: bytes,
        acks: int = -1,
        before_write: Callable[[], None] = _no_check,
        transactional_id: str | None = None,
    ) -> tuple[int, int]:
        """Return (error code, base offset); acks=0 gets no answer. ``before_write`` and ``NotServed``: see ``request``."""
        address = await self.leader(topic, partition)
        if address is None:
            raise NotServed("no leader is known")
        data = self.struct(PRODUCE, "PartitionProduceData")(index=partition, records=batch)
        topic_data = self.struct(PRODUCE, "TopicProduceData")(name=TopicName(topic), partition_data=(data,))
        fields = {
            "transactional_id": transactional_id, "acks": acks, "timeout": datetime.timedelta(seconds=3),
            "topic_data": (topic_data,),
        }  # fmt: skip
        if acks == 0:
            _, end = await self._connect(address)
            end.write(self._frame(PRODUCE, fields)[1])
            return NONE, -1
        answer = await self.request(address, PRODUCE, before_write=before_write, **fields)
        result = answer.responses[0].partition_responses[0]
        return int(result.error_code), int(result.base_offset)

    async def fetch(
        self, topic: str, partition: int, offset: int, bytes_max: int = 1 << 20, wait_ms: int = 500
    ) -> tuple[int, int, list[Record]]:
        """Return (error code, high watermark, records from ``offset`` on). Raises ``NotServed``."""
        answer = await self._fetch(topic, partition, offset, bytes_max, wait_ms, isolation_level=0)
        if not answer.responses:
            return int(answer.error_code), -1, []
        result = answer.responses[0].partitions[0]
        records = [record for record in records_of(result.records or b"") if record.offset >= offset]
        return int(result.error_code), int(result.high_watermark), records

    async def fetch_committed(
        self, topic: str, partition: int, offset: int, bytes_max: int = 1 << 20, wait_ms: int = 500
    ) -> Fetched:
        """Fetch with isolation level ``read_committed``, and leave out aborted records as clients do. Raises ``NotServed``."""
        return await self.fetch_isolated(topic, partition, offset, bytes_max, wait_ms, is_committed=True)

    async def fetch_isolated(
        self, topic: str, partition: int, offset: int, bytes_max: int, wait_ms: int = 500, *, is_committed: bool
    ) -> Fetched:
        """Fetch with isolation level ``read_committed`` or ``read_uncommitted``. Raises ``NotServed``."""
        answer = await self._fetch(topic, partition, offset, bytes_max, wait_ms, isolation_level=int(is_committed))
        if not answer.responses:
            return Fetched(int(answer.error_code), -1, -1, [], offset)
        result = answer.responses[0].partitions[0]
        aborted = [(each.first_offset, each.producer_id) for each in result.aborted_transactions or ()]
        found = _committed(result.records or b"", aborted, offset)
        return Fetched(int(result.error_code), int(result.high_watermark), int(result.last_stable_offset), *found)

    async def _fetch(self, topic: str, partition: int, offset: int, bytes_max: int, wait_ms: int, isolation_level: int) -> Any:
        place = topic, partition
        leader = await self.leader(topic, partition)
        if leader is None:
            raise NotServed("no leader is known")
        near = self._near.get(place, leader)
        self.was_near = near != leader
        answer = await self._fetch_from(near, *place, offset, bytes_max, wait_ms, isolation_level)
        replica = answer.responses[0].partitions[0].preferred_read_replica if answer.responses else -1
        if replica in self._addresses:
            self._near[place] = self._addresses[replica]
        return answer

    async def _fetch_from(
        self, address: str, topic: str, partition: int, offset: int, bytes_max: int, wait_ms: int, isolation_level: int
    ) -> Any:
        schema = self._schema(FETCH)
        place = _struct(schema, "FetchPartition")(
            partition=partition,
            current_leader_epoch=self._epochs.get((topic, partition), -1) if self._rack else -1,
            fetch_offset=offset,
            log_start_offset=-1,
            partition_max_bytes=bytes_max,
        )
        return await self.request(
            address, FETCH, replica_id=BrokerId(-1), max_wait=datetime.timedelta(milliseconds=wait_ms), min_bytes=1,
            max_bytes=1 << 20, isolation_level=isolation_level, session_id=0, session_epoch=-1, forgotten_topics_data=(),
            rack_id=self._rack, topics=(_struct(schema, "FetchTopic")(topic=TopicName(topic), partitions=(place,)),),
        )  # fmt: skip


def _committed(content: bytes, aborted: list[tuple[int, int]], offset: int) -> tuple[list[Record], int, int]:
    """Return the committed records from ``offset`` on, the offset after the last batch, and that of the first one."""
    view = memoryview(content)
    pending, skipped = sorted(aborted), set[int]()
    records: list[Record] = []
    next_offset, first_offset = offset, -1
    for position, header in iterate_headers(view):
        batch = view[position : position + header.size_bytes]
        while pending and pending[0][0] <= header.last_offset:
            skipped.add(pending.pop(0)[1])
        next_offset = max(next_offset, header.last_offset + 1)
        first_offset = header.base_offset if first_offset < 0 else first_offset
        if header.is_control:
            if header.record_count and read_marker(batch, header).kind == ABORT:
                skipped.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in skipped):
            records += [record for record in iterate_records(batch, header) if record.offset >= offset]
    return records, next_offset, first_offset


def records_of(content: bytes) -> list[Record]:
    view = memoryview(content)
    return [
        record
        for position, header in iterate_headers(view)
        for record in iterate_records(view[position : position + header.size_bytes], header)
    ]


def _struct(schema: type[Any], name: str) -> type[Any]:
    kind: type[Any] = getattr(sys.modules[schema.__module__], name)
    return kind
