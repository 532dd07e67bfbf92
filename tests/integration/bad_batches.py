"""Batches that a producer may not send, each sent by hand to a cluster, and the error that comes back."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Mapping
from typing import Final

from confluent_kafka.admin import AdminClient, NewTopic
from crc32c import crc32c
from unit.broker.raw_client import RawClient, produce

from stratalog_core.batches.batch import CRC_START, HEADER
from stratalog_core.batches.records import Record, build_batch

REASONS: Final[Mapping[str, str]] = {
    "null": "Kafka closes the connection; here the other partitions of the request are served",
    "codec 5": "Kafka fails with an internal error",
    "codec 7": "Kafka fails with an internal error",
}
"""Why an error differs from Apache Kafka's, by what is wrong with the batch."""
_TIMEOUT_S: Final = 30
_NOT_YET: Final = "not_leader_or_follower"
_MAGIC, _CRC, _ATTRIBUTES, _LAST_DELTA, _COUNT = 16, 17, 21, 23, 57
_OLD_MESSAGE: Final = struct.pack(">qiIBBqii", 0, 26, 0, 1, 0, 0, -1, 4) + b"old!"


def _batch(*values: bytes, timestamp_ms: int = 0, **fields: int) -> bytearray:
    at_ms = timestamp_ms or int(time.time() * 1000)
    records = [
        Record(offset=number, timestamp_ms=at_ms, key=None, value=value) for number, value in enumerate(values or (b"v",))
    ]
    return build_batch(records, **fields)


def _with(position: int, layout: str, value: int, *, has_crc: bool = True) -> bytes:
    """Return a batch with one field of its header replaced."""
    batch = _batch()
    struct.pack_into(layout, batch, position, value)
    if has_crc:
        batch[_CRC : _CRC + 4] = crc32c(memoryview(batch)[CRC_START:]).to_bytes(4, "big")
    return bytes(batch)


def bad_batches() -> Mapping[str, bytes | None]:
    """Return the batches by what is wrong with them."""
    day_ms = 86_400_000
    flipped = _batch()
    flipped[-1] ^= 1
    return {
        "nothing is wrong": bytes(_batch()),
        "null": None,
        "empty": b"",
        "a header cut short": bytes(_batch()[: HEADER.size - 1]),
        "a batch cut short": bytes(_batch()[:-1]),
        "a flipped bit": bytes(flipped),
        "a negative length": _with(8, ">i", -5, has_crc=False),
        "a length of zero": _with(8, ">i", 0, has_crc=False),
        "a length beyond the end": _with(8, ">i", 1_000_000, has_crc=False),
        "magic 0": _with(_MAGIC, ">b", 0, has_crc=False),
        "magic 1": _with(_MAGIC, ">b", 1, has_crc=False),
        "magic 3": _with(_MAGIC, ">b", 3, has_crc=False),
        "a message of format 1": _OLD_MESSAGE,
        "codec 5": _with(_ATTRIBUTES, ">h", 5),
        "codec 7": _with(_ATTRIBUTES, ">h", 7),
        "a control batch": bytes(_batch(attributes=0x20)),
        "two batches": bytes(_batch() + _batch()),
        "no records": _with(_COUNT, ">i", 0),
        "a negative count of records": _with(_COUNT, ">i", -1),
        "too few offsets": _with(_LAST_DELTA, ">i", 5),
        "a negative offset delta": _with(_LAST_DELTA, ">i", -1),
        "a producer without a sequence": bytes(_batch(producer_id=7, producer_epoch=0)),
        "too large": bytes(_batch(bytes(1_100_000))),
        "a timestamp two days ahead": bytes(_batch(timestamp_ms=int(time.time() * 1000) + 2 * day_ms)),
    }


def run_batches(bootstrap: str, topic: str) -> dict[str, str]:
    """Send each batch to a new topic; return the errors by what is wrong with the batch."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    for future in admin.create_topics([NewTopic(topic, num_partitions=1, replication_factor=1)]).values():
        future.result(_TIMEOUT_S)
    deadline = time.monotonic() + _TIMEOUT_S
    while (leader := admin.list_topics(topic).topics[topic].partitions[0].leader) < 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    broker = admin.list_topics(topic).brokers[leader]
    return asyncio.run(_send_all(f"{broker.host}:{broker.port}", topic))


async def _send_all(address: str, topic: str) -> dict[str, str]:
    return {wrong: await _outcome(address, topic, records) for wrong, records in bad_batches().items()}


async def _outcome(address: str, topic: str, records: bytes | None) -> str:
    """Send the batch, again while the leader that the metadata names has not taken over the new topic yet."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        outcome = await _send(address, topic, records)
        if outcome != _NOT_YET or time.monotonic() > deadline:
            return outcome
        await asyncio.sleep(0.1)


async def _send(address: str, topic: str, records: bytes | None) -> str:
    client = await RawClient.connect(address)
    try:
        return str((await produce(client, topic, records)).error_code.name)
    except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
        return "the connection is closed"
    finally:
        await client.close()
