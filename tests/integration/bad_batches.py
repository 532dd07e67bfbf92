"""Batches that a producer may not send, each sent by hand to a cluster, and the error that comes back."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Final

from confluent_kafka.admin import AdminClient, NewTopic
from crc32c import crc32c
from unit.broker.raw_client import RawClient, produce

from stratalog_core.batches.batch import CRC_START, HEADER, HEADER_BYTES, read_header, write_header
from stratalog_core.batches.compression import LZ4, NONE, compress
from stratalog_core.batches.records import Record, build_batch, encode_varint

_UNREAD: Final = "the broker does not read the records of such a topic; consumers, erasure and Spark report bad ones"
_BAD_RECORDS: Final = (
    "a key beyond its record", "a value beyond its record", "a value shorter than its record", "more headers than bytes",
    "a negative number of headers", "a header without a name", "a header beyond its record", "bytes after the headers",
    "bytes after the last record",
)  # fmt: skip
REASONS: Final[Mapping[str, str]] = {
    **{f"{wrong}, {codec}": _UNREAD for wrong in _BAD_RECORDS for codec in ("uncompressed", "lz4")},
    "a record beyond its batch, uncompressed": _UNREAD,
    "a record beyond its batch, lz4, compacted topic": "compaction could not read it; Kafka reads the bytes that there are",
    "null": "Kafka closes the connection; here the other partitions of the request are served",
    "codec 5": "Kafka fails with an internal error",
    "codec 7": "Kafka fails with an internal error",
}
"""Why an error differs from Apache Kafka's, by what is wrong with the batch."""
_TIMEOUT_S: Final = 120
_CODECS: Final = (("uncompressed", NONE), ("lz4", LZ4))
_NOT_YET: Final = ("not_leader_or_follower", "unknown_topic_or_partition")
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
        **{f"{wrong}, {name}": _with_record(record, codec) for wrong, record in _records() for name, codec in _CODECS},
    }


def _records() -> Iterator[tuple[str, bytes]]:
    """Yield a record by what is wrong with it."""
    key, value, no_headers = encode_varint(1) + b"k", encode_varint(1) + b"v", encode_varint(0)
    yield "a sound record", _record(key, value, no_headers)
    yield "a key beyond its record", _record(encode_varint(100) + b"k", value, no_headers)
    yield "a value beyond its record", _record(key, encode_varint(100) + b"v", no_headers)
    yield "a value shorter than its record", _record(key, encode_varint(0) + b"v", no_headers)
    yield "more headers than bytes", _record(key, value, encode_varint(100))
    yield "a negative number of headers", _record(key, value, encode_varint(-1))
    yield "a header without a name", _record(key, value, encode_varint(1), encode_varint(-1), value)
    yield "a header beyond its record", _record(key, value, encode_varint(1), key, encode_varint(100))
    yield "bytes after the headers", _record(key, value, no_headers, b"x")
    yield "a record beyond its batch", encode_varint(100) + _record(key, value, no_headers)[1:]
    yield "bytes after the last record", _record(key, value, no_headers) + b"x"


def _record(*parts: bytes) -> bytes:
    """Return the parts after the deltas, behind the length that they have."""
    content = b"".join((bytes(3), *parts))
    return encode_varint(len(content)) + content


def _with_record(record: bytes, codec: int) -> bytes:
    """Return a batch with a sound header and CRC around one record."""
    whole = _batch()
    batch = bytearray(whole[:HEADER_BYTES]) + compress(codec, record)
    write_header(batch, read_header(whole)._replace(attributes=codec))
    return bytes(batch)


def run_batches(bootstrap: str, topic: str) -> dict[str, str]:
    """Send each batch to a new topic, those with one bad record also to a compacted one; return the errors by what is wrong."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    batches, compacted = bad_batches(), f"{topic}-compacted"
    keyed = {wrong: batch for wrong, batch in batches.items() if wrong.rpartition(", ")[2] in dict(_CODECS)}
    outcomes = send_to_new_topic(admin, topic, {}, batches)
    to_compacted = send_to_new_topic(admin, compacted, {"cleanup.policy": "compact"}, keyed)
    # What reads every topic of the cluster could not read these.
    for future in admin.delete_topics([topic, compacted]).values():
        future.result(_TIMEOUT_S)
    return outcomes | {f"{wrong}, compacted topic": error for wrong, error in to_compacted.items()}


def send_to_new_topic(
    admin: AdminClient, topic: str, configs: Mapping[str, str], batches: Mapping[str, bytes | None]
) -> dict[str, str]:
    """Create a topic with one partition and send it each batch; return the errors by name."""
    for future in admin.create_topics([NewTopic(topic, num_partitions=1, replication_factor=1, config=dict(configs))]).values():
        future.result(_TIMEOUT_S)
    return asyncio.run(_send_all(_leader(admin, topic), topic, batches))


def _leader(admin: AdminClient, topic: str) -> str:
    """Wait until a broker names the leader of partition 0; others than the one that created the topic hear of it later."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        found = admin.list_topics(topic)
        partition = found.topics[topic].partitions.get(0)
        if partition is not None and (broker := found.brokers.get(partition.leader)) is not None:
            return f"{broker.host}:{broker.port}"
        assert time.monotonic() < deadline, f"nobody leads {topic}"
        time.sleep(0.1)


async def _send_all(address: str, topic: str, batches: Mapping[str, bytes | None]) -> dict[str, str]:
    return {wrong: await _outcome(address, topic, records) for wrong, records in batches.items()}


async def _outcome(address: str, topic: str, records: bytes | None) -> str:
    """Send the batch, again while the leader that the metadata names has not heard of the new topic or not taken it over."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        outcome = await _send(address, topic, records)
        if outcome not in _NOT_YET or time.monotonic() > deadline:
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
