"""Finds and aborts hanging transactions, as Kafka's tool does: open in a partition, but no coordinator will end them (KIP-664).

Such a transaction blocks read_committed consumers permanently. A candidate is one whose producer has been silent for longer
than any transaction may take; it hangs if the coordinator of its producer does not know the partition.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from stratalog.kafka_connection import DESCRIBE_PRODUCERS, METADATA, WRITE_TXN_MARKERS, request_part
from stratalog.kafka_requests import ask, ask_any, check, connect, until_available
from stratalog.transactions import describe_transaction, list_transactions
from stratalog_core.errors import Conflict, NotFound

_REQUEST_PARTITIONS_MAX: Final = 500


class OpenTransaction(NamedTuple):
    """A producer's transaction in a partition, which ``leader`` (HOST:PORT) owns."""

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    start_offset: int
    last_timestamp_ms: int
    leader: str


async def find_hanging(bootstrap: str, topic: str | None, transaction_timeout_ms: int) -> list[OpenTransaction]:
    """Return the hanging transactions of a topic, or of all. Raises ``NotFound``, and ``Unavailable`` after a time.

    ``transaction_timeout_ms``: producers that wrote something within this time are skipped.
    """
    found = await until_available(lambda: _open_transactions(bootstrap, topic))
    silent_since_ms = time.time_ns() // 1_000_000 - transaction_timeout_ms
    candidates = [each for each in found if each.last_timestamp_ms < silent_since_ms]
    if not candidates:
        return []
    known = await _known_partitions(bootstrap, sorted({each.producer_id for each in candidates}))
    return [each for each in candidates if f"{each.topic}-{each.partition}" not in known[each.producer_id]]


async def _open_transactions(bootstrap: str, topic: str | None) -> list[OpenTransaction]:
    found = list[OpenTransaction]()
    for leader, places in (await _partitions_by_leader(bootstrap, topic)).items():
        for start in range(0, len(places), _REQUEST_PARTITIONS_MAX):
            found += await _open_at(leader, places[start : start + _REQUEST_PARTITIONS_MAX])
    return sorted(found)


async def _partitions_by_leader(bootstrap: str, topic: str | None) -> dict[str, list[tuple[str, int]]]:
    asked = None if topic is None else (request_part(METADATA, "MetadataRequestTopic")(name=topic),)
    metadata = await ask_any(
        bootstrap, METADATA, topics=asked, allow_auto_topic_creation=False, include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )  # fmt: skip
    addresses = {broker.node_id: f"{broker.host}:{broker.port}" for broker in metadata.brokers}
    places = defaultdict[str, list[tuple[str, int]]](list)
    for each in metadata.topics:
        check(each.error_code, str(each.name))
        for partition in each.partitions:
            if partition.leader_id not in addresses:
                check(ErrorCode.leader_not_available, f"{each.name}-{partition.partition_index}")
            places[addresses[partition.leader_id]].append((each.name, partition.partition_index))
    return places


async def _open_at(leader: str, places: list[tuple[str, int]]) -> list[OpenTransaction]:
    """Ask the owner of partitions for their open transactions. A partition that has been deleted has none."""
    by_topic = defaultdict[str, list[int]](list)
    for name, index in places:
        by_topic[name].append(index)
    part = request_part(DESCRIBE_PRODUCERS, "TopicRequest")
    topics = tuple(part(name=name, partition_indexes=tuple(indexes)) for name, indexes in by_topic.items())
    answer = await ask(await connect(leader), DESCRIBE_PRODUCERS, topics=topics)
    return [each for topic in answer.topics for row in topic.partitions for each in _open_in(topic.name, row, leader)]


def _open_in(topic: str, row: Any, leader: str) -> Iterator[OpenTransaction]:
    if row.error_code is not ErrorCode.unknown_topic_or_partition:
        check(row.error_code, f"{topic}-{row.partition_index}")
    for producer in row.active_producers:
        if producer.current_txn_start_offset >= 0:
            yield OpenTransaction(
                topic, row.partition_index, producer.producer_id, producer.producer_epoch, producer.coordinator_epoch,
                producer.current_txn_start_offset, producer.last_timestamp, leader,
            )  # fmt: skip


async def _known_partitions(bootstrap: str, producer_ids: list[int]) -> dict[int, set[str]]:
    """Return the partitions, as ``TOPIC-INDEX``, whose transactions the coordinators of the producers will end."""
    known = defaultdict[int, set[str]](set)
    for row in await list_transactions(bootstrap, (), producer_ids):
        try:
            described = await describe_transaction(bootstrap, row["transactional_id"])
        except NotFound:
            continue
        known[row["producer_id"]].update(described["partitions"])
    return known


async def abort_hanging(transaction: OpenTransaction) -> None:
    """Write the marker that aborts the transaction.

    Raises ``Conflict`` if it is not open any more, ``Unavailable`` after a time.
    """
    await until_available(lambda: _abort_once(transaction))


async def _abort_once(transaction: OpenTransaction) -> None:
    topic, index = transaction.topic, transaction.partition
    present = {each.producer_id: each.start_offset for each in await _open_at(transaction.leader, [(topic, index)])}
    if present.get(transaction.producer_id) != transaction.start_offset:
        raise Conflict(f"the transaction of producer {transaction.producer_id} in {topic}-{index} has already ended")
    place = request_part(WRITE_TXN_MARKERS, "WritableTxnMarkerTopic")(name=topic, partition_indexes=(index,))
    marker = request_part(WRITE_TXN_MARKERS, "WritableTxnMarker")(
        producer_id=transaction.producer_id,
        producer_epoch=transaction.producer_epoch,
        transaction_result=False,
        topics=(place,),
        coordinator_epoch=max(transaction.coordinator_epoch, 0),
    )
    answer = await ask(await connect(transaction.leader), WRITE_TXN_MARKERS, markers=(marker,))
    check(answer.markers[0].topics[0].partitions[0].error_code, f"{topic}-{index}")
