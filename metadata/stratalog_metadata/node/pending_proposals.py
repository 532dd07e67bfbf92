"""Proposals that this node appended as leader and has not answered yet.

An entry is identified by index and term. If it is applied with its own term, it is answered with its outcome. If another entry
is applied at its index, it had no effect and never will. If this node can no longer learn its outcome, it is
``OutcomeUnknown``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stratalog_core.errors import NotLeader, OutcomeUnknown, StratalogError
from stratalog_metadata.protocol.messages import CommandAnswer, wire_error
from stratalog_metadata.state.commands import Applied

OnAnswers = Callable[[Sequence[CommandAnswer]], None]


class _Batch:
    """Commands of one request, answered together."""

    __slots__ = ("answers", "missing", "on_answers")

    def __init__(self, count: int, on_answers: OnAnswers) -> None:
        self.answers: list[CommandAnswer | None] = [None] * count
        self.missing = count
        self.on_answers = on_answers

    def answer(self, position: int, answer: CommandAnswer) -> None:
        self.answers[position] = answer
        self.missing -= 1
        if not self.missing:
            self.on_answers([known for known in self.answers if known is not None])


class PendingProposals:
    def __init__(self) -> None:
        self._waiting: dict[int, tuple[int, _Batch, int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, first_index: int, term: int, count: int, on_answers: OnAnswers) -> None:
        """Register ``count`` entries from ``first_index`` on as one batch; ``on_answers`` gets all their answers at once."""
        batch = _Batch(count, on_answers)
        for position in range(count):
            # This node's entry of an earlier term may still be committed by another leader that has it.
            self._forget(
                first_index + position, "another entry replaced it on this node, and it is undecided which one is committed"
            )
            self._waiting[first_index + position] = (term, batch, position)

    def applied(self, index: int, term: int, result: Applied | StratalogError | None) -> None:
        waiting = self._waiting.pop(index, None)
        if waiting is None:
            return
        own_term, batch, position = waiting
        batch.answer(position, _answer(index, result) if own_term == term and result is not None else _lost(index))

    def forget(self, up_to: int | None = None) -> None:
        """Answer ``OutcomeUnknown`` to the proposals up to an index: this node will not learn their outcome."""
        for index in [index for index in self._waiting if up_to is None or index <= up_to]:
            self._forget(index, "the node that accepted it stopped leading before it was committed")

    def forget_before_term(self, term: int) -> None:
        """The same for proposals of earlier terms."""
        for index in [index for index, (own_term, _, _) in self._waiting.items() if own_term < term]:
            self._forget(index, "another node leads now, and the outcome was not learned in time")

    def _forget(self, index: int, why: str) -> None:
        waiting = self._waiting.pop(index, None)
        if waiting is not None:
            _, batch, position = waiting
            unknown = OutcomeUnknown(f"a proposal's outcome is unknown: {why}")
            batch.answer(position, CommandAnswer(index=0, error=wire_error(unknown)))


def _answer(index: int, result: Applied | StratalogError) -> CommandAnswer:
    if isinstance(result, StratalogError):
        return CommandAnswer(index=index, error=wire_error(result))
    return CommandAnswer(index=index, allocated=result.allocated)


def _lost(index: int) -> CommandAnswer:
    return CommandAnswer(index=0, error=wire_error(NotLeader(f"the entry at {index} was replaced by another leader")))
