"""Collects the instructions that one event of a group produces. Does no I/O."""

from __future__ import annotations

import itertools
from typing import Final

from stratalog_broker.coordination.groups.core.membership import Member, Membership
from stratalog_broker.coordination.groups.core.messages import (
    Answer,
    GroupImage,
    Instruction,
    Instructions,
    JoinAnswer,
    Persist,
    SyncAnswer,
)

_tokens: Final = itertools.count(1)
"""Of all groups: the write of a group that was deleted must not be taken for one of the group that follows it."""


class InstructionQueue:
    """Instructions in the order in which the shell carries them out. A member's ticket is cleared when it is answered."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._queued: list[Instruction] = []

    def answer(self, ticket: int, value: JoinAnswer | SyncAnswer) -> None:
        self._queued.append(Answer(ticket=ticket, value=value))

    def answer_join(self, member: Member, answer: JoinAnswer) -> None:
        """Answer the member's JoinGroup request, if one is waiting."""
        if member.join_ticket is not None:
            self.answer(member.join_ticket, answer)
            self._membership.set_join_ticket(member, None)

    def answer_sync(self, member: Member, answer: SyncAnswer) -> None:
        """Answer the member's SyncGroup request, if one is waiting."""
        if member.sync_ticket is not None:
            self.answer(member.sync_ticket, answer)
            member.sync_ticket = None

    def persist(self, image: GroupImage) -> int:
        """Queue the image to be written; return the token with which its outcome is reported."""
        token = next(_tokens)
        self._queued.append(Persist(token=token, image=image))
        return token

    def drain(self) -> Instructions:
        """Return the queued instructions and clear the queue."""
        queued, self._queued = tuple(self._queued), []
        return queued
