"""A voter that has answered a leader's heartbeat elects nobody for an election timeout: the leader's lease counts on it."""

from __future__ import annotations

import random

import pytest

from stratalog_metadata.raft import HardState, LogTail, Membership, Message, Raft, RaftSettings
from stratalog_metadata.raft.messages import Heartbeat, HeartbeatReply, VoteReply, VoteRequest

HEARD_AT = 10.0
TIMEOUT_S = RaftSettings(node_id=1).election_timeout_s


class Voter:
    """Node 2 of three in term 5, which has just answered its leader, node 1."""

    def __init__(self) -> None:
        self.core = Raft(
            RaftSettings(node_id=2), Membership.of_voters([1, 2, 3]), hard_state=HardState(term=5, voted_for=1), log=LogTail(),
            applied=0, random=random.Random(2), now=0.0,
        )  # fmt: skip
        self.core.tick(HEARD_AT)
        self.step(VoteRequest(sender=3, receiver=2, term=5, last_index=0, last_term=0))
        answers = self.step(Heartbeat(sender=1, receiver=2, term=5, commit=0, round=1))
        assert [type(answer) for answer in answers] == [HeartbeatReply]

    def step(self, message: Message) -> list[Message]:
        self.core.step(message)
        sent: list[Message] = []
        while (ready := self.core.ready()) is not None:
            self.core.persisted(ready.number)
            sent.extend((*ready.messages, *ready.messages_after))
        return sent

    def votes_for(self, term: int) -> bool:
        request = VoteRequest(sender=3, receiver=2, term=term, last_index=0, last_term=0)
        return any(isinstance(answer, VoteReply) and answer.granted for answer in self.step(request))


@pytest.mark.parametrize("term", [6, 7])
def test_a_later_term_heard_of_by_a_reply_does_not_end_the_promise(term: int) -> None:
    """The node has asked node 3 for a pre-vote before it heard its leader again. Node 3 campaigned in term 6 meanwhile."""
    voter = Voter()
    voter.core.tick(HEARD_AT + 0.01)
    voter.step(VoteReply(sender=3, receiver=2, term=6, granted=False, pre=True))
    assert voter.core.term == 6
    voter.core.tick(HEARD_AT + TIMEOUT_S - 0.01)
    assert not voter.votes_for(term)
    voter.core.tick(HEARD_AT + TIMEOUT_S)
    assert voter.votes_for(term)


def test_a_restarted_voter_keeps_the_promise_in_the_term_that_it_knows() -> None:
    """It may have answered the leader of the term before."""
    core = Raft(
        RaftSettings(node_id=2), Membership.of_voters([1, 2, 3]), hard_state=HardState(term=6), log=LogTail(), applied=0,
        random=random.Random(2), now=HEARD_AT,
    )  # fmt: skip
    core.step(VoteRequest(sender=3, receiver=2, term=6, last_index=0, last_term=0))
    ready = core.ready()
    assert ready is None or not any(isinstance(each, VoteReply) and each.granted for each in ready.messages_after)
