"""Records of compacted topics: who sent what under which key, and what came of it.

Each key is written by one producer, so that the order of its records is known. A header numbers every record, because a
tombstone has no value that could tell it from another.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from chaos.outcomes import State

_SEGMENTS: Final = {
    "min.insync.replicas": "2",
    "segment.ms": "3000",
    "segment.bytes": "65536",
    "local.retention.ms": "0",
    "min.cleanable.dirty.ratio": "0.1",
    "max.compaction.lag.ms": "5000",
}
DELETE_RETENTION_MS: Final = 8000
TOPICS: Final[Mapping[str, Mapping[str, str]]] = {
    "keyed": {**_SEGMENTS, "cleanup.policy": "compact", "delete.retention.ms": str(DELETE_RETENTION_MS)},
    # Shorter than a long run, longer than the jumps of clocks.
    "keyed-expiring": {
        **_SEGMENTS,
        "cleanup.policy": "compact,delete",
        "delete.retention.ms": str(DELETE_RETENTION_MS),
        "retention.ms": "90000",
    },
}
PARTITIONS: Final = 2
NUMBER: Final = "number"
"""The header with a record's number."""
_KEYS: Final = 12
_TOMBSTONE_CHANCE: Final = 0.2
_PAYLOAD_BYTES_MAX: Final = 400

Place = tuple[str, int]
"""Topic and partition."""
PLACES: Final[Sequence[Place]] = [(topic, partition) for topic in TOPICS for partition in range(PARTITIONS)]


@dataclass(slots=True, kw_only=True)
class Send:
    """One record that a producer sent. ``offset`` is where it was acknowledged, ``invoked_s`` monotonic time."""

    number: int
    place: Place
    key: bytes
    is_tombstone: bool
    invoked_s: float
    state: State = State.UNKNOWN
    offset: int | None = None

    @property
    def value(self) -> bytes | None:
        """Bytes that follow from the number."""
        if self.is_tombstone:
            return None
        filler = random.Random(self.number)
        return b"%d " % self.number + filler.randbytes(filler.randrange(_PAYLOAD_BYTES_MAX))


class Sends:
    """All records that were sent, by number. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sends: list[Send] = []

    def begin(self, producer: str, draw: random.Random) -> Send:
        """Note the next record of a producer, at a random place under a random key."""
        place = draw.choice(PLACES)
        # Some keys are written often, others rarely.
        key = f"{producer} {int(_KEYS * draw.random() ** 2)}".encode()
        is_tombstone = draw.random() < _TOMBSTONE_CHANCE
        with self._lock:
            send = Send(number=len(self._sends), place=place, key=key, is_tombstone=is_tombstone, invoked_s=time.monotonic())
            self._sends.append(send)
        return send

    def all(self) -> Sequence[Send]:
        with self._lock:
            return list(self._sends)


def by_key(sends: Sequence[Send]) -> Mapping[tuple[Place, bytes], Sequence[Send]]:
    """Return what was sent, in order, by place and key."""
    keys = defaultdict[tuple[Place, bytes], list[Send]](list)
    for send in sends:
        keys[send.place, send.key].append(send)
    return keys
