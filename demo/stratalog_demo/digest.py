"""Digests of the events sent, kept independently of the log: one per partition over its acknowledged events, in order."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence

from stratalog_demo.flights import Event

_LENGTHS = struct.Struct(">qqi")


class SequenceDigest:
    """SHA-256 over a sequence of records. Lengths are hashed too, so that different sequences hash different bytes."""

    def __init__(self) -> None:
        self.count = 0
        self._hash = hashlib.sha256()

    def add(self, event: Event) -> None:
        self.count += 1
        key = event.key
        head = _LENGTHS.pack(event.timestamp_ms, -1 if key is None else len(key), len(event.value))
        pieces = [head, key or b"", event.value]
        for name, value in event.headers:
            pieces.append(b"%d:%d:" % (len(name), len(value)))
            pieces.append(name.encode())
            pieces.append(value)
        self._hash.update(b"".join(pieces))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class Sent:
    """Records the partition that acknowledged each event, in the order of sending (-1: not acknowledged)."""

    def __init__(self, events: Sequence[Event], partition_count: int) -> None:
        self.events = events
        self.partition_count = partition_count
        self.partition_of = array("i", [-1]) * len(events)

    def of_partition(self, partition: int) -> Iterable[Event]:
        """Return the events that ``partition`` acknowledged, in the order of sending."""
        return (event for event, where in zip(self.events, self.partition_of, strict=True) if where == partition)

    def unacknowledged(self) -> int:
        return self.partition_of.count(-1)

    def digests(self) -> list[SequenceDigest]:
        digests = [SequenceDigest() for _ in range(self.partition_count)]
        for event, partition in zip(self.events, self.partition_of, strict=True):
            if partition >= 0:
                digests[partition].add(event)
        return digests

    def first_not_earlier(self, timestamp_ms: int) -> list[tuple[int, Event] | None]:
        """Return, per partition, position and event of the first at or after ``timestamp_ms``, in the order of sending."""
        found: list[tuple[int, Event] | None] = [None] * self.partition_count
        position = [0] * self.partition_count
        for event, partition in zip(self.events, self.partition_of, strict=True):
            if partition < 0:
                continue
            if found[partition] is None and event.timestamp_ms >= timestamp_ms:
                found[partition] = (position[partition], event)
            position[partition] += 1
        return found
