"""The encoding of classic members' subscriptions and assignments, checked against kafka-python's own."""

from __future__ import annotations

import pytest
from kafka.coordinator.assignors.range import RangePartitionAssignor
from unit.broker.coordination.groups.mixed_members import subscription

from stratalog_broker.coordination.groups.core.consumer.embedded_protocol import (
    decode_assignment,
    decode_subscription,
    encode_assignment,
)
from stratalog_core.errors import Corrupt


def test_a_subscription_of_kafka_python_is_read() -> None:
    assignor = RangePartitionAssignor
    content = assignor.metadata({"flights", "trains"}).encode()
    found = decode_subscription(content)
    assert (sorted(found.topics), found.owned, found.rack_id) == (["flights", "trains"], {}, None)


def test_owned_partitions_are_read() -> None:
    found = decode_subscription(subscription(("t", "u"), {("t", 0), ("t", 2), ("u", 1)}))
    assert (found.version, found.topics, found.owned) == (3, ("t", "u"), {"t": [0, 2], "u": [1]})


def test_later_versions_are_read_as_the_newest_known_one() -> None:
    assert decode_subscription(b"\x00\x09" + subscription(("t",), set())[2:] + b"more").version == 3


@pytest.mark.parametrize("version", [0, 1, 3])
def test_an_assignment_survives_a_round_trip(version: int) -> None:
    content = encode_assignment({"t": [0, 2], "u": [1]}, version)
    found = decode_assignment(content)
    assert (found.partitions, found.has_user_data) == ({"t": [0, 2], "u": [1]}, False)
    assert content[:2] == version.to_bytes(2, "big")


def test_an_assignment_with_the_assignors_own_data_is_known() -> None:
    assert decode_assignment(encode_assignment({}, 0)[:-4] + b"\x00\x00\x00\x01x").has_user_data


def test_no_content_is_no_partition() -> None:
    assert decode_assignment(b"").partitions == {}


@pytest.mark.parametrize("content", [b"", b"\x00", b"\xff\xff", b"\x00\x01\x00\x00\x00\x09", subscription(("t",), set())[:-1]])
def test_malformed_subscriptions_are_refused(content: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_subscription(content)
