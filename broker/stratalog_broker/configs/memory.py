"""How a broker divides its one memory budget, and when memory is worth returning to the system. Pure.

Every queue and cache of a broker has a share of ``memory_bytes`` and charges real sizes: objects and receive buffers included
(``stratalog_core.memory.retained``). Interpreter, modules and metadata records come on top: a broker has them at its start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from stratalog_broker.configs.settings import BrokerSettings

_PARTS: Final = 64
REQUEST_BYTES: Final = 2048
"""Objects of one request beyond its frame, from its receipt to its answer."""
DECODED_FACTOR: Final = 8
"""A decoded request takes so many times its frame, less ``DECODED_BYTES_MAX``. Produce requests are not decoded."""
DECODED_BYTES_MAX: Final = 32 * 1024 * 1024
"""What the 100,000 elements that a request may have take as objects."""
PARTITION_BYTES: Final = 12 * 1024
"""An owned partition with its producers and an open ledger, before its batches."""
SESSION_PARTITION_BYTES: Final = 400
"""One partition of a fetch session."""
_PEAK_PARTS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShares:
    """Bytes of ``memory_bytes`` for each purpose."""

    requests: int
    """Requests that are read, handled, waiting or being replicated."""
    tail: int
    """Batches just written, and the owned partitions themselves."""
    reads: int
    """Reads from bookies and object store: under way, and not served yet."""
    responses: int
    """Responses that clients have not taken, and what waiting fetches have found."""
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
        """What ``partitions`` that are owned leave to the tail cache; at least an eighth of its share."""
        return max(self.tail - partitions * PARTITION_BYTES, self.tail // 8)


def within_memory(settings: BrokerSettings) -> BrokerSettings:
    """``settings`` with the limits of one request and one response lowered to what ``memory_bytes`` has for all of them."""
    shares = MemoryShares.of(settings.memory_bytes)
    return replace(
        settings,
        frame_bytes_max=min(settings.frame_bytes_max, shares.requests),
        response_bytes_max=min(settings.response_bytes_max, shares.responses),
    )


class Peaks:
    """Tells when so much memory has become free that the allocator should return it."""

    def __init__(self, memory_bytes: int) -> None:
        self._step = memory_bytes // _PEAK_PARTS
        self._peak = 0

    def has_ended(self, held: int) -> bool:
        """Whether ``held`` is an eighth of the budget below the highest value since this was last so."""
        self._peak = max(self._peak, held)
        if self._peak - held < self._step:
            return False
        self._peak = held
        return True
