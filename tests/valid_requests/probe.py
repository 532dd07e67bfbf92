"""Asks a broker, as an honest client does, whether everything serves.

The probe has a topic and a group of its own, which nothing else touches: its records and its committed offset must be what it
wrote, whatever was asked of the broker meanwhile, and whichever broker answers. The topic sets the configs that matter to it,
so that the cluster's defaults may change. All other topics, internal ones included, must have owners and be readable.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final

from kio.schema.errors import ErrorCode
from unit.broker.wire_client import WireClient, connect, part

from stratalog_core.batches.batch import iterate_headers
from stratalog_core.batches.records import Record, build_batch

TOPIC: Final = "probe"
GROUP: Final = "probe"
DEADLINE_S: Final = 60.0
_RETRY_S: Final = 0.05
_SECONDS: Final = datetime.timedelta(seconds=5)
_CONFIGS: Final = {
    "max.message.bytes": "100000", "message.timestamp.type": "LogAppendTime", "min.insync.replicas": "1",
    "retention.ms": "-1", "retention.bytes": "-1", "segment.ms": "1000", "stratalog.ack.quorum": "1",
}  # fmt: skip
_EARLIEST: Final = -2


class NotServed(AssertionError):
    """The broker went on refusing what it must serve."""


class Probe:
    """Counts what it has written; each ``check`` writes one record more."""

    def __init__(self) -> None:
        self._written = 0

    async def prepare(self, address: str, *others: str) -> None:
        """Make the probe's topic, and others with two partitions for everybody."""
        async with connect(address) as client:
            await _eventually("its topic", lambda: _create(client, TOPIC, 1, _CONFIGS))
            for name in others:
                await _eventually(name, functools.partial(_create, client, name, 2, {}))
        await self.check(address)

    async def check(self, address: str) -> None:
        """Raises ``NotServed``."""
        async with connect(address) as client:
            await _eventually("metadata of all topics", lambda: _metadata(client))
            await _eventually("a record", lambda: _produce(client, self._written))
            await _eventually("what was written", lambda: _read_own(client, self._written))
            await _eventually("a commit", lambda: _commit(client, self._written))
            await _eventually("a committed offset", lambda: _committed(client, self._written))
            await self._read_all(client)
        self._written += 1

    async def check_kept(self, address: str) -> None:
        """Check that the last record of the probe is readable, from another broker too. Raises ``NotServed``."""
        async with connect(address) as client:
            await _eventually("metadata of all topics", lambda: _metadata(client))
            await _eventually("what was written", lambda: _read_own(client, self._written - 1))
            await _eventually("a committed offset", lambda: _committed(client, self._written - 1))

    async def _read_all(self, client: WireClient) -> None:
        for topic in (await _all_topics(client)).topics:
            for row in topic.partitions:
                place = f"{topic.name}-{row.partition_index}"
                await _eventually(place, functools.partial(_read, client, topic.name, row.partition_index))


async def _eventually(what: str, attempt: Callable[[], Awaitable[str]]) -> None:
    """``attempt`` answers what is wrong still, or nothing."""
    complaint = "no answer"
    try:
        async with asyncio.timeout(DEADLINE_S):
            while complaint := await attempt():  # noqa: ASYNC110 - another process has no event to wait for
                await asyncio.sleep(_RETRY_S)
    except (TimeoutError, OSError, EOFError) as failure:
        raise NotServed(f"{what}: {complaint} ({type(failure).__name__})") from failure


async def _create(client: WireClient, name: str, partitions: int, configs: dict[str, str]) -> str:
    rows = tuple(part(19, 5, "CreatableTopicConfig", name=name, value=value) for name, value in configs.items())
    topic = part(
        19, 5, "CreatableTopic", name=name, num_partitions=partitions, replication_factor=1, assignments=(), configs=rows
    )  # fmt: skip
    answer = await client.send(19, 5, topics=(topic,), timeout=_SECONDS, validate_only=False)
    return _wrong(answer.topics[0].error_code, ErrorCode.topic_already_exists)


async def _all_topics(client: WireClient) -> Any:
    return await client.send(
        3, 9, topics=None, allow_auto_topic_creation=False, include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )  # fmt: skip


async def _metadata(client: WireClient) -> str:
    answer = await _all_topics(client)
    rows = [(topic.name, topic.error_code, -1) for topic in answer.topics]
    rows += [(topic.name, row.error_code, row.partition_index) for topic in answer.topics for row in topic.partitions]
    wrong = [row for row in rows if row[1] is not ErrorCode.none]
    return str(wrong) if wrong else ""


