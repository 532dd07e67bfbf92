"""Record values: a pool of payloads, each partly random and partly zeros, to set the compression ratio.

The same model as OpenMessaging Benchmark's ``useRandomizedPayloads``, ``randomBytesRatio`` and ``randomizedPayloadPoolSize``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

from stratalog_core.errors import Invalid
from stratalog_loadgen.processes.loads import Payload

STAMP = struct.Struct(">Q")
"""Prefix of a stamped payload: its due time in nanoseconds of the machine's monotonic clock."""

_POOL_BYTES_MAX = 32 * 1024 * 1024


def payloads(wanted: Payload, seed: int) -> Sequence[bytes]:
    """Return the pool, which is equal for equal seeds. Raises ``Invalid`` for a missing or wrong payload file."""
    if wanted.file is not None:
        return [file_payload(Path(wanted.file), wanted.record_bytes)]
    random = Random(seed)
    count = max(1, min(wanted.pool, _POOL_BYTES_MAX // max(1, wanted.record_bytes)))
    random_bytes = round(wanted.record_bytes * wanted.random_ratio)
    return [random.randbytes(random_bytes).ljust(wanted.record_bytes, b"\0") for _ in range(count)]


def stamped(payload: bytes, intended_ns: int) -> bytes:
    """Return the payload with its first bytes replaced by the due time."""
    return STAMP.pack(intended_ns) + payload[STAMP.size :]


def heads_of(intended_ns: Sequence[int]) -> list[bytes]:
    """Return the prefixes that ``stamped`` writes, for many payloads."""
    packed = struct.pack(f">{len(intended_ns)}Q", *intended_ns)
    return [packed[start : start + STAMP.size] for start in range(0, len(packed), STAMP.size)]


def stamps_of(values: Iterable[bytes]) -> tuple[int, ...]:
    """Return the due times of stamped payloads, in nanoseconds. Payloads that are too short are skipped."""
    heads = [head for value in values if len(head := value[: STAMP.size]) == STAMP.size]
    return struct.unpack(f">{len(heads)}Q", b"".join(heads))


def file_payload(path: Path, record_bytes: int) -> bytes:
    """Return the payloads of the file. Raises ``Invalid`` if it is not there, or not of ``record_bytes``."""
    if not path.is_file():
        raise Invalid(f"payloadFile {path} does not exist: name a file of {record_bytes} bytes")
    content = path.read_bytes()
    if len(content) != record_bytes:
        raise Invalid(f"payloadFile {path} has {len(content)} bytes, but messageSize is {record_bytes}: they must be equal")
    return content
