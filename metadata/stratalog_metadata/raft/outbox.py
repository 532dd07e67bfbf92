"""What gathers in the core until the next Ready."""

from __future__ import annotations

from dataclasses import dataclass, field

from stratalog_metadata.raft.messages import Message
from stratalog_metadata.raft.ready import ReadReady, Snapshot


@dataclass(slots=True)
class Outbox:
    """``messages`` leave at once, ``messages_after`` once the Ready that brings them is durable."""

    messages: list[Message] = field(default_factory=list)
    messages_after: list[Message] = field(default_factory=list)
    reads: list[ReadReady] = field(default_factory=list)
    reads_lost: list[int] = field(default_factory=list)
    snapshot: Snapshot | None = None

    def __bool__(self) -> bool:
        return bool(self.messages or self.messages_after or self.reads or self.reads_lost or self.snapshot is not None)

    def clear(self) -> None:
        for handed in (self.messages, self.messages_after, self.reads, self.reads_lost):
            handed.clear()
        self.snapshot = None
