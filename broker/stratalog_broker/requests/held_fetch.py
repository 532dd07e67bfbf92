"""A fetch of history that waits for its turn while history is held back for producers; see ``reads/replay_pace.py``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.protocol.fetch_request import FetchWanted
from stratalog_broker.reads.pending_reads import PendingReads
from stratalog_broker.reads.replay_pace import HELD_BYTES, ReplayPace


class Startable(Protocol):
    """A fetch that has not been started."""

    def start_late(self, bytes_max: int) -> None: ...

    def cancel(self) -> None: ...


class HeldFetch:
    """Nothing is read or kept for the fetch until its turn comes. A ``Waiting``, as the fetch itself is then."""

    def __init__(self, fetch: Startable, pace: ReplayPace) -> None:
        self._fetch = fetch
        self._pace = pace
        pace.wait(self._on_turn)

    def _on_turn(self) -> None:
        self._fetch.start_late(HELD_BYTES)

    def cancel(self) -> None:
        """See ``Waiting``."""
        self._pace.leave(self._on_turn)
        self._fetch.cancel()


def wants_history_only(
    places: Iterable[tuple[FetchWanted, PartitionLog | None]], pending_reads: PendingReads, *, is_near: bool
) -> bool:
    """Return whether some partitions have to be read from the object store, and none has newer records ready.

    ``is_near``: the client may read partitions of other brokers here, which are history.
    """
    is_history = False
    for one, log in places:
        if log is None:
            is_history = is_history or is_near
        elif log.core.high_watermark > one.offset:
            if log.tail.start_offset <= one.offset:
                return False
            is_history = is_history or pending_reads.is_cold(log, one.offset)
    return is_history
