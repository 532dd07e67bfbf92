"""One partition of a coordinator's internal topic while this broker owns it: replay, checkpoints, the live application.

A kind of coordinator (groups and transactions; later share groups) supplies a state and an application. The frame does the
rest: it loads the state from snapshot and log, applies what the quorum confirms, puts the state into every checkpoint, and
gives the application a writer of records.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from stratalog_broker.coordination.record_writer import Append, RecordWriter
from stratalog_broker.coordination.replay import CoordinatorState, Replay
from stratalog_core.errors import NotLeader
from stratalog_core.ports import Buffer, Clock

_log = logging.getLogger(__name__)
REPLAYED_AT_ONCE_BYTES: Final = 64 * 1024
"""Bytes of batches replayed in one turn of the event loop: about 600 records, 3 ms."""


class CoordinatorApplication(Protocol):
    """Serves the requests of one kind from a loaded state. It changes the state only by records that it writes."""

    def resigned(self) -> None:
        """Answer pending requests with NOT_COORDINATOR and stop all timers: this broker lost the partition."""
        ...


StateType = TypeVar("StateType", bound=CoordinatorState)
ApplicationType = TypeVar("ApplicationType", bound=CoordinatorApplication)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorKind(Generic[StateType, ApplicationType]):
    """A kind of coordinator: its key type in FindCoordinator, its topic, its state and its application.

    ``partition_count`` and ``copies`` are those of the topic when it is created.
    """

    key_type: int
    topic: str
    partition_count: int
    copies: int
    load: Callable[[bytes | None], StateType]
    """Returns the state of a snapshot, the empty state for None. Raises ``Corrupt``."""
    start: Callable[[StateType, RecordWriter, int], ApplicationType]
    """Returns the application over a state that has been replayed to the end of the log, in this leader epoch."""


class CoordinatorPartition(Generic[StateType, ApplicationType]):
    """The ``InternalTopicApplication`` of any kind of coordinator. ``name`` is the partition's in log messages."""

    def __init__(self, kind: CoordinatorKind[StateType, ApplicationType], append: Append, clock: Clock, name: str) -> None:
        self._kind = kind
        self._name = name
        self._append = append
        self._writer = RecordWriter(self._append_owned, clock)
        self._state = kind.load(None)
        self._replay = Replay(self._state)
        self.application: ApplicationType | None = None
        """None until the state is loaded, and after this broker has lost the partition."""

    @property
    def unreadable_records(self) -> int:
        """Number of records of the partition that were skipped, in replay or after it."""
        return self._replay.unreadable

    def _append_owned(self, batch: bytearray) -> Awaitable[int]:
        """Append a batch, unless this coordinator was lost after the batch was queued: a new one may own the log already."""
        if self.application is None:
            raise NotLeader(f"{self._name} was lost before the batch was appended")
        return self._append(batch)

    # -- InternalTopicApplication

    async def load(self, state: bytes | None, batches: AsyncIterable[Buffer], leader_epoch: int) -> None:
        self._state = self._kind.load(state)
        self._replay = Replay(self._state)
        replayed_bytes = 0
        async for batch in batches:
            if replayed_bytes >= REPLAYED_AT_ONCE_BYTES:
                replayed_bytes = 0
                await asyncio.sleep(0)
            self._replay.apply(batch)
            replayed_bytes += len(batch)
        if self._replay.unreadable:
            skipped, first = self._replay.unreadable, self._replay.first_unreadable
            _log.error("replay of %s skipped %d records that it cannot read; %s", self._name, skipped, first)
        self.application = self._kind.start(self._state, self._writer, leader_epoch)

    def apply(self, batch: Buffer) -> None:
        self._replay.apply(batch)

    def snapshot(self) -> bytes:
        assert self.application is not None, "a lost partition has no state to store"
        return self._state.snapshot()

    def resigned(self) -> None:
        application, self.application = self.application, None
        # This object is kept until the partition returns. Its state may be large.
        self._state = self._kind.load(None)
        self._replay = Replay(self._state)
        if application is not None:
            application.resigned()
