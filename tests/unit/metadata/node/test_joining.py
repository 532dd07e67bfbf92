"""The decision of a node with an empty directory, from the other nodes' answers."""

from __future__ import annotations

import pytest

from stratalog_core.errors import Invalid
from stratalog_metadata.node.joining import Begin, Wait, decide
from stratalog_metadata.protocol.messages import HelloAnswer
from stratalog_metadata.raft import Member
from stratalog_metadata.storage.identity import Identity

ADDRESSES = {1: "a:1", 2: "b:1", 3: "c:1"}
OWN = Identity(node_id=3, identity="three")
FOUNDERS = tuple(
    Member(node_id=number, identity=name, address=ADDRESSES[number])
    for number, name in ((1, "one"), (2, "two"), (3, "three"))
)  # fmt: skip


def answer(number: int, *members: Member, index: int = 0, leads: bool = False, cluster_id: str = "") -> HelloAnswer:
    return HelloAnswer(
        node_id=number,
        identity={1: "one", 2: "two"}[number],
        cluster_id=cluster_id,
        peers=[1, 2, 3],
        members=members,
        members_index=index,
        leads=leads,
    )


def member(number: int, identity: str) -> Member:
    return Member(node_id=number, identity=identity)


def test_empty_nodes_start_a_quorum_together() -> None:
    assert decide(OWN, ADDRESSES, {1: answer(1), 2: answer(2)}) == Begin(members=FOUNDERS)


def test_a_node_that_does_not_answer_is_waited_for() -> None:
    decision = decide(OWN, ADDRESSES, {1: answer(1)})
    assert isinstance(decision, Wait)
    assert "missing: [2]" in decision.reason


def test_an_existing_quorum_is_joined() -> None:
    assert decide(OWN, ADDRESSES, {2: answer(2, *FOUNDERS)}) == Begin(members=FOUNDERS)


def test_nodes_must_agree_on_the_peers() -> None:
    with pytest.raises(Invalid, match="peers lists"):
        decide(OWN, {**ADDRESSES, 4: "d:1"}, {1: answer(1), 2: answer(2), 4: answer(1)})


def test_a_newcomer_waits_until_it_is_added() -> None:
    decision = decide(OWN, ADDRESSES, {1: answer(1, member(1, "one"), member(2, "two"), leads=True)})
    assert isinstance(decision, Wait)
    assert "`stratalog metadata add 3=c:1`" in decision.reason


def test_the_latest_configuration_is_used() -> None:
    early, late = (member(3, "three"), member(1, "one")), (member(3, "three"), member(2, "two"))
    decision = decide(OWN, ADDRESSES, {1: answer(1, *early, index=5), 2: answer(2, *late, index=9)})
    assert decision == Begin(members=late, index=9)


def test_a_lost_disk_is_refused_by_the_leader_alone() -> None:
    """A follower may not know yet that the node was replaced."""
    old = (member(1, "one"), member(3, "before"))
    assert isinstance(decide(OWN, ADDRESSES, {1: answer(1, *old)}), Wait)
    with pytest.raises(Invalid, match="stratalog metadata remove"):
        decide(OWN, ADDRESSES, {1: answer(1, *old, leads=True)})


def test_another_cluster_is_refused() -> None:
    own = Identity(node_id=3, identity="three", cluster_id="this")
    with pytest.raises(Invalid, match="is of cluster that"):
        decide(own, ADDRESSES, {1: answer(1, cluster_id="that")})
