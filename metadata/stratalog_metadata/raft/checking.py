"""Refuses messages that no correct peer sends, before they change any state.

Peers that follow Raft's rules never send them. A defect, another program, or a disk that lost what it had promised may. This
does not protect from a peer that lies within the rules: the votes and acknowledgements of members count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from operator import attrgetter
from typing import Final

import msgspec

from stratalog_core.errors import Invalid
from stratalog_metadata.raft.configurations import Configurations
from stratalog_metadata.raft.membership import NUMBER_MAX, check_members
from stratalog_metadata.raft.messages import (
    Append,
    Heartbeat,
    HeartbeatReply,
    LeadersMessage,
    Message,
    SnapshotChunk,
    TimeoutNow,
    VoteRequest,
)
from stratalog_metadata.raft.settings import RaftSettings
from stratalog_metadata.raft.tail import LogTail

_OF_A_TERM: Final = LeadersMessage | TimeoutNow | VoteRequest
"""Messages of a candidate or leader; their term is never 0, the term in which every node starts."""


class MessageChecks:
    """Checks the messages to one node against its ``log`` and ``configurations`` at the time of the message."""

    __slots__ = ("_configurations", "_log", "_settings")

    def __init__(self, settings: RaftSettings, log: LogTail, configurations: Configurations) -> None:
        self._settings = settings
        self._log = log
        self._configurations = configurations

    def check(self, message: Message, *, term: int, leader: int, commit: int, round_begun: int) -> None:
        """Raises ``Invalid`` if no correct peer sends this message.

        The node is in ``term`` and follows ``leader`` (0: unknown). If it leads itself, ``round_begun`` is the number of its
        last round of heartbeats.
        """
        _check_numbers(message)
        self._check_way(message)
        if message.term < term:
            return
        if isinstance(message, TimeoutNow | LeadersMessage) and message.term == term and leader not in (0, message.sender):
            raise Invalid(f"node {message.sender} leads term {term}, which node {leader} leads")
        match message:
            case Append():
                self._check_append(message, commit)
            case Heartbeat():
                self._check_heartbeat(message)
            case SnapshotChunk():
                self._check_chunk(message, commit)
            case HeartbeatReply(round=number) if message.term == term and leader == self._settings.node_id:
                if number > round_begun:
                    raise Invalid(f"node {message.sender} answers round {number}; the last one was {round_begun}")

    def _check_way(self, message: Message) -> None:
        own = self._settings.node_id
        if message.receiver != own or message.sender in (0, own):
            raise Invalid(f"a raft message from node {message.sender} to node {message.receiver} arrived at node {own}")
        if message.term == 0 and isinstance(message, _OF_A_TERM):
            raise Invalid(f"node {message.sender} leads, or wants to lead, term 0")

    def _check_append(self, append: Append, commit: int) -> None:
        before = [(append.previous_index, append.previous_term), *((entry.index, entry.term) for entry in append.entries)]
        for (index, term), (next_index, next_term) in pairwise([*before, (before[-1][0] + 1, append.term)]):
            if next_index != index + 1 or next_term < term:
                raise Invalid(f"raft entry ({next_index}, {next_term}) follows ({index}, {term}) in term {append.term}")
        if append.previous_index < self._log.base_index or not self._log.matches(*before[0]):
            return
        conflict = self._log.conflict(append.entries)
        if conflict is None:
            return
        if conflict <= commit:
            raise Invalid(f"node {append.sender} would replace entry {conflict}; what is committed ends at {commit}")
        self._configurations.check(conflict - 1, [entry for entry in append.entries if entry.index >= conflict])

    def _check_heartbeat(self, heartbeat: Heartbeat) -> None:
        last = self._log.last_index
        if heartbeat.identity == self._settings.identity and heartbeat.commit > last:
            raise Invalid(
                f"node {heartbeat.sender} says that this node had entries up to {heartbeat.commit}; its log ends at {last}."
                " Either that is wrong, or this node's data comes from an older copy: then stop it and replace it"
            )

    def _check_chunk(self, chunk: SnapshotChunk, commit: int) -> None:
        limit, known_term = self._settings.snapshot_bytes_max, self._log.term_at(commit) or 0
        if not chunk.position + len(chunk.content) <= chunk.total_bytes <= limit:
            raise Invalid(
                f"a piece of {len(chunk.content)} bytes at {chunk.position} of a snapshot of {chunk.total_bytes} bytes;"
                f" maximum is {limit}"
            )
        if chunk.index_term > chunk.term or (chunk.index > commit and chunk.index_term < known_term):
            raise Invalid(
                f"a snapshot at entry ({chunk.index}, {chunk.index_term}) in term {chunk.term} after ({commit}, {known_term})"
            )
        if chunk.members:
            check_members(chunk.members)


@functools.cache
def _numbers_of(kind: type[Message]) -> Callable[[Message], tuple[int, ...]]:
    """A getter of the fields of this kind of message that are numbers; every kind has several."""
    return attrgetter(*(each.name for each in msgspec.structs.fields(kind) if each.type is int))


def _check_numbers(message: Message) -> None:
    numbers = _numbers_of(type(message))(message)
    if min(numbers) < 0 or max(numbers) > NUMBER_MAX:
        raise Invalid(f"a raft message has a number outside 0..{NUMBER_MAX}")
