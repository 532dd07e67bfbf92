"""A node that is being added begins only once its membership is committed: a new leader may not know of it."""

from __future__ import annotations

import random
from typing import cast

import pytest
from support.asked_request import AskedRequest

from stratalog_core.ports import Transport
from stratalog_core.system import SystemClock
from stratalog_metadata.node import joining
from stratalog_metadata.node.joining import Begin, Wait
from stratalog_metadata.node.membership_service import MembershipService
from stratalog_metadata.node.peers import Peers
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import HelloAnswer, HelloRequest
from stratalog_metadata.raft import HardState, LogTail, Member, Membership, Raft, RaftSettings
from stratalog_metadata.raft.messages import AppendReply, VoteReply
from stratalog_metadata.storage.identity import Identity

ADDRESSES = {1: "a:1", 2: "b:1", 3: "c:1", 4: "d:1"}
FOUNDERS = Membership.of(Member(node_id=number, identity=f"disk {number}", address=ADDRESSES[number]) for number in (1, 2, 3))
NEWCOMER = Identity(node_id=4, identity="disk 4")


def leader() -> Raft:
    """Node 1 of three, which has committed the first entry of its term."""
    core = Raft(
        RaftSettings(node_id=1, identity="disk 1"), FOUNDERS, hard_state=HardState(), log=LogTail(), applied=0,
        random=random.Random(2), now=0.0,
    )  # fmt: skip
    core.tick(10.0)
    turn(core)
    for pre in (True, False):
        core.step(VoteReply(sender=2, receiver=1, term=1, granted=True, pre=pre), "disk 2")
        turn(core)
    acknowledge(core)
    return core


def turn(core: Raft) -> None:
    while (ready := core.ready()) is not None:
        core.persisted(ready.number)


def acknowledge(core: Raft) -> None:
    core.step(AppendReply(sender=2, receiver=1, term=1, index=core.log.last_index), "disk 2")
    turn(core)


def decision(core: Raft) -> Begin | Wait:
    """What node 4 does after the leader's answer."""
    own = Identity(node_id=1, identity="disk 1", members=FOUNDERS.members)
    peers = Peers(own, ADDRESSES, cast(Transport, None), lambda _: None, lambda _: None)
    service = MembershipService(core, peers, own, cast(Transport, None), SystemClock(), lambda *_: None)
    request = AskedRequest(messages.HELLO, HelloRequest(node_id=4, identity=NEWCOMER.identity, address=ADDRESSES[4]))
    service.hello(request)
    assert isinstance(request.answer, bytes)
    return joining.decide(NEWCOMER, ADDRESSES, {1: messages.decode(request.answer, HelloAnswer)})


@pytest.mark.parametrize("known", [0, 1])
def test_a_node_begins_when_its_membership_is_committed(known: int) -> None:
    core = leader()
    for _ in range(known):
        core.change_members(core.membership)
        turn(core)
        acknowledge(core)
    assert isinstance(decision(core), Wait)
    index = core.change_members(core.membership.with_learner(Member(node_id=4, identity="disk 4", address=ADDRESSES[4])))
    turn(core)
    assert isinstance(decision(core), Wait)
    acknowledge(core)
    assert decision(core) == Begin(members=core.membership.members, index=index)
