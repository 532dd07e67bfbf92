"""Replicated state machines in internal topics, by which groups and transactions survive the loss of a broker.

An application keeps its state in memory and changes it only through batches of its partition: it appends a batch
(``Partitions.append_internal``), and every batch acknowledged by the quorum is passed to :meth:`apply` in offset order, on the
broker that appended it and on any broker that replays it. ``append_internal`` returns after ``apply``. Each ledger begins with
a checkpoint that contains :meth:`snapshot`. Replay begins at the newest complete checkpoint; older ledgers are dropped once it
is durable (``ledger_trimming.py``). A group therefore fails over together with its partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Final, Protocol

from stratalog_core.errors import Fenced
from stratalog_core.ports import Buffer
from stratalog_metadata.records import Partition, TopicPartition

CONSUMER_OFFSETS: Final = "__consumer_offsets"
TRANSACTION_STATE: Final = "__transaction_state"
INTERNAL_TOPICS: Final = frozenset({CONSUMER_OFFSETS, TRANSACTION_STATE, "__share_group_state", "__cluster_metadata"})
"""Kafka's internal topics; clients cannot create them."""
COPIES_SETTINGS: Final = {
    CONSUMER_OFFSETS: "offsets_topic_replication_factor",
    TRANSACTION_STATE: "transaction_state_log_replication_factor",
}
"""The setting for the number of copies of an internal topic that a broker creates."""


class InternalTopicApplication(Protocol):
    """The state machine of one partition while this broker owns it. All calls come from the event loop and do not block."""

    async def load(self, state: bytes | None, batches: AsyncIterable[Buffer], leader_epoch: int) -> None:
        """Load the last snapshot (None if there is none) and the batches after it. Called once, before any other method.

        ``leader_epoch`` is that of this ownership of the partition. Must let the event loop run between batches: a log may take
        seconds to replay, and a broker whose event loop is blocked that long loses its session. ``resigned`` may follow at
        any of these points. ``batches`` raises ``Fenced`` once the partition is lost, and what reading raises.
        """
        ...

    def apply(self, batch: Buffer) -> None:
        """Apply a batch that the quorum has acknowledged; its base offset is set in its header."""
        ...

    def snapshot(self) -> bytes:
        """Return the state after all applied batches, for the checkpoint of a new ledger."""
        ...

    def resigned(self) -> None:
        """Drop the state, answer pending requests with NOT_COORDINATOR and stop all timers: this broker lost the partition.

        May be called again.
        """
        ...


ApplicationFactory = Callable[[int], InternalTopicApplication]
"""Creates the application of the partition with the given index."""


class Applications:
    """The applications of the internal topics. Loads one partition at a time, so that a turn of the event loop stays short."""

    def __init__(self) -> None:
        self._factories: dict[str, ApplicationFactory] = {}
        self._loading = asyncio.Lock()

    def register(self, topic: str, factory: ApplicationFactory) -> None:
        self._factories[topic] = factory

    def __contains__(self, topic: str) -> bool:
        return topic in self._factories

    async def load(
        self,
        topic: str,
        partition: Partition,
        state: bytes | None,
        batches: AsyncIterable[Buffer],
        is_due: Callable[[], bool],
    ) -> InternalTopicApplication | None:
        """Return the loaded application of a partition; None if its topic has none.

        ``is_due`` returns whether this broker still has to take over the partition: it may be lost while the event loop runs.
        Raises ``Fenced`` if so, and what reading the batches raises. An application that is not returned has resigned.
        """
        factory = self._factories.get(topic)
        if factory is None:
            return None
        async with self._loading:
            _require_due(is_due)
            application = factory(partition.index)
            with or_resigned(application):
                async with aclosing(_while_due(batches, is_due)) as due:
                    await application.load(state, due, partition.leader_epoch)
                _require_due(is_due)
        return application


@contextmanager
def or_resigned(application: InternalTopicApplication | None) -> Iterator[None]:
    """Let an application that is not served in the end resign; the next takeover makes another one.

    It would go on beside that one, whose log takes the batches of both.
    """
    try:
        yield
    except BaseException:
        if application is not None:
            application.resigned()
        raise


async def no_batches() -> AsyncIterator[Buffer]:
    """Yield nothing: what an application replays whose snapshot is its whole state."""
    nothing: tuple[Buffer, ...] = ()
    for batch in nothing:
        yield batch


async def _while_due(batches: AsyncIterable[Buffer], is_due: Callable[[], bool]) -> AsyncGenerator[Buffer, None]:
    async for batch in batches:
        _require_due(is_due)
        yield batch


def _require_due(is_due: Callable[[], bool]) -> None:
    if not is_due():
        raise Fenced("the partition was lost before its application was loaded")


class InternalPartitions(Protocol):
    """The log of the partitions of internal topics, as coordinators use it."""

    def register_application(self, topic: str, factory: ApplicationFactory) -> None:
        """Set the state machine of an internal topic's partitions. Call before the broker starts."""
        ...

    @property
    def is_suspended(self) -> bool:
        """Whether this broker has no session: others may own its partitions, whatever its view says."""
        ...

    def is_serving(self, topic_partition: TopicPartition) -> bool:
        """Whether the partition's state machine is loaded and its log accepts batches."""
        ...

    def append_internal(self, topic_partition: TopicPartition, batch: bytearray) -> Awaitable[int]:
        """Append one batch before returning; the result is its base offset, once it is durable and applied.

        Call and result raise ``NotLeader``, ``Overloaded``, ``Unavailable``, ``OutcomeUnknown``.
        """
        ...
