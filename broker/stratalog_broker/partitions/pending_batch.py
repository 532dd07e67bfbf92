"""A batch that has an offset and is not confirmed yet, with the callbacks that wait for its outcome."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Final

from stratalog_core.batches.batch import BatchHeader
from stratalog_core.errors import NotEnoughBookies, NotLeader, OutcomeUnknown, StratalogError, Unavailable
from stratalog_core.partition_state.producer_states import Displaced

Outcome = int | StratalogError
"""A batch's base offset, or the error with which it was given up: ``OutcomeUnknown`` if it was sent, else another."""
OnDone = Callable[[Outcome], None]
"""Called once per batch, when it has the copies that its producer asked for or is given up."""


class Acks(IntEnum):
    """The acknowledgement that a producer waits for."""

    NONE = 0
    FIRST = 1
    ALL = -1


ACKS_NONE: Final = Acks.NONE
ACKS_FIRST: Final = Acks.FIRST
"""Globals for the hot path: before Python 3.12, looking up an enum member costs many times as much."""


class PendingBatch:
    """See the module's header. ``others`` are callbacks of the producer's retries."""

    __slots__ = (
        "acks",
        "base_offset",
        "batch",
        "displaced",
        "end_offset",
        "entry_id",
        "max_timestamp_ms",
        "on_confirmed",
        "on_done",
        "others",
        "producer_id",
    )

    def __init__(
        self,
        batch: memoryview,
        header: BatchHeader,
        base_offset: int,
        acks: int,
        on_done: OnDone | None,
        on_confirmed: Callable[[], None] | None,
    ) -> None:
        self.batch = batch
        self.base_offset = base_offset
        self.end_offset = base_offset + header.last_offset_delta + 1
        self.max_timestamp_ms = header.max_timestamp_ms
        self.acks = acks
        self.entry_id = -1
        self.on_done = on_done
        self.on_confirmed = on_confirmed
        self.others: list[OnDone] | None = None
        self.producer_id = header.producer_id
        self.displaced: Displaced = None

    def settle(self, outcome: Outcome) -> None:
        """Report the outcome to the producer and its retries."""
        if self.on_done is not None:
            on_done, self.on_done = self.on_done, None
            on_done(outcome)
        if self.others is not None:
            for other in self.others:
                other(outcome)
        if self.on_confirmed is not None:
            self.on_confirmed()

    def give_up(self, reason: Exception | None) -> None:
        """Report ``reason`` if it is an error that the producer can act on, else ``NotLeader``."""
        answers = OutcomeUnknown if self.entry_id >= 0 else (NotEnoughBookies, Unavailable)
        self.settle(reason if isinstance(reason, answers) else NotLeader("the partition was lost or moved"))
