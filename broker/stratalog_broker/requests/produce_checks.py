"""Validation of a produced batch before it gets an offset. Only the header and the CRC are checked.

The rules are Kafka's (LogValidator): exactly one batch of magic 2 per partition, offset deltas that match the record count, no
control batch, a sequence if there is a producer id, timestamps within the topic's limits. Here these are the batch's first and
greatest timestamp, because records are not decoded on the hot path; each record's is checked where
``message.timestamp.before.max.ms`` is set, or records are read anyway (``produced_records.py``). So a batch whose records have
wrong lengths is stored in a topic that is not compacted, where Kafka answers INVALID_RECORD. To find these lengths takes a
compiled kernel 14 us in 128 records of 1 KB, beside 6 us for everything here, and 75 MB of memory in each broker; plain Python
takes 200 us; compressed batches would have to be decompressed. Readers of stored batches report what they cannot read.
"""

from __future__ import annotations

import struct
from typing import Final

from crc32c import crc32c
from kio.schema.errors import ErrorCode

from stratalog_bookies.client.ledger_writer import ENTRY_BYTES_MAX
from stratalog_core.batches.batch import (
    COMPRESSION_MASK,
    CONTROL_BIT,
    CRC_START,
    HEADER,
    HEADER_BYTES,
    LENGTH_PREFIX_BYTES,
    MAGIC,
    TRANSACTIONAL_BIT,
    BatchHeader,
)
from stratalog_metadata.topic_rules.topic_configs import TopicConfigs

_COMPRESSION_MAX: Final = 4
_LENGTH_AT: Final = 8
_LENGTH_AND_MAGIC: Final = struct.Struct(">i4xb")
_MAGIC_END: Final = 17
_OLDEST_LENGTH_MIN: Final = 14
"""Of a message of magic 0, which has the shortest header of all formats."""


class Refused(Exception):
    """The batch is refused; ``code`` and message are sent to its producer."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def check_produced(batch: memoryview, configs: TopicConfigs, now_ms: int) -> BatchHeader:
    """Return the header of a valid batch. Raises ``Refused``."""
    size = len(batch)
    if size < HEADER_BYTES:
        raise _framing_refusal(batch)
    header = tuple.__new__(BatchHeader, HEADER.unpack_from(batch))
    if header.magic != MAGIC or header.batch_length + LENGTH_PREFIX_BYTES != size:
        raise _framing_refusal(batch)
    limit = min(configs.max_message_bytes, ENTRY_BYTES_MAX)
    if size > limit:
        raise Refused(ErrorCode.message_too_large, f"the batch has {size} bytes; maximum is {limit} (max.message.bytes)")
    if crc32c(batch[CRC_START:]) != header.crc:
        raise Refused(ErrorCode.corrupt_message, "the batch does not match its CRC")
    _check_fields(header)
    if not configs.is_log_append_time:
        _check_times(header, configs, now_ms)
    return header


def _framing_refusal(batch: memoryview) -> Refused:
    """Return why the bytes are not exactly one batch of magic 2, in the order and with the codes of Kafka."""
    size = len(batch)
    if size < _MAGIC_END:
        return Refused(ErrorCode.invalid_record, f"{size} bytes hold no record batch; a Produce request carries exactly one")
    length, magic = _LENGTH_AND_MAGIC.unpack_from(batch, _LENGTH_AT)
    whole = length + LENGTH_PREFIX_BYTES
    if length < _OLDEST_LENGTH_MIN:
        return Refused(ErrorCode.corrupt_message, f"the batch claims {whole} bytes; no format is that short")
    if whole > size:
        return Refused(ErrorCode.invalid_record, f"the batch claims {whole} bytes and has {size}")
    if not 0 <= magic <= MAGIC:
        return Refused(ErrorCode.corrupt_message, f"record batch has magic {magic}, which is unknown")
    if magic != MAGIC:
        return Refused(ErrorCode.invalid_record, f"record batch has magic {magic}; only magic 2 is supported")
    if whole < size:
        return Refused(ErrorCode.invalid_record, "a Produce request carries exactly one record batch per partition")
    return Refused(ErrorCode.corrupt_message, f"a record batch of {size} bytes is shorter than its header")


def _check_fields(header: BatchHeader) -> None:
    if header.record_count < 1 or header.last_offset_delta != header.record_count - 1:
        raise Refused(
            ErrorCode.invalid_record,
            f"record count {header.record_count} does not match the last offset delta, {header.last_offset_delta}",
        )
    if header.attributes & (CONTROL_BIT | TRANSACTIONAL_BIT):
        _check_transactional(header)
    if header.attributes & COMPRESSION_MASK > _COMPRESSION_MAX:
        raise Refused(ErrorCode.unsupported_compression_type, f"compression {header.compression} is unknown")
    if header.producer_id >= 0 and (header.base_sequence < 0 or header.producer_epoch < 0):
        raise Refused(ErrorCode.invalid_record, "a batch with a producer id needs an epoch and a sequence")


def _check_transactional(header: BatchHeader) -> None:
    if header.attributes & CONTROL_BIT:
        raise Refused(ErrorCode.invalid_record, "clients cannot write control records")
    if header.producer_id < 0:
        raise Refused(ErrorCode.invalid_record, "a transactional batch needs a producer id")


def _check_times(header: BatchHeader, configs: TopicConfigs, now_ms: int) -> None:
    if header.max_timestamp_ms > now_ms + configs.message_timestamp_after_max_ms:
        raise Refused(
            ErrorCode.invalid_timestamp,
            f"timestamp {header.max_timestamp_ms} is later than message.timestamp.after.max.ms allows",
        )
    if 0 <= header.base_timestamp_ms < now_ms - configs.message_timestamp_before_max_ms:
        raise Refused(
            ErrorCode.invalid_timestamp,
            f"timestamp {header.base_timestamp_ms} is earlier than message.timestamp.before.max.ms allows",
        )
