"""The workload's records: keys that stand for partitions, values that are sent once, bytes that show corruption."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Final

from chaos.history import CORRUPT

MESSAGE_BYTES_MAX: Final = 65_536
"""Largest batch that the topics accept; a larger record certainly fails."""
_PAYLOAD_BYTES_MAX: Final = 1500
_BATCHES: Final = {"max.message.bytes": str(MESSAGE_BYTES_MAX), "min.insync.replicas": "2"}
PARTITIONS: Final = 3
TOPICS: Final[Mapping[str, Mapping[str, str]]] = {
    # Hot copies are dropped as soon as they are cold; ledgers roll all the time.
    "cold": {**_BATCHES, "segment.ms": "4000", "segment.bytes": "131072", "local.retention.ms": "0"},
    # Stays on the bookies: brokers read records of the last minutes there, when these are no longer in memory.
    "hot": {**_BATCHES, "segment.ms": "15000", "segment.bytes": "1048576", "local.retention.ms": "120000"},
}
KEYS: Final = tuple(range(len(TOPICS) * PARTITIONS))
_NAMES: Final = tuple(TOPICS)


def place_of(key: int) -> tuple[str, int]:
    """Return topic and partition of a key."""
    return _NAMES[key // PARTITIONS], key % PARTITIONS


def key_of(topic: str, partition: int) -> int:
    return _NAMES.index(topic) * PARTITIONS + partition


def encode(key: int, value: int) -> bytes:
    """Return a record's value: the two numbers, and bytes derived from them."""
    filler = random.Random(value * 1009 + key)
    return b"%d %d " % (key, value) + filler.randbytes(filler.randrange(_PAYLOAD_BYTES_MAX))


def encode_oversized(key: int, value: int) -> bytes:
    """Return a record that every broker must refuse."""
    return b"%d %d " % (key, value) + random.Random(value).randbytes(MESSAGE_BYTES_MAX + 1000)


def decode(key: int, content: bytes | None) -> int:
    """Return the value; ``CORRUPT`` if these bytes were never sent for ``key``."""
    words = (content or b"").split(b" ", 2)
    if len(words) == 3 and words[1].isdigit() and content == encode(key, int(words[1])):
        return int(words[1])
    return CORRUPT


class Values:
    """Numbers, each returned only once."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def next(self) -> int:
        # One bytecode of CPython: threads may share it.
        return next(self._count)
