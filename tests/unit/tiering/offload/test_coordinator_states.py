"""States of coordinators in the bucket: what is kept, what is deleted, and who may write."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
import pytest

from stratalog_core.batches.checkpoint import Checkpoint
from stratalog_core.errors import Invalid, OutcomeUnknown
from stratalog_core.system import SystemClock
from stratalog_metadata.records import CLUSTER_KEY
from stratalog_tiering.format.coordinator_state import CoordinatorState, decode_state
from stratalog_tiering.format.object_keys import StateKey, state_key
from stratalog_tiering.offload.coordinator_states import CoordinatorStates
from stratalog_tiering.offload.ownership import claim_bucket, cluster_id_in, take_over

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
TOPIC = "__consumer_offsets"


def state(offset: int, epoch: int = 1, owner: int = 0, content: bytes = b"state") -> CoordinatorState:
    return CoordinatorState(
        cluster_id="cluster", owner_number=owner, topic=TOPIC, topic_id=UUID(int=7), partition=3, partition_count=50,
        replication_factor=1, leader_epoch=epoch, taken_at_ms=offset,
        checkpoint=Checkpoint(offset=offset, application_state=content),
    )  # fmt: skip


async def new_states(cluster: Cluster) -> CoordinatorStates:
    await cluster.until(lambda: cluster.metadata.view.get(CLUSTER_KEY) is not None)
    return CoordinatorStates(cluster.store, cluster.metadata, SystemClock())


async def claimed(cluster: Cluster) -> CoordinatorStates:
    states = await new_states(cluster)
    await claim_bucket(cluster.store, cluster_id_in(cluster.metadata), SystemClock().wall_ms())
    return states


async def test_the_two_newest_states_are_kept(cluster: Cluster) -> None:
    states = await claimed(cluster)
    places: list[StateKey] = []
    for offset in (10, 20, 30, 40):
        places = await states.put(state(offset), places)
    assert [place.offset for place in places] == [40, 30]
    assert await states.stored(TOPIC, 3) == places
    newest = places[0]
    assert decode_state(await cluster.store.get(state_key(newest)), newest) == state(40)


async def test_an_owner_that_was_replaced_hides_nothing(cluster: Cluster) -> None:
    """Its late state may be of a greater offset only if the log was cut, as after a restore of metadata."""
    states = await claimed(cluster)
    stale = await states.put(state(10, epoch=1), [])
    await states.put(state(25, epoch=2), [])
    stale = await states.put(state(20, epoch=1), stale)
    await states.put(state(30, epoch=1), stale)
    newest, *_ = await states.stored(TOPIC, 3)
    assert (newest.leader_epoch, newest.offset) == (2, 25)


async def test_an_unknown_outcome_deletes_nothing_and_is_repeated(cluster: Cluster) -> None:
    states = await claimed(cluster)
    places = await states.put(state(20), await states.put(state(10), []))
    cluster.store.after = lambda name, key: OutcomeUnknown("no answer") if name == "put" else None
    with pytest.raises(OutcomeUnknown):
        await states.put(state(30), places)
    cluster.store.after = lambda name, key: None
    assert cluster.store.count("delete") == 0
    assert [place.offset for place in await states.stored(TOPIC, 3)] == [30, 20, 10]
    assert [place.offset for place in await states.put(state(30), places)] == [30, 20]


async def test_a_bucket_that_nobody_or_another_cluster_owns_gets_nothing(cluster: Cluster) -> None:
    states = await new_states(cluster)
    with pytest.raises(Invalid, match="belongs to no cluster"):
        await states.put(state(10), [])
    await claim_bucket(cluster.store, cluster_id_in(cluster.metadata), SystemClock().wall_ms())
    await states.put(state(10), [])
    await take_over(cluster.store, "another", SystemClock().wall_ms())
    with pytest.raises(Invalid, match="belongs to cluster another"):
        await states.put(state(20), [])
    assert [place.offset for place in await states.stored(TOPIC, 3)] == [10]


async def test_states_of_earlier_owners_stay_for_a_week_after_a_restore(cluster: Cluster) -> None:
    states = await new_states(cluster)
    await claim_bucket(cluster.store, "another", SystemClock().wall_ms())
    for offset in (10, 20, 30):
        made = msgspec.structs.replace(state(offset), cluster_id="another")
        await cluster.store.put(state_key(made.place), [b"theirs"])
    await take_over(cluster.store, cluster_id_in(cluster.metadata), SystemClock().wall_ms())
    places = await states.stored(TOPIC, 3)
    for offset in (30, 31, 32):
        places = await states.put(state(offset, owner=1), places)
    assert [(place.owner_number, place.offset) for place in places] == [(1, 32), (1, 31), (0, 30), (0, 20), (0, 10)]
