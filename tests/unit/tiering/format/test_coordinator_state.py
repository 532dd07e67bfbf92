"""The object with a coordinator's state: its key orders it, and it is refused where it does not belong."""

from __future__ import annotations

from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.batches.checkpoint import Checkpoint
from stratalog_core.errors import Corrupt, Invalid
from stratalog_tiering.format.coordinator_state import CoordinatorState, decode_state, encode_state
from stratalog_tiering.format.object_keys import StateKey, parse_state_key, state_key, states_prefix

TOPIC = "__consumer_offsets"
_PLACES = st.builds(
    StateKey, st.just(TOPIC), st.just(7), st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1)
)


def state(**changes: object) -> CoordinatorState:
    made = CoordinatorState(
        cluster_id="AAAAAAAAAAAAAAAAAAAAAA", owner_number=2, topic=TOPIC, topic_id=UUID(int=7), partition=7, partition_count=50,
        replication_factor=3, configs={"cleanup.policy": "compact"}, leader_epoch=4, taken_at_ms=1_700_000_000_000,
        checkpoint=Checkpoint(offset=120, application_state=b"state"),
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


@given(st.lists(_PLACES, min_size=1, max_size=5))
def test_a_listing_begins_with_the_newest(places: list[StateKey]) -> None:
    keys = sorted(state_key(place) for place in places)
    assert [parse_state_key(key) for key in keys] == sorted(places, reverse=True)
    assert all(key.startswith(states_prefix(TOPIC, 7)) for key in keys)


def test_a_key_with_numbers_that_contradict_its_order_is_none() -> None:
    key = state_key(StateKey(TOPIC, 7, 2, 4, 120))
    assert parse_state_key(key.replace("-120.", "-121.")) is None
    assert parse_state_key(key.replace("coordinators", "segments")) is None


def test_a_state_is_read_back_and_only_at_its_place() -> None:
    content = encode_state(state())
    assert decode_state(content, state().place) == state()
    for other in (state().place._replace(partition=8), state().place._replace(offset=121)):
        with pytest.raises(Corrupt, match="has the content of"):
            decode_state(content, other)


def test_damage_and_unknown_flags_are_refused() -> None:
    content = bytearray(encode_state(state()))
    content[-1] ^= 1
    with pytest.raises(Corrupt, match="CRC"):
        decode_state(content, state().place)
    flagged = bytearray(encode_state(state()))
    flagged[11] = 1
    with pytest.raises(Invalid, match="upgrade"):
        decode_state(flagged, state().place)
