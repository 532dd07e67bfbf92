"""Replicated state machines in internal topics, by which groups (and later transactions) survive the loss of a broker.

An application keeps its state in memory and changes it only through batches of its partition: it appends a batch
(``Partitions.append_internal``), and every batch acknowledged by the quorum is passed to :meth:`apply` in offset order, on the
broker that appended it and on any broker that replays it. ``append_internal`` returns after ``apply``. Each ledger begins with
a checkpoint that contains :meth:`snapshot`. Replay begins at the newest complete checkpoint; older ledgers are dropped once it
is durable (``ledger_trimming.py``). A group therefore fails over together with its partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from stratalog_core.ports import Buffer

CONSUMER_OFFSETS: Final = "__consumer_offsets"
INTERNAL_TOPICS: Final = frozenset({CONSUMER_OFFSETS, "__transaction_state", "__share_group_state", "__cluster_metadata"})
"""Kafka's internal topics; clients cannot create them."""


class InternalTopicApplication(Protocol):
    """The state machine of one partition while this broker owns it. All calls come from the event loop and do not block."""

    def load(self, state: bytes | None, batches: Iterable[Buffer]) -> None:
        """Load the last snapshot (None if there is none) and the batches after it. Called once, before any other method."""
        ...

    def apply(self, batch: Buffer) -> None:
        """Apply a batch that the quorum has acknowledged; its base offset is set in its header."""
        ...

    def snapshot(self) -> bytes:
        """Return the state after all applied batches, for the checkpoint of a new ledger."""
        ...

    def resigned(self) -> None:
        """Drop the state, answer pending requests with NOT_COORDINATOR and stop all timers: this broker lost the partition."""
        ...


ApplicationFactory = Callable[[int], InternalTopicApplication]
"""Creates the application of the partition with the given index."""
