"""Replicated state machines in internal topics: how groups (and later transactions) survive a broker.

An application keeps its state in memory and changes it only by batches of its partition: it appends a batch
(``Partitions.append_internal``), and every batch that the quorum has is handed to :meth:`apply` in offset order, on the
broker that appended it just as on one that replays it. ``append_internal`` returns after ``apply``. Each ledger begins with
a checkpoint that carries :meth:`snapshot`. Replay begins at the newest complete one; older ledgers are dropped once it is
durable (``ledger_trimming.py``). Thus a group's failover is its partition's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from stratalog_core.ports import Buffer

CONSUMER_OFFSETS: Final = "__consumer_offsets"
INTERNAL_TOPICS: Final = frozenset({CONSUMER_OFFSETS, "__transaction_state", "__share_group_state", "__cluster_metadata"})
"""Kafka's own; no client creates them."""


class InternalTopicApplication(Protocol):
    """The state machine of one partition while this broker owns it. All calls come from the event loop and do not block."""

    def load(self, state: bytes | None, batches: Iterable[Buffer]) -> None:
        """Begin: the last snapshot (None: there is none) and the batches after it. Called once, before anything else."""
        ...

    def apply(self, batch: Buffer) -> None:
        """One more batch is acknowledged by the quorum; its base offset is set in its header."""
        ...

    def snapshot(self) -> bytes:
        """State after all applied batches, for the checkpoint of a new ledger."""
        ...

    def resigned(self) -> None:
        """The partition is no longer ours: forget the state, answer those who wait NOT_COORDINATOR, stop all timers."""
        ...


ApplicationFactory = Callable[[int], InternalTopicApplication]
"""Makes the application of one partition, given the partition's index."""
