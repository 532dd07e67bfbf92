"""Planted faults of the metadata quorum, run in the scenarios ``quorum`` and ``raft-scripts``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Final

from stratalog_core.quorum import majority
from stratalog_metadata.raft import HardState, Raft, membership, replication
from stratalog_metadata.raft.elections import Elections
from stratalog_metadata.raft.membership import Membership
from stratalog_metadata.raft.messages import Message, VoteRequest
from stratalog_metadata.raft.ready import ReadReady, Ready
from stratalog_metadata.storage import raft_log_format as log_format
from stratalog_metadata.storage.raft_log import DurableLog, LogWrite
from stratalog_metadata.storage.raft_log_format import LogMark


def _swap(owner: object, name: str, new: object) -> Any:
    """Replace the attribute with ``new``; return the old value."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    return old


def vote_is_not_stored() -> None:
    """The term is stored, the vote is not: a node may vote twice in one term."""
    pack: Callable[[HardState, LogMark], bytes] = log_format.pack_vote
    _swap(log_format, "pack_vote", lambda state, mark: pack(HardState(term=state.term, voted_for=0), mark))


def term_and_vote_are_not_stored() -> None:
    """Neither term nor vote reaches the disk after the first time."""
    persist: Callable[[DurableLog, Sequence[LogWrite]], None] = DurableLog.persist

    def forgetting(self: DurableLog, writes: Sequence[LogWrite]) -> None:
        known = self._files.exists(f"{self._directory}/vote")
        persist(self, [replace(write, hard_state=None) if known else write for write in writes])

    _swap(DurableLog, "persist", forgetting)


def raft_log_is_not_synced() -> None:
    """Entries are written and not synced before they are acknowledged."""

    def append(self: DurableLog, writes: Sequence[LogWrite]) -> None:
        if not writes:
            return
        if self._file is None or self._position >= self._segment_bytes_max:
            self._begin_segment(self._last, reset=False)
        assert self._file is not None
        previous = self._position
        for write in writes:
            term = write.previous_term
            for entry in write.entries:
                record = log_format.pack_record(entry, term, previous)
                self._file.pwritev([record], self._position)
                self._position += len(record)
                term = entry.term
        last = writes[-1].entries[-1]
        self._last = (last.index, last.term)
        self._segments[-1].highest = max(self._segments[-1].highest, *(write.entries[-1].index for write in writes))

    _swap(DurableLog, "_append", append)


def promises_leave_before_they_are_durable() -> None:
    """Votes and acknowledgements are sent while their write is in flight."""
    ready: Callable[[Raft], Ready | None] = Raft.ready

    def hasty(self: Raft) -> Ready | None:
        made = ready(self)
        return made and replace(made, messages=(*made.messages, *made.messages_after), messages_after=())

    _swap(Raft, "ready", hasty)


def earlier_terms_are_committed_by_counting() -> None:
    """A leader commits an entry of an earlier term as soon as a quorum has it (figure 8 of the Raft paper)."""

    def advance(self: Raft) -> None:
        assert self._leading is not None
        agreed = self._leading.agreed_index()
        if agreed > self.commit:
            self.commit = agreed
            self._leading.may_read = True

    _swap(Raft, "_advance_commit", advance)


def votes_for_whoever_asks() -> None:
    """A vote ignores the candidate's log."""
    on_request: Callable[..., None] = Elections.on_request

    def careless(self: Elections, request: VoteRequest, last: tuple[int, int], out: list[Message]) -> None:
        on_request(self, request, (0, 0), out)

    _swap(Elections, "on_request", careless)


def votes_twice_in_a_term() -> None:
    """A node forgets its vote and its leader as soon as another candidate asks."""
    on_request: Callable[..., None] = Elections.on_request

    def forgetful(self: Elections, request: VoteRequest, last: tuple[int, int], out: list[Message]) -> None:
        self.voted_for = self.leader = 0
        on_request(self, request, last, out)

    _swap(Elections, "on_request", forgetful)


def one_copy_commits() -> None:
    """The leader commits entries that it alone has."""
    _swap(Membership, "agreed", lambda self, matches: max(matches.values()))


def reads_do_not_ask_the_quorum() -> None:
    """A leader answers a linearizable read from its own state, without asking whether it still leads."""

    def read(self: Raft, context: int) -> None:
        self._out.reads.append(ReadReady(context=context, index=self.commit))

    _swap(Raft, "read", read)


def _checking_changes(**believed: object) -> None:
    """Make a leader check a membership change against these values instead of the true ones."""
    check: Callable[..., None] = membership.check_change
    _swap(replication, "check_change", lambda **facts: check(**{**facts, **believed}))


def changes_do_not_wait_for_each_other() -> None:
    """A second membership change starts before the first is committed."""
    _checking_changes(is_pending=False)


def changes_do_not_wait_for_the_term() -> None:
    """A new leader changes the members before an entry of its own term is committed."""
    _checking_changes(term_has_committed=True)


def several_voters_change_at_once() -> None:
    """Consecutive configurations may differ by any number of voters."""
    _swap(Membership, "follows", lambda self, before: True)


def learners_count() -> None:
    """A learner's acknowledgement or vote counts as a voter's."""

    def agreed(self: Membership, values: Mapping[int, int]) -> int:
        reached = sorted((values.get(member.node_id, 0) for member in self.members), reverse=True)
        return reached[majority(len(self.voters)) - 1]

    def is_quorum(self: Membership, nodes: Set[int]) -> bool:
        return len(nodes & {member.node_id for member in self.members}) >= majority(len(self.voters))

    _swap(Membership, "agreed", agreed)
    _swap(Membership, "is_quorum", is_quorum)


MUTANTS: Final = (
    vote_is_not_stored,
    term_and_vote_are_not_stored,
    raft_log_is_not_synced,
    promises_leave_before_they_are_durable,
    reads_do_not_ask_the_quorum,
)

IN_RAFT_SCRIPTS: Final = (
    votes_for_whoever_asks,
    votes_twice_in_a_term,
    one_copy_commits,
    earlier_terms_are_committed_by_counting,
    changes_do_not_wait_for_each_other,
    changes_do_not_wait_for_the_term,
    several_voters_change_at_once,
    learners_count,
)
