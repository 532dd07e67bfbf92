"""Output that accumulates in the core until the next ``Ready``."""

from __future__ import annotations

from dataclasses import dataclass, field

from stratalog_metadata.raft.messages import Entry, Message
from stratalog_metadata.raft.ready import HardState, ReadReady, Ready, Snapshot


@dataclass(slots=True)
class Outbox:
    """``messages`` leave at once, ``messages_after`` once the ``Ready`` that contains them is durable."""

    messages: list[Message] = field(default_factory=list)
    messages_after: list[Message] = field(default_factory=list)
    reads: list[ReadReady] = field(default_factory=list)
    reads_lost: list[int] = field(default_factory=list)
    snapshot: Snapshot | None = None

    def __bool__(self) -> bool:
        return bool(self.messages or self.messages_after or self.reads or self.reads_lost or self.snapshot is not None)

    def ready(
        self,
        number: int,
        hard_state: HardState | None,
        entries: tuple[Entry, ...],
        previous_term: int,
        committed: tuple[Entry, ...],
        *,
        snapshot_wanted: bool,
    ) -> Ready:
        """The accumulated output, with what must be stored and applied."""
        return Ready(
            number=number,
            snapshot=self.snapshot,
            hard_state=hard_state,
            entries=entries,
            previous_term=previous_term,
            messages=tuple(self.messages),
            messages_after=tuple(self.messages_after),
            committed=committed,
            reads=tuple(self.reads),
            reads_lost=tuple(self.reads_lost),
            snapshot_wanted=snapshot_wanted,
        )

    def clear(self) -> None:
        for handed in (self.messages, self.messages_after, self.reads, self.reads_lost):
            handed.clear()
        self.snapshot = None
