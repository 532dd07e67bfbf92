"""Drains and undrains a broker. The controller moves its partitions to others; the broker keeps running."""

from __future__ import annotations

from collections.abc import Callable

from stratalog_broker.admin.view_waiting import wait_until
from stratalog_core.errors import NotFound, Unavailable
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.records import Broker, DrainedBroker, Partition, broker_key, drained_broker_key
from stratalog_metadata.state.commands import Command, Delete, Put

OnProgress = Callable[[int], None]


async def drain(metadata: MetadataClient, broker_id: int) -> None:
    """Have the controller move all partitions from the broker. Raises ``NotFound``, or ``Unavailable`` without another one."""
    view = metadata.view
    if view.find(Broker, broker_key(broker_id)) is None and not owned(view, broker_id):
        raise NotFound(f"no broker {broker_id} is live: see `stratalog broker list`")
    drained = {each.broker_id for each in view.all(DrainedBroker)} | {broker_id}
    if all(broker.broker_id in drained or broker.stopping for broker in view.all(Broker)):
        raise Unavailable(f"no other broker can take the partitions of broker {broker_id}: start another one first")
    await metadata.propose(Command(updates=(Put(record=DrainedBroker(broker_id=broker_id)),)))


async def undrain(metadata: MetadataClient, broker_id: int) -> None:
    """Let the broker own partitions again. Raises ``NotFound`` if it is not drained."""
    key = drained_broker_key(broker_id)
    if metadata.view.find(DrainedBroker, key) is None:
        raise NotFound(f"broker {broker_id} is not drained: see `stratalog broker list`")
    await metadata.propose(Command(updates=(Delete(key=key),)))


def owned(view: MetadataView, broker_id: int) -> int:
    """Return how many partitions the broker owns."""
    return sum(partition.owner == broker_id for partition in view.all(Partition))


async def wait_until_drained(metadata: MetadataClient, broker_id: int, timeout_s: float, on_progress: OnProgress) -> None:
    """Return when the broker owns nothing. Raises ``Unavailable`` after the time-out."""

    def is_drained() -> bool:
        left = owned(metadata.view, broker_id)
        on_progress(left)
        return not left

    if not await wait_until(metadata.view, is_drained, timeout_s):
        raise Unavailable(
            f"broker {broker_id} still owns {owned(metadata.view, broker_id)} partitions after {timeout_s:.0f} s."
            " It continues to drain: repeat the command to wait"
        )
