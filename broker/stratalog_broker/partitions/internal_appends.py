"""Appends one batch that no client has sent, for example to an internal topic."""

from __future__ import annotations

import asyncio

from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.pending_batch import Acks, Outcome
from stratalog_core.batches.batch import read_header
from stratalog_core.errors import NotLeader


def append_now(log: PartitionLog, batch: bytearray) -> asyncio.Future[int]:
    """Append one batch and return the future of its base offset, which is set when the quorum has it.

    Raises ``Overloaded``, ``NotEnoughBookies`` or ``NotLeader``; the future raises ``NotLeader``, too.
    """
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def settle(outcome: Outcome) -> None:
        if done.done():
            return
        if isinstance(outcome, int):
            done.set_result(outcome)
        else:
            done.set_exception(NotLeader(f"{log.topic_partition} was lost while the batch was being written"))

    log.append(memoryview(batch), read_header(batch), Acks.ALL, settle)
    return done
