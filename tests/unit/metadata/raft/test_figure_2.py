"""Figure 2 of the Raft paper (Ongaro and Ousterhout, 2014), rule by rule, on one core that is told what the others say.

docs/reference/protocols/raft.md lists which rule is which test.
"""

from __future__ import annotations

import random

import pytest

from stratalog_core.errors import NotLeader
from stratalog_metadata.raft import (
    Entry,
    EntryKind,
    HardState,
    LogTail,
    Membership,
    Message,
    Raft,
    RaftSettings,
    Ready,
    Role,
)
from stratalog_metadata.raft.messages import Append, AppendReply, VoteReply, VoteRequest

LATE = 10.0
"""Seconds after which nobody remembers a leader."""


class Bench:
    """Node 1 of three. ``sent`` is everything that has left it; ``unsaved`` what its disk still has to write."""

    def __init__(self, *, term: int = 0, voted_for: int = 0, log: tuple[int, ...] = (), applied: int = 0) -> None:
        """``log``: the terms of its entries from index 1 on."""
        self.core = Raft(
            RaftSettings(node_id=1),
            Membership.of_voters([1, 2, 3]),
            hard_state=HardState(term=term, voted_for=voted_for),
            log=LogTail(0, 0, entries(*log)),
            applied=applied,
            random=random.Random(2),
            now=0.0,
        )
        self.sent: list[Message] = []
        self.applied: list[int] = []
        self.stored: HardState = HardState(term=term, voted_for=voted_for)
        self.core.tick(0.55)

    def step(self, message: Message) -> list[Message]:
        """Return the messages that the node sends after ``message``, once its disk has written everything."""
        self.sent = []
        self.core.step(message)
        self.turn()
        return self.sent

    def turn(self) -> None:
        while (ready := self.core.ready()) is not None:
            self.carry_out(ready)

    def carry_out(self, ready: Ready) -> None:
        self.stored = ready.hard_state or self.stored
        self.core.persisted(ready.number)
        self.sent.extend((*ready.messages, *ready.messages_after))
        self.applied.extend(entry.index for entry in ready.committed)

    def terms(self) -> list[int]:
        log = self.core.log
        return [entry.term for entry in log.between(log.base_index + 1, log.last_index)]

    def lead(self) -> None:
        """Win an election by node 2's votes."""
        self.core.tick(LATE)
        self.turn()
        term = self.core.term + 1
        self.step(VoteReply(sender=2, receiver=1, term=term, granted=True, pre=True))
        self.step(VoteReply(sender=2, receiver=1, term=term, granted=True))
        assert self.core.is_leader


def entries(*terms: int, first: int = 1) -> tuple[Entry, ...]:
    return tuple(Entry(first + number, term, EntryKind.NO_OP) for number, term in enumerate(terms))


def append(term: int, previous: tuple[int, int], *terms: int, commit: int = 0) -> Append:
    index, previous_term = previous
    new = entries(*terms, first=index + 1)
    return Append(
        sender=2, receiver=1, term=term, previous_index=index, previous_term=previous_term, commit=commit, entries=new
    )  # fmt: skip


def ask(term: int, last: tuple[int, int], sender: int = 2) -> VoteRequest:
    return VoteRequest(sender=sender, receiver=1, term=term, last_index=last[0], last_term=last[1])


def granted(sent: list[Message]) -> bool:
    (reply,) = [message for message in sent if isinstance(message, VoteReply)]
    return reply.granted


# --- AppendEntries: receiver -----------------------------------------------------------------------------------------


def test_append_1_an_earlier_term_is_refused() -> None:
    bench = Bench(term=5, log=(5,))
    assert bench.step(append(4, (1, 5), 4)) == [AppendReply(sender=1, receiver=2, term=5, index=0, rejected=True)]
    assert bench.terms() == [5]


def test_append_2_without_a_match_before_it_is_refused() -> None:
    bench = Bench(term=5, log=(1, 2))
    (reply,) = bench.step(append(5, (2, 3), 5))
    assert isinstance(reply, AppendReply)
    assert reply.rejected
    (reply,) = bench.step(append(5, (7, 5), 5))
    assert isinstance(reply, AppendReply)
    assert reply.rejected
    assert bench.terms() == [1, 2]


def test_append_3_a_conflicting_entry_goes_with_all_behind_it() -> None:
    bench = Bench(term=5, log=(1, 2, 2, 2))
    bench.step(append(5, (1, 1), 3))
    assert bench.terms() == [1, 3]


def test_append_3_an_old_message_takes_nothing_back() -> None:
    bench = Bench(term=5, log=(1, 2, 2))
    bench.step(append(5, (0, 0), 1))
    assert bench.terms() == [1, 2, 2]


def test_append_4_new_entries_are_appended_and_durable_before_the_answer() -> None:
    bench = Bench(term=5, log=(1,))
    bench.core.step(append(5, (1, 1), 5, 5))
    ready = bench.core.ready()
    assert ready is not None
    assert [entry.index for entry in ready.entries] == [2, 3]
    assert not ready.messages
    assert ready.messages_after == (AppendReply(sender=1, receiver=2, term=5, index=3),)


def test_append_5_commits_no_further_than_its_own_last_entry() -> None:
    bench = Bench(term=5, log=(1, 5, 5))
    bench.step(append(5, (0, 0), 1, 5, commit=9))
    assert bench.core.commit == 2


