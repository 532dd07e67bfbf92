"""``tier detach`` detaches the topic that it was started for, and no other one of its name, with all of its partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import UUID

import msgspec
import pytest
from support.embedded_quorum import EmbeddedQuorum

from stratalog.tier.attaching import detach
from stratalog_core.errors import NotFound, OutcomeUnknown
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import Log, TierRequest, Topic
from stratalog_metadata.state.commands import Applied, Command, Delete, Put
from stratalog_tiering.format.descriptor import OwnerDescriptor, encode_descriptor
from stratalog_tiering.format.object_keys import owner_key
from stratalog_tiering.offload.ownership import cluster_id_in

FIRST, AGAIN = (Topic(name="flights", topic_id=UUID(int=number), partition_count=1, replication_factor=1) for number in (1, 2))


def creation(topic: Topic) -> Command:
    return Command(updates=(Put(record=topic), Put(record=Log(topic_id=topic.topic_id, index=0))))


def claim_bucket(bucket: Path, quorum: EmbeddedQuorum) -> None:
    claim = bucket / owner_key(0)
    claim.parent.mkdir(parents=True)
    claim.write_bytes(encode_descriptor(OwnerDescriptor(cluster_id=cluster_id_in(quorum.client), number=0, taken_at_ms=0)))


async def fulfil_requests(metadata: QuorumClient, on_fulfilled: Callable[[TierRequest], Awaitable[None]] | None = None) -> None:
    """As a worker does: nothing is hot. ``on_fulfilled`` is awaited before a request goes."""
    changed = asyncio.Event()
    stop = metadata.view.subscribe(lambda changes: changed.set())
    try:
        while True:
            changed.clear()
            for request in [*metadata.view.all(TierRequest)]:
                if on_fulfilled is not None:
                    await on_fulfilled(request)
                await metadata.propose(Command(updates=(Delete(key=request.key()),)))
            await changed.wait()
    finally:
        stop()


async def test_a_lost_answer_to_a_detachment_does_not_detach_the_next_topic_of_the_name(
    quorum: EmbeddedQuorum, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose = QuorumClient.propose
    claim_bucket(tmp_path / "store", quorum)
    await quorum.client.propose(creation(FIRST))

    async def propose_and_create(self: QuorumClient, command: Command, timeout_s: float = 10.0) -> Applied:
        applied = await propose(self, command, timeout_s)
        if Delete(key=FIRST.key()) in command.updates and quorum.client.view.find(Topic, FIRST.key()) != AGAIN:
            await quorum.client.propose(creation(AGAIN))
            raise OutcomeUnknown("the answer was lost")
        return applied

    monkeypatch.setattr(QuorumClient, "propose", propose_and_create)
    worker = asyncio.create_task(fulfil_requests(quorum.client))
    with pytest.raises(NotFound, match="created again: the new one stays"):
        await detach(quorum.addresses, str(tmp_path / "store"), "flights", 30)
    worker.cancel()
    assert [*quorum.client.view.all(Topic)] == [AGAIN]


async def test_partitions_that_are_added_during_the_offload_are_offloaded_and_detached_too(
    quorum: EmbeddedQuorum, tmp_path: Path
) -> None:
    claim_bucket(tmp_path / "store", quorum)
    await quorum.client.propose(creation(FIRST))
    fulfilled = []

    async def grow(request: TierRequest) -> None:
        fulfilled.append(request.index)
        if len(fulfilled) == 1:
            grown, added = msgspec.structs.replace(FIRST, partition_count=2), Log(topic_id=FIRST.topic_id, index=1)
            await quorum.client.propose(Command(updates=(Put(record=grown), Put(record=added))))

    worker = asyncio.create_task(fulfil_requests(quorum.client, grow))
    await detach(quorum.addresses, str(tmp_path / "store"), "flights", 30)
    worker.cancel()
    assert set(fulfilled) == {0, 1}
    assert [*quorum.client.view.all(Topic)] == []
    assert [*quorum.client.view.all(Log)] == []
