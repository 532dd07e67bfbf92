"""What other components see of the metadata quorum: a client with a watched local view.

The view is a copy of all records (their number does not grow with retention), at most one watch round trip behind.
Decisions are made on
it and guarded by requirements; where a decision needs certainty without a command, ``read`` and ``scan`` are linearizable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from stratalog_metadata.protocol.broker_loads import BrokerLoad
from stratalog_metadata.records import Record, Versioned
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import Applied, Command

Kind = TypeVar("Kind", bound=Record)


OnChanges = Callable[[Sequence[Change]], None]


class MetadataView(Protocol):
    """The watched copy. Never blocks; changes only between turns of the event loop."""

    @property
    def index(self) -> int:
        """Index of the last command that the view contains."""
        ...

    def get(self, key: str) -> Versioned | None: ...

    def find(self, kind: type[Kind], key: str) -> Kind | None:
        """The record at ``key`` if there is one of this kind."""
        ...

    def all(self, kind: type[Kind]) -> Iterable[Kind]:
        """All records of a kind, in the order of their keys."""
        ...

    def subscribe(self, on_changes: OnChanges) -> Callable[[], None]:
        """Call ``on_changes`` after each change of the view; returns how to stop. New subscribers get no replay."""
        ...


class MetadataClient(Protocol):
    """Proposals, linearizable reads, sessions and the view. Finds the leader and follows it by itself."""

    @property
    def view(self) -> MetadataView: ...

    async def propose(self, command: Command, timeout_s: float = 10.0) -> Applied:
        """Commit one command; those proposed in one turn of the event loop travel and commit as one batch.

        Returns after the view contains the command. Raises ``Conflict``, ``StaleEpoch`` or ``SessionExpired`` (nothing
        happened), ``Unavailable`` (surely not sent), ``OutcomeUnknown`` (re-read, delete nothing), ``Invalid``.
        """
        ...

    async def read(self, keys: Sequence[str], timeout_s: float = 10.0) -> list[Versioned | None]:
        """Linearizable. Raises ``Unavailable`` when no leader answers in time."""
        ...

    async def scan(self, prefix: str, timeout_s: float = 10.0) -> list[Versioned]:
        """Linearizable; all records whose key begins with ``prefix``."""
        ...

    async def open_session(
        self,
        holder: str,
        lease_ms: int,
        on_expired: Callable[[], None],
        grace_ms: int = 0,
        load: Callable[[], BrokerLoad | None] | None = None,
    ) -> int:
        """Open a session and keep it alive until ``close_session``.

        ``on_expired`` is called once, on this process's own monotonic clock, no later than the quorum can expire the
        session: whoever holds it stops at once. Renewals count from when they were sent.

        With ``grace_ms`` the quorum may end it earlier: so long after the connection of its renewals broke, if none came
        over another. Then the holder may learn of it late, by at most the lease: only for what is fenced otherwise.
        ``load`` is asked at each renewal for what a broker has to report.
        """
        ...

    async def close_session(self, session_id: int) -> None:
        """Give the session up now, so that nobody waits for the lease to end."""
        ...

    async def close(self) -> None: ...
