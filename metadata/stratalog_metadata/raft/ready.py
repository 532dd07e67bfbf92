"""The core's output: the one instruction that the shell carries out.

Order: install ``snapshot``, then store ``hard_state`` and ``entries``, all durably; then send ``messages_after`` and call
``Raft.persisted(number)``. ``messages`` leave at once: a leader's appends may be sent before its own disk has them, because
its own copy counts only once it is durable. ``committed`` entries are durable here and on a quorum.
"""

from __future__ import annotations

from dataclasses import dataclass

from stratalog_metadata.raft.messages import Entry, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class HardState:
    """The term, and the candidate that got this node's vote in it (0: none). Must survive restarts."""

    term: int = 0
    voted_for: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state machine's content after the entry at (``index``, ``term``)."""

    index: int
    term: int
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReady:
    """A read may be served from the state machine once it has applied ``index``."""

    context: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """``entries`` replace the log from the first of them on; the entry before has ``previous_term``.

    ``reads_lost`` are the contexts of reads whose leadership could not be confirmed; ``snapshot_wanted`` asks for
    ``offer_snapshot``.
    """

    number: int
    snapshot: Snapshot | None = None
    hard_state: HardState | None = None
    entries: tuple[Entry, ...] = ()
    previous_term: int = 0
    messages: tuple[Message, ...] = ()
    messages_after: tuple[Message, ...] = ()
    committed: tuple[Entry, ...] = ()
    reads: tuple[ReadReady, ...] = ()
    reads_lost: tuple[int, ...] = ()
    snapshot_wanted: bool = False

    @property
    def must_persist(self) -> bool:
        return self.snapshot is not None or self.hard_state is not None or bool(self.entries)
