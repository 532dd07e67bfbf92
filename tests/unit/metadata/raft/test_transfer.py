"""A leader that is asked to transfer leadership while entries are on their way, as on any busy quorum."""

from __future__ import annotations

import random

import pytest

from stratalog_core.errors import NotLeader
from stratalog_metadata.raft import HardState, LogTail, Membership, Message, Raft, RaftSettings
from stratalog_metadata.raft.messages import AppendReply, Heartbeat, HeartbeatReply, TimeoutNow, VoteReply

NOW = 10.0


class Leader:
    """Node 1 of three leads. Node 2 has all entries; node 3 is silent."""

    def __init__(self) -> None:
        self.core = Raft(
            RaftSettings(node_id=1), Membership.of_voters([1, 2, 3]), hard_state=HardState(), log=LogTail(), applied=0,
            random=random.Random(2), now=0.0,
        )  # fmt: skip
        self.core.tick(NOW)
        self.turn()
        self.step(VoteReply(sender=2, receiver=1, term=1, granted=True, pre=True))
        self.step(VoteReply(sender=2, receiver=1, term=1, granted=True))
        self.acknowledge()

    def step(self, message: Message) -> list[Message]:
        self.core.step(message)
        return self.turn()

    def turn(self) -> list[Message]:
        sent: list[Message] = []
        while (ready := self.core.ready()) is not None:
            self.core.persisted(ready.number)
            sent.extend((*ready.messages, *ready.messages_after))
        return sent

    def acknowledge(self) -> list[Message]:
        return self.step(AppendReply(sender=2, receiver=1, term=1, index=self.core.log.last_index))


def transfers(sent: list[Message]) -> list[int]:
    return [message.receiver for message in sent if isinstance(message, TimeoutNow)]


def test_a_follower_that_has_the_whole_log_takes_over_at_once() -> None:
    leader = Leader()
    assert leader.core.transfer_leadership()
    assert transfers(leader.turn()) == [2]


def test_a_follower_takes_over_once_it_has_what_is_on_its_way() -> None:
    leader = Leader()
    leader.core.propose([b"a"])
    assert transfers(leader.turn()) == []
    assert leader.core.transfer_leadership()
    assert transfers(leader.turn()) == []
    with pytest.raises(NotLeader):
        leader.core.propose([b"b"])
    assert transfers(leader.acknowledge()) == [2]
    assert transfers(leader.acknowledge()) == []


def test_a_leader_without_a_follower_that_catches_up_takes_proposals_again() -> None:
    leader = Leader()
    leader.core.propose([b"a"])
    leader.turn()
    assert leader.core.transfer_leadership()
    leader.core.tick(NOW + leader.core.settings.election_timeout_s)
    heartbeats = [message for message in leader.turn() if isinstance(message, Heartbeat)]
    leader.step(HeartbeatReply(sender=2, receiver=1, term=1, round=heartbeats[0].round))
    leader.core.propose([b"b"])
    leader.turn()
    assert transfers(leader.acknowledge()) == []


def test_a_leader_whose_followers_are_not_known_to_follow_transfers_nothing() -> None:
    leader = Leader()
    leader.core.unreachable(2)
    assert not leader.core.transfer_leadership()
    leader.core.propose([b"a"])