async def _produce(client: WireClient, number: int) -> str:
    """Writes record ``number``; a retry finds it written already, because nobody else writes to the topic."""
    end = await _offset(client, TOPIC, 0, -1)
    if end == number + 1:
        return ""
    if end != number:
        return f"the topic ends at {end}, not {number}"
    batch = bytes(build_batch([Record(offset=0, timestamp_ms=1_000, key=None, value=str(number).encode())]))
    partition = part(0, 7, "PartitionProduceData", index=0, records=batch)
    row = part(0, 7, "TopicProduceData", name=TOPIC, partition_data=(partition,))
    answer = await client.send(0, 7, transactional_id=None, acks=-1, timeout=_SECONDS, topic_data=(row,))
    return _wrong(answer.responses[0].partition_responses[0].error_code)


async def _offset(client: WireClient, topic: str, index: int, timestamp: int) -> int | str:
    row = part(2, 5, "ListOffsetsPartition", partition_index=index, current_leader_epoch=-1, timestamp=timestamp)
    wanted = part(2, 5, "ListOffsetsTopic", name=topic, partitions=(row,))
    answer = await client.send(2, 5, replica_id=-1, isolation_level=0, topics=(wanted,))
    found = answer.topics[0].partitions[0]
    return int(found.offset) if found.error_code is ErrorCode.none else str(found.error_code.name)


async def _fetch(client: WireClient, topic: str, index: int, offset: int) -> Any:
    row = part(
        1, 11, "FetchPartition", partition=index, current_leader_epoch=-1, fetch_offset=offset, log_start_offset=-1,
        partition_max_bytes=1 << 20,
    )  # fmt: skip
    wanted = part(1, 11, "FetchTopic", topic=topic, partitions=(row,))
    answer = await client.send(
        1, 11, replica_id=-1, max_wait=datetime.timedelta(milliseconds=500), min_bytes=1, max_bytes=1 << 20, isolation_level=0,
        session_id=0, session_epoch=-1, topics=(wanted,), forgotten_topics_data=(), rack_id="",
    )  # fmt: skip
    return answer.responses[0].partitions[0]


async def _read_own(client: WireClient, number: int) -> str:
    found = await _fetch(client, TOPIC, 0, number)
    if found.error_code is not ErrorCode.none:
        return str(found.error_code.name)
    content = bytes(found.records or b"")
    return "" if str(number).encode() in content else f"record {number} is not there"


async def _read(client: WireClient, topic: str, index: int) -> str:
    start = await _offset(client, topic, index, _EARLIEST)
    if isinstance(start, str):
        return start
    found = await _fetch(client, topic, index, start)
    if found.error_code is not ErrorCode.none:
        return str(found.error_code.name)
    batches = [header for _, header in iterate_headers(memoryview(bytes(found.records or b"")))]
    return "" if all(header.next_offset > start for header in batches) else f"a batch ends before {start}, the start"


async def _commit(client: WireClient, number: int) -> str:
    answer = await client.send(10, 3, key=GROUP, key_type=0)
    if answer.error_code is not ErrorCode.none:
        return str(answer.error_code.name)
    row = part(
        8, 7, "OffsetCommitRequestPartition", partition_index=0, committed_offset=number, committed_leader_epoch=-1,
        committed_metadata=None,
    )  # fmt: skip
    topic = part(8, 7, "OffsetCommitRequestTopic", name=TOPIC, partitions=(row,))
    answer = await client.send(
        8, 7, group_id=GROUP, generation_id_or_member_epoch=-1, member_id="", group_instance_id=None, topics=(topic,)
    )
    return _wrong(answer.topics[0].partitions[0].error_code)


async def _committed(client: WireClient, number: int) -> str:
    topic = part(9, 5, "OffsetFetchRequestTopic", name=TOPIC, partition_indexes=(0,))
    answer = await client.send(9, 5, group_id=GROUP, topics=(topic,))
    if answer.error_code is not ErrorCode.none:
        return str(answer.error_code.name)
    found = answer.topics[0].partitions[0].committed_offset
    return "" if found == number else f"committed is {found}, not {number}"


def _wrong(code: ErrorCode, *other: ErrorCode) -> str:
    return "" if code is ErrorCode.none or code in other else str(code.name)
