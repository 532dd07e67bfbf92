"""The map of a compaction: the newest offset of each key, in a table of fixed-size entries. No I/O.

A key is known by its SipHash-2-4 of 128 bits under a secret that each pass draws anew and nobody sees. Two different keys have
the same hash with a probability of 2^-128, whoever chose them: with a billion keys, less than one pass in 10^20 would lose a
record. Apache Kafka's map uses MD5, without a secret.

The table is an array with linear probing, at most three quarters full. It grows by four until it has room for ``keys_max``, so
that a small topic's map stays in the processor's caches.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

from stratalog_core.batches.record_kernels import END, KEY_AT, KEY_BYTES, OFFSET_AT, OFFSET_DELTA
from stratalog_core.batches.record_spans import RecordSpans
from stratalog_core.compiled.jit import Bools, Bytes, Int, Ints64, Words, compiled, inlined
from stratalog_core.compiled.siphash import Word, sip_64, sip_128
from stratalog_core.ports import Buffer

_SLOTS_MIN: Final = 1024
_GROWTH: Final = 4
_SECRET_BYTES: Final = 16


@inlined
def _slot(slots: Words, low: Word, high: Word) -> Int:
    """Where a key is, or the empty slot where it belongs. A slot holds the hash, and the offset plus one; 0: it is empty."""
    size = np.uint64(len(slots))
    at = np.int64(((high >> np.uint64(32)) * size) >> np.uint64(32))
    while slots[at, 2] != 0 and (slots[at, 0] != low or slots[at, 1] != high):
        at = at + 1 if at + 1 < len(slots) else np.int64(0)
    return at


@compiled
def _put(
    body: Bytes, rows: Ints64, first: Int, base_offset: Int, dirty_from: Int, secret: Words, slots: Words, room: Ints64
) -> Int:
    """Note the records from row ``first`` on; returns the row of the first that needs more ``room``, else their number."""
    for row in range(first, len(rows)):
        offset = base_offset + rows[row, OFFSET_DELTA]
        if rows[row, KEY_BYTES] < 0 or offset < dirty_from:
            continue
        low, high = sip_128(body, rows[row, KEY_AT], rows[row, KEY_BYTES], secret[0], secret[1])
        at = _slot(slots, low, high)
        if slots[at, 2] == 0:
            if room[0] <= 0:
                return np.int64(row)
            room[0] -= 1
            slots[at, 0], slots[at, 1] = low, high
        slots[at, 2] = np.uint64(offset + 1)
    return np.int64(len(rows))


@compiled
def _find(body: Bytes, rows: Ints64, secret: Words, slots: Words, found: Ints64) -> None:
    for row in range(min(len(rows), len(found))):
        found[row] = -1
        if rows[row, KEY_BYTES] >= 0:
            low, high = sip_128(body, rows[row, KEY_AT], rows[row, KEY_BYTES], secret[0], secret[1])
            found[row] = np.int64(slots[_slot(slots, low, high), 2]) - 1


@compiled
def _move(slots: Words, larger: Words) -> None:
    for at in range(len(slots)):
        if slots[at, 2] != 0:
            to = _slot(larger, slots[at, 0], slots[at, 1])
            for place in range(3):
                larger[to, place] = slots[at, place]


@compiled
def _fingerprint(body: Bytes, rows: Ints64, counted: Bools, base_offset: Int, secret: Words) -> Word:
    total = np.uint64(0)
    for row in range(min(len(rows), len(counted))):
        if counted[row]:
            at = rows[row, OFFSET_AT]
            total += sip_64(body, at, rows[row, END] - at, secret[0] ^ np.uint64(base_offset), secret[1])
    return total


class OffsetMap:
    """The newest offset of each key, for at most ``keys_max`` keys. ``secret`` makes hashes that nobody can collide."""

    def __init__(self, keys_max: int, secret: bytes) -> None:
        self._secret = np.frombuffer(hashlib.blake2b(secret, digest_size=_SECRET_BYTES).digest(), np.uint64)
        self._keys_max = keys_max
        self._slots_max = keys_max * 4 // 3 + 1
        self._slots = np.zeros((min(_SLOTS_MIN, self._slots_max), 3), np.uint64)
        self._room = np.array([self._keys_now()], np.int64)

    def __len__(self) -> int:
        return self._keys_now() - int(self._room[0])

    def put(self, spans: RecordSpans, base_offset: int, dirty_from: int) -> int:
        """Note the records with a key from ``dirty_from`` on; offsets must rise from call to call.

        Returns the number of records that were noted or passed over: less than all if the next one's key is new and the map
        is full.
        """
        done = 0
        while True:
            done = int(_put(spans.content, spans.rows, done, base_offset, dirty_from, self._secret, self._slots, self._room))
            if done == len(spans) or len(self._slots) == self._slots_max:
                return done
            self._grow()

    def newest(self, spans: RecordSpans) -> Ints64:
        """The newest offset of each record's key; -1 if the map does not have it, or the record has no key."""
        found = np.empty(len(spans), np.int64)
        _find(spans.content, spans.rows, self._secret, self._slots, found)
        return found

    def fingerprint(self, spans: RecordSpans, counted: Bools, base_offset: int) -> int:
        """Sum of hashes of the counted records: of everything but their timestamps, whose deltas change with a delete horizon.

        Two of them can be compared if they were made by one map.
        """
        return int(_fingerprint(spans.content, spans.rows, counted, base_offset, self._secret))

    def fingerprint_of(self, batch: Buffer) -> int:
        """Hash of a whole batch whose records are not known, for such a sum."""
        digest = hashlib.blake2b(batch, digest_size=8, key=self._secret.tobytes()).digest()
        return int.from_bytes(digest, "big")

    def _keys_now(self) -> int:
        """The keys that the table may hold at its size."""
        return self._keys_max if len(self._slots) == self._slots_max else len(self._slots) * 3 // 4

    def _grow(self) -> None:
        held = len(self)
        larger = np.zeros((min(len(self._slots) * _GROWTH, self._slots_max), 3), np.uint64)
        _move(self._slots, larger)
        self._slots = larger
        self._room[0] = self._keys_now() - held