# --- RequestVote: receiver -------------------------------------------------------------------------------------------


def test_vote_1_an_earlier_term_gets_no_vote() -> None:
    assert not [m for m in Bench(term=5).step(ask(4, (9, 9))) if isinstance(m, VoteReply) and m.granted]


def test_vote_2_one_vote_in_a_term_to_whoever_asks_first() -> None:
    bench = Bench(term=5)
    assert granted(bench.step(ask(6, (0, 0), sender=2)))
    assert bench.stored == HardState(term=6, voted_for=2)
    assert not granted(bench.step(ask(6, (0, 0), sender=3)))
    assert granted(bench.step(ask(6, (0, 0), sender=2)))


def test_vote_2_a_vote_survives_a_restart() -> None:
    assert not granted(Bench(term=6, voted_for=2).step(ask(6, (0, 0), sender=3)))


@pytest.mark.parametrize(
    ("last", "expected"), [((3, 1), False), ((1, 2), False), ((2, 2), True), ((3, 2), True), ((1, 3), True)]
)
def test_vote_2_only_for_a_log_that_lacks_nothing(last: tuple[int, int], expected: bool) -> None:
    assert granted(Bench(term=5, log=(1, 2)).step(ask(6, last))) is expected


# --- all servers -----------------------------------------------------------------------------------------------------


def test_all_1_what_is_committed_is_applied_in_order() -> None:
    bench = Bench(term=5, log=(1, 5, 5))
    bench.step(append(5, (3, 5), 5, commit=3))
    bench.step(append(5, (4, 5), commit=4))
    assert bench.applied == [1, 2, 3, 4]


def test_all_2_a_later_term_makes_a_follower() -> None:
    bench = Bench(term=1)
    bench.lead()
    bench.step(append(9, (0, 0)))
    assert (bench.core.role, bench.core.term, bench.core.leader) == (Role.FOLLOWER, 9, 2)


# --- followers, candidates -------------------------------------------------------------------------------------------


def test_followers_silence_begins_an_election() -> None:
    bench = Bench(term=5)
    bench.core.tick(LATE)
    assert bench.core.role is Role.PRE_CANDIDATE


def test_candidates_1_a_new_term_and_a_vote_for_oneself_are_durable_before_anybody_is_asked() -> None:
    bench = Bench(term=5)
    bench.core.tick(LATE)
    bench.turn()
    bench.core.step(VoteReply(sender=2, receiver=1, term=6, granted=True, pre=True))
    ready = bench.core.ready()
    assert ready is not None
    assert ready.hard_state == HardState(term=6, voted_for=1)
    assert not ready.messages
    assert {(m.receiver, m.term) for m in ready.messages_after if isinstance(m, VoteRequest)} == {(2, 6), (3, 6)}


def test_candidates_2_a_majority_makes_a_leader() -> None:
    bench = Bench(term=5)
    bench.lead()
    assert bench.core.term == 6


def test_candidates_3_a_leader_of_the_same_term_is_followed() -> None:
    bench = Bench(term=5)
    bench.core.tick(LATE)
    bench.turn()
    bench.step(VoteReply(sender=2, receiver=1, term=6, granted=True, pre=True))
    bench.step(append(6, (0, 0), 6))
    assert (bench.core.role, bench.core.leader) == (Role.FOLLOWER, 2)


def test_candidates_4_time_begins_another_election() -> None:
    bench = Bench(term=5)
    bench.lead()
    bench.step(append(9, (0, 0)))
    bench.core.tick(2 * LATE)
    bench.turn()
    assert bench.core.role is Role.PRE_CANDIDATE


# --- leaders ---------------------------------------------------------------------------------------------------------


def test_leaders_1_everybody_hears_of_it_at_once() -> None:
    bench = Bench(term=5)
    bench.lead()
    assert {message.receiver for message in bench.sent if isinstance(message, Append)} == {2, 3}


def test_leaders_2_a_command_is_applied_when_a_majority_has_it() -> None:
    bench = Bench(term=5)
    with pytest.raises(NotLeader):
        bench.core.propose([b"too early"])
    bench.lead()
    index = bench.core.propose([b"command"])
    bench.turn()
    assert bench.applied == []
    bench.step(AppendReply(sender=3, receiver=1, term=6, index=index))
    assert bench.applied == [1, 2]


def test_leaders_3_a_refusal_goes_back_to_where_the_logs_match() -> None:
    bench = Bench(term=5, log=(1, 1, 5))
    bench.lead()
    refused = AppendReply(sender=2, receiver=1, term=6, index=3, rejected=True, hint_index=2, hint_term=1)
    (again,) = [message for message in bench.step(refused) if isinstance(message, Append)]
    assert (again.previous_index, [entry.index for entry in again.entries]) == (2, [3, 4])


def test_leaders_4_an_earlier_terms_entry_is_not_committed_by_counting() -> None:
    bench = Bench(term=5, log=(1, 5))
    bench.lead()
    bench.step(AppendReply(sender=2, receiver=1, term=6, index=2))
    assert bench.core.commit == 0
    bench.step(AppendReply(sender=2, receiver=1, term=6, index=3))
    assert bench.core.commit == 3
