"""Divides a broker's memory budget, and decides when to return freed memory to the system. Pure.

Every queue and cache of a broker has a share of ``memory_bytes`` and charges real sizes, objects and receive buffers included
(``stratalog_core.memory.retained``). The budget does not include interpreter, modules and metadata records, which are loaded at
the start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from stratalog_broker.configs.settings import BrokerSettings

_PARTS: Final = 64
REQUEST_BYTES: Final = 2048
"""Size of one request's objects, without its frame, from receipt to response."""
DECODED_FACTOR: Final = 8
"""Size of a decoded request as a multiple of its frame, up to ``DECODED_BYTES_MAX``. Produce requests are not decoded."""
DECODED_BYTES_MAX: Final = 32 * 1024 * 1024
"""Size as objects of the 100,000 elements that a request may have."""
PARTITION_BYTES: Final = 12 * 1024
"""Size of an owned partition with its producers and an open ledger, without batches."""
SESSION_PARTITION_BYTES: Final = 400
"""Size of one partition of a fetch session."""
_FREE_PARTS: Final = 8
_RELEASES_MAX: Final = 16
_CALLS_BETWEEN_MAX: Final = 12
"""A minute between the calls that ask for a release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShares:
    """Share of ``memory_bytes`` for each purpose, in bytes."""

    requests: int
    """Requests that are being read, handled or replicated, or are waiting."""
    tail: int
    """The tail cache, and the owned partitions themselves."""
    reads: int
    """Reads from bookies and object store, in progress or not served yet."""
    responses: int
    """Responses that clients have not received yet, and batches found by waiting fetches."""
    cold: int
    """Blocks, manifests and footers of segments."""
    indexes: int
    """Entry indexes of ledgers, open and sealed."""
    searches: int
    """Decompression for searches by time."""
    sessions: int
    """Incremental fetch sessions."""

    @classmethod
    def of(cls, memory_bytes: int) -> MemoryShares:
        part = memory_bytes // _PARTS
        return cls(
            requests=15 * part, tail=15 * part, reads=9 * part, responses=8 * part, cold=7 * part, indexes=4 * part,
            searches=4 * part, sessions=2 * part,
        )  # fmt: skip

    def tail_beside(self, partitions: int) -> int:
        """Return the bytes that ``partitions`` owned partitions leave to the tail cache; at least an eighth of its share."""
        return max(self.tail - partitions * PARTITION_BYTES, self.tail // 8)


def within_memory(settings: BrokerSettings) -> BrokerSettings:
    """Return ``settings`` with the limits of one request and of one response lowered to their shares of ``memory_bytes``."""
    shares = MemoryShares.of(settings.memory_bytes)
    return replace(
        settings,
        frame_bytes_max=min(settings.frame_bytes_max, shares.requests),
        response_bytes_max=min(settings.response_bytes_max, shares.responses),
    )


class FreeMemory:
    """Detects when the allocator keeps so much free memory that it should return it.

    Resident memory consists of held bytes, memory outside the budget, and free memory. Memory outside the budget changes
    slowly, so free memory is the growth of resident memory less held bytes above its minimum. A peak may begin and end between
    two calls, or before the first one; the free memory that it leaves is seen by the next call.

    A release during a load leaves what is in use then, and what the load frees at its end can only be returned by another one.
    So releases are repeated until one has helped, at growing intervals. After ``_RELEASES_MAX`` in vain the memory is taken to
    be in use.
    """

    def __init__(self, memory_bytes: int, resident: int) -> None:
        """``resident``: resident memory in bytes while nothing of the budget is held, as at a start."""
        self._step = memory_bytes // _FREE_PARTS
        self._least = resident
        self._in_vain = 0
        self._calls_to_skip = 0

    def should_return(self, resident: int, held: int) -> bool:
        """Whether an eighth of the budget is free and it is time for another release. To be called at equal intervals."""
        rest = resident - held
        if self._in_vain >= _RELEASES_MAX:
            self._least = rest
        self._least = min(self._least, rest)
        if rest - self._least < self._step:
            self._in_vain = self._calls_to_skip = 0
            return False
        if self._calls_to_skip > 0:
            self._calls_to_skip -= 1
            return False
        self._calls_to_skip = min(2**self._in_vain, _CALLS_BETWEEN_MAX) - 1
        self._in_vain += 1
        return True
