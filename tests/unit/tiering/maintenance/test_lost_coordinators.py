"""A partition of an internal topic whose ledgers are gone is restored only if its log has not changed since."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from unit.tiering.maintenance.test_restoring_coordinators import TOPIC, TOPIC_ID, state, store

from stratalog_core.errors import Conflict
from stratalog_metadata.records import Ledger, LedgerRef, Log, Partition, Topic, log_key
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.format.object_keys import states_prefix
from stratalog_tiering.maintenance.lost_coordinators import LostPartition, read_state, restore_partition, seen_in

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported


async def lost_partition(cluster: Cluster) -> LostPartition:
    """Its log names a ledger that no bookie has, and the bucket has a state of it."""
    topic = Topic(name=TOPIC, topic_id=TOPIC_ID, partition_count=1, replication_factor=1, internal=True)
    ref = LedgerRef(ledger_id=900, base_offset=0, leader_epoch=1)
    ledger = Ledger(
        ledger_id=900, topic_id=TOPIC_ID, partition=0, write_quorum=1, ack_quorum=1, base_offset=0, leader_epoch=1, fragments=()
    )
    log, partition = Log(topic_id=TOPIC_ID, index=0, ledgers=(ref,)), Partition(topic_id=TOPIC_ID, index=0, leader_epoch=3)
    await cluster.metadata.propose(Command(updates=tuple(Put(record=each) for each in (topic, log, ledger, partition))))
    await cluster.until(lambda: cluster.metadata.view.get(log_key(TOPIC_ID, 0)) is not None)
    await store(cluster, state(0, 20))
    found = seen_in(cluster.metadata.view, topic, 0)
    assert found is not None
    return found


async def restore(cluster: Cluster, lost: LostPartition) -> None:
    found = await read_state(cluster.store, lost)
    await restore_partition(cluster.metadata, cluster.store, lost, found, 0, "cluster", 5000, lambda content: content)


async def states(cluster: Cluster) -> list[str]:
    return [info.key async for info in cluster.store.list(states_prefix(TOPIC, 0))]


async def test_it_begins_with_the_state_in_the_bucket(cluster: Cluster) -> None:
    await restore(cluster, await lost_partition(cluster))
    (stored,) = await cluster.metadata.read([log_key(TOPIC_ID, 0)])
    assert (stored.record.ledgers, stored.record.log_start_offset) == ((), 20)
    assert stored.record.restored_from in await states(cluster)
    assert len(await states(cluster)) == 2


async def test_if_an_owner_was_faster_no_state_stays_that_would_count_as_the_newest(cluster: Cluster) -> None:
    """A later restore took the state of the command that had failed for newer than all that the owner stored."""
    lost = await lost_partition(cluster)
    before = await states(cluster)
    opened = replace(lost.log, ledgers=(*lost.log.ledgers, LedgerRef(ledger_id=901, base_offset=25, leader_epoch=3)))
    await cluster.metadata.propose(Command(updates=(Put(record=opened),)))
    with pytest.raises(Conflict, match="has changed since it was found lost: repeat the command"):
        await restore(cluster, lost)
    assert await states(cluster) == before


async def test_a_repetition_of_a_command_that_took_effect_changes_nothing(cluster: Cluster) -> None:
    """Its answer was lost, and the owner has changed the log since; the state is still needed."""
    lost = await lost_partition(cluster)
    propose, proposed = cluster.metadata.propose, 0

    async def proposing(command: Command, *others: Any, **named: Any) -> Any:
        nonlocal proposed
        proposed += 1
        answer = await propose(command, *others, **named)
        if proposed == 1:
            (found,) = await cluster.metadata.read([log_key(TOPIC_ID, 0)])
            ref = LedgerRef(ledger_id=901, base_offset=20, leader_epoch=4)
            await propose(Command(updates=(Put(record=replace(found.record, ledgers=(ref,))),)))
            raise Conflict("the answer was lost, and the log has changed")
        return answer

    cluster.metadata.propose = proposing
    await restore(cluster, lost)
    (stored,) = await cluster.metadata.read([log_key(TOPIC_ID, 0)])
    assert [ref.ledger_id for ref in stored.record.ledgers] == [901]
    assert stored.record.restored_from in await states(cluster)
