"""A record batch that Kafka's brokers accept and not all of its clients can read."""

from __future__ import annotations

from crc32c import crc32c

from stratalog_core.batches.batch import CRC_START
from stratalog_core.batches.records import Record, build_batch


def with_malformed_header_name() -> bytes:
    """Return a batch of one record, the name of whose header is not UTF-8."""
    made = build_batch([Record(offset=0, timestamp_ms=1000, key=None, value=b"odd", headers=(("name", b"1"),))])
    at = made.index(b"name")
    made[at : at + 2] = b"\xff\xfe"
    made[CRC_START - 4 : CRC_START] = crc32c(bytes(made[CRC_START:])).to_bytes(4, "big")
    return bytes(made)
