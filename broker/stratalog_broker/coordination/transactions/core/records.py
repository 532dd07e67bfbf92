"""Records of ``__transaction_state`` in Kafka's schemas, so that Kafka's tools can read them.

Written: ``TransactionLogKey`` v0 and ``TransactionLogValue`` v1, the flexible version; values of v0 are read, too. Keys of
other versions are skipped. A null value deletes the key. In state Empty the array of partitions is null, as in Kafka.

The extensions are record headers, which Kafka's tools ignore: ``stratalog.last_producer_epoch``, by which a producer's retry of
InitProducerId is recognised after the coordinator has moved, too; and ``stratalog.topic_ids``, by which a topic that is deleted
and restored gets the markers of its transactions.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Final
from uuid import UUID

from stratalog_broker.coordination.record_reader import Reader
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_broker.coordination.transactions.core.transaction import (
    NO_EPOCH,
    NO_PRODUCER_ID,
    PartitionName,
    Transaction,
    TransactionState,
)
from stratalog_broker.protocol.frame import read_uvarint, write_uvarint
from stratalog_core.batches.records import Header
from stratalog_core.errors import Corrupt

KEY_VERSION: Final = 0
VALUE_VERSION: Final = 1
LAST_EPOCH_HEADER: Final = "stratalog.last_producer_epoch"
TOPIC_IDS_HEADER: Final = "stratalog.topic_ids"
_PREVIOUS_PRODUCER_ID, _NEXT_PRODUCER_ID, _CLIENT_VERSION = 0, 1, 2
_I16: Final = struct.Struct(">h")
_I32: Final = struct.Struct(">i")
_I64: Final = struct.Struct(">q")
_HEAD: Final = struct.Struct(">hqhib")
"""Version, producer id, epoch, timeout, state."""
_TIMES: Final = struct.Struct(">qq")
_NO_TAGS: Final = b"\0"
_STORED: Final = frozenset(TransactionState) - {TransactionState.DEAD, TransactionState.PREPARE_EPOCH_FENCE}


def record_of(transaction: Transaction) -> CoordinatorRecord:
    """Return the record that stores a transaction; for an expired one, the record that removes it."""
    key = encode_key(transaction.transactional_id)
    if transaction.state is TransactionState.DEAD:
        return CoordinatorRecord(key, None)
    return CoordinatorRecord(key, encode_value(transaction), tuple(_encode_headers(transaction)))


def _encode_headers(transaction: Transaction) -> Iterator[Header]:
    if transaction.last_producer_epoch != NO_EPOCH:
        yield LAST_EPOCH_HEADER, _I16.pack(transaction.last_producer_epoch)
    if transaction.topic_ids:
        yield TOPIC_IDS_HEADER, b"".join(_encode_topic_ids(transaction))


def _encode_topic_ids(transaction: Transaction) -> Iterator[bytes]:
    """Yield, for each topic of the value, the number of its ids and these: the names are long, and in the value."""
    ids = {name: [each.bytes for _, each in group] for name, group in itertools.groupby(transaction.topic_ids, key=_topic)}
    for name, _ in itertools.groupby(transaction.partitions, key=_topic):
        found = ids.get(name, [])
        yield _I16.pack(len(found)) + b"".join(found)


def _topic(named: tuple[str, object]) -> str:
    return named[0]


def encode_key(transactional_id: str) -> bytes:
    encoded = transactional_id.encode()
    return _I16.pack(KEY_VERSION) + _I16.pack(len(encoded)) + encoded


def decode_key(key: bytes) -> str | None:
    """Return the transactional id, or None for a key version that is not read here. Raises ``Corrupt``."""
    reader = _Reader(key)
    return reader.short_string() if reader.i16() == KEY_VERSION else None


def encode_value(transaction: Transaction) -> bytes:
    head = _HEAD.pack(
        VALUE_VERSION, transaction.producer_id, transaction.producer_epoch, transaction.timeout_ms, transaction.state
    )
    times = _TIMES.pack(transaction.updated_at_ms, transaction.started_at_ms)
    return b"".join((head, *_encode_partitions(transaction), times, *_encode_tags(transaction)))


def _encode_partitions(transaction: Transaction) -> Iterator[bytes]:
    if transaction.state is TransactionState.EMPTY:
        yield write_uvarint(0)
        return
    topics = [(name, list(group)) for name, group in itertools.groupby(transaction.partitions, key=_topic)]
    yield write_uvarint(len(topics) + 1)
    for name, partitions in topics:
        encoded = name.encode()
        yield write_uvarint(len(encoded) + 1) + encoded + write_uvarint(len(partitions) + 1)
        yield b"".join(_I32.pack(index) for _, index in partitions)
        yield _NO_TAGS


def _encode_tags(transaction: Transaction) -> Iterator[bytes]:
    tags = [
        (tag, packed)
        for tag, packed, is_default in (
            (_PREVIOUS_PRODUCER_ID, _I64.pack(transaction.previous_producer_id), transaction.previous_producer_id == -1),
            (_NEXT_PRODUCER_ID, _I64.pack(transaction.next_producer_id), transaction.next_producer_id == -1),
            (_CLIENT_VERSION, _I16.pack(transaction.client_version), transaction.client_version == 0),
        )
        if not is_default
    ]
    yield write_uvarint(len(tags))
    for tag, packed in tags:
        yield write_uvarint(tag) + write_uvarint(len(packed)) + packed


def decode_value(transactional_id: str, value: bytes, headers: Sequence[Header] = ()) -> Transaction:
    """Return the transaction. Raises ``Corrupt``, also for unknown versions and states."""
    reader = _Reader(value)
    version = reader.i16()
    if not 0 <= version <= VALUE_VERSION:
        raise Corrupt(f"value has version {version}; versions 0 to {VALUE_VERSION} are read")
    producer_id, epoch, timeout_ms, number = reader.i64(), reader.i16(), reader.i32(), reader.i8()
    if number not in _STORED:
        raise Corrupt(f"transaction state {number} is unknown")
    partitions = tuple(sorted(_decode_partitions(reader, is_flexible=version >= 1)))
    updated_at_ms, started_at_ms = reader.i64(), reader.i64()
    tags = dict(reader.tags()) if version >= 1 else {}
    return Transaction(
        transactional_id=transactional_id,
        producer_id=producer_id,
        producer_epoch=epoch,
        last_producer_epoch=_last_epoch_in(headers),
        previous_producer_id=_tag(tags, _PREVIOUS_PRODUCER_ID, _I64, NO_PRODUCER_ID),
        next_producer_id=_tag(tags, _NEXT_PRODUCER_ID, _I64, NO_PRODUCER_ID),
        timeout_ms=timeout_ms,
        state=TransactionState(number),
        partitions=partitions,
        updated_at_ms=updated_at_ms,
        started_at_ms=started_at_ms,
        client_version=_tag(tags, _CLIENT_VERSION, _I16, 0),
        topic_ids=tuple(sorted(_topic_ids_in(headers, partitions))),
    )


def _header(headers: Sequence[Header], name: str) -> bytes | None:
    return next((content for each, content in headers if each == name), None)


def _topic_ids_in(headers: Sequence[Header], partitions: Sequence[PartitionName]) -> Iterator[tuple[str, UUID]]:
    content = _header(headers, TOPIC_IDS_HEADER)
    if content is None:
        return
    reader = _Reader(content)
    for name, _ in itertools.groupby(partitions, key=_topic):
        for _ in range(reader.i16()):
            yield name, UUID(bytes=reader.take(16))


def _last_epoch_in(headers: Sequence[Header]) -> int:
    content = _header(headers, LAST_EPOCH_HEADER)
    if content is None:
        return NO_EPOCH
    if len(content) != _I16.size:
        raise Corrupt(f"header {LAST_EPOCH_HEADER} has {len(content)} bytes instead of {_I16.size}")
    return int(_I16.unpack(content)[0])


def _tag(tags: dict[int, bytes], tag: int, field: struct.Struct, default: int) -> int:
    content = tags.get(tag)
    if content is None:
        return default
    if len(content) != field.size:
        raise Corrupt(f"tagged field {tag} has {len(content)} bytes instead of {field.size}")
    return int(field.unpack(content)[0])


def _decode_partitions(reader: _Reader, *, is_flexible: bool) -> Iterator[PartitionName]:
    for _ in range(reader.compact_count() if is_flexible else reader.count()):
        name = reader.compact_string() if is_flexible else reader.short_string()
        for _ in range(reader.compact_count() if is_flexible else reader.count()):
            yield name, reader.i32()
        if is_flexible:
            list(reader.tags())


class _Reader(Reader):
    """Reads the fields of flexible versions, too."""

    def i8(self) -> int:
        return int.from_bytes(self.take(1), "big", signed=True)

    def count(self) -> int:
        """Return the length of an array; a null one is empty."""
        return self._checked(max(self.i32(), 0))

    def compact_count(self) -> int:
        return self._checked(max(self._uvarint() - 1, 0))

    def short_string(self) -> str:
        return self.text(self.i16())

    def compact_string(self) -> str:
        return self.text(self._uvarint() - 1)

    def tags(self) -> Iterator[tuple[int, bytes]]:
        """Yield the tagged fields of a struct."""
        for _ in range(self._checked(self._uvarint())):
            tag = self._uvarint()
            yield tag, self.take(self._uvarint())

    def _checked(self, count: int) -> int:
        if count > self.remaining:
            raise Corrupt(f"an array claims {count} elements in {self.remaining} bytes")
        return count

    def _uvarint(self) -> int:
        value, self._position = read_uvarint(memoryview(self._content), self._position)
        return value
