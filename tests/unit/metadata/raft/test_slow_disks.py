"""Followers whose disks are slow still answer heartbeats: all disks may hang for seconds, as on shared storage, and no other
leader would be better."""

from __future__ import annotations

import random

from stratalog_metadata.raft import Entry, EntryKind, HardState, LogTail, Membership, Raft, RaftSettings, Ready
from stratalog_metadata.raft.durability import WRITES_MAX
from stratalog_metadata.raft.messages import Append, Heartbeat, HeartbeatReply, Message


class Follower:
    """Node 2 of three, whose disk completes nothing until it is told to."""

    def __init__(self, term: int) -> None:
        self.core = Raft(
            RaftSettings(node_id=2), Membership.of_voters([1, 2, 3]), hard_state=HardState(term=term), log=LogTail(), applied=0,
            random=random.Random(2), now=0.0,
        )  # fmt: skip
        self.writing: list[Ready] = []

    def step(self, message: Message) -> list[Message]:
        """Return what leaves before the disk has written anything."""
        self.core.step(message)
        sent: list[Message] = []
        while (ready := self.core.ready()) is not None:
            sent.extend(ready.messages)
            self.writing.append(ready)
        return sent

    def append(self, index: int) -> None:
        entry = Entry(index, 5, EntryKind.COMMAND, b"a")
        previous = 5 if index > 1 else 0
        self.step(
            Append(sender=1, receiver=2, term=5, previous_index=index - 1, previous_term=previous, commit=0, entries=(entry,))
        )

    def answers_at_once(self, number: int) -> bool:
        sent = self.step(Heartbeat(sender=1, receiver=2, term=5, commit=0, round=number))
        return any(isinstance(message, HeartbeatReply) for message in sent)

    def finish_writing(self) -> None:
        self.core.persisted(self.writing[-1].number)


def test_a_heartbeat_is_answered_while_entries_are_being_written() -> None:
    follower = Follower(term=5)
    follower.append(1)
    assert follower.answers_at_once(1)


def test_the_answer_waits_for_the_term_to_be_durable() -> None:
    follower = Follower(term=4)
    assert not follower.answers_at_once(1)
    follower.append(1)
    assert not follower.answers_at_once(2)
    follower.finish_writing()
    assert follower.answers_at_once(3)


def test_a_disk_that_hangs_for_long_ends_the_answers() -> None:
    """Each answer lets the leader send more, which waits in memory."""
    follower = Follower(term=5)
    for index in range(1, WRITES_MAX + 2):
        follower.append(index)
    assert not follower.answers_at_once(1)
    follower.finish_writing()
    assert follower.answers_at_once(2)
