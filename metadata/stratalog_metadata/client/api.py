"""The interface of the metadata quorum to other components: a client with a local view that follows the log.

The view is a copy of all records, whose number does not grow with retention. It is at most one watch round trip behind. Decide
on the view and guard the command with requirements. ``read`` and ``scan`` are linearizable, for decisions that need certainty
without a command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from stratalog_metadata.protocol.broker_loads import BrokerLoad
from stratalog_metadata.protocol.messages import StatusAnswer
from stratalog_metadata.records import Record, Versioned
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import Applied, Command

Kind = TypeVar("Kind", bound=Record)


OnChanges = Callable[[Sequence[Change]], None]


class MetadataView(Protocol):
    """The local copy of all records. Never blocks; changes only between turns of the event loop."""

    @property
    def index(self) -> int:
        """Index of the last command that the view contains."""
        ...

    def get(self, key: str) -> Versioned | None: ...

    def find(self, kind: type[Kind], key: str) -> Kind | None:
        """The record at ``key`` if it exists and is of this kind."""
        ...

    def all(self, kind: type[Kind]) -> Iterable[Kind]:
        """All records of a kind, ordered by key."""
        ...

    def with_prefix(self, prefix: str) -> Sequence[Versioned]:
        """The records whose key begins with ``prefix``, ordered by key."""
        ...

    def subscribe(self, on_changes: OnChanges) -> Callable[[], None]:
        """Call ``on_changes`` after each change of the view; returns a function that unsubscribes. There is no replay."""
        ...


class MetadataClient(Protocol):
    """Proposals, linearizable reads, sessions and the view. Finds and follows the leader."""

    @property
    def view(self) -> MetadataView: ...

    async def propose(self, command: Command, timeout_s: float = 10.0) -> Applied:
        """Commit a command and return once the view contains it. Commands of one turn of the event loop travel as one batch.

        Raises ``Conflict``, ``StaleEpoch`` or ``SessionExpired`` (refused, no effect), ``Unavailable`` (not sent, no effect),
        ``OutcomeUnknown`` (it may take effect: read again, delete nothing), ``Invalid``.
        """
        ...

    async def refresh(self, timeout_s: float = 10.0) -> int:
        """Wait until the view contains everything that was committed before this call. Returns its index.

        Raises ``Unavailable``.
        """
        ...

    async def read(self, keys: Sequence[str], timeout_s: float = 10.0) -> list[Versioned | None]:
        """The records at ``keys``, linearizable; None where there is none. Raises ``Unavailable`` if no leader answers in
        time.
        """
        ...

    async def scan(self, prefix: str, timeout_s: float = 10.0) -> list[Versioned]:
        """All records whose key begins with ``prefix``, linearizable. Raises ``Unavailable``."""
        ...

    async def quorum_status(self, timeout_s: float = 10.0) -> StatusAnswer:
        """The leader's status; without a leader, that of any node that answers. Raises ``Unavailable``."""
        ...

    async def open_session(
        self,
        holder: str,
        lease_ms: int,
        on_expired: Callable[[], None],
        grace_ms: int = 0,
        load: Callable[[], BrokerLoad | None] | None = None,
    ) -> int:
        """Open a session and keep it alive until ``close_session``. Returns its id.

        ``on_expired`` is called once, by this process's monotonic clock, no later than the quorum may expire the session; its
        holder must stop at once. A lease counts from when the renewal was sent.

        With ``grace_ms`` the quorum may end the session earlier: that long after the connection of its renewals broke, if none
        came over another. The holder may then learn of it late, by at most the lease, so use a grace only if its work is
        fenced by other means. ``load`` is called at each renewal for the broker's load report.
        """
        ...

    async def close_session(self, session_id: int) -> None:
        """End the session now instead of waiting for its lease."""
        ...

    async def close(self) -> None: ...
