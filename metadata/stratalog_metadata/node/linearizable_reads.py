"""Linearizable reads in progress: each waits for its read index, then for the replica to apply it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from stratalog_core.errors import Overloaded, StratalogError, Unavailable
from stratalog_core.ports import Request
from stratalog_metadata.raft import Raft

CONFIRMED_MAX: Final = 10_000
"""Maximum of reads that wait for the replica; the core bounds those that wait for the quorum."""
Serve = Callable[[Request], None]


class LinearizableReads:
    """``serve`` answers a request from the replica's current records."""

    def __init__(self, core: Raft) -> None:
        self._core = core
        self._unconfirmed: dict[int, tuple[Request, Serve]] = {}
        self._confirmed: list[tuple[int, Request, Serve]] = []
        self._next_context = 1

    def __len__(self) -> int:
        return len(self._unconfirmed) + len(self._confirmed)

    def begin(self, request: Request, serve: Serve) -> None:
        """Begin a read. Raises ``NotLeader`` or ``Overloaded``."""
        if len(self._confirmed) >= CONFIRMED_MAX:
            raise Overloaded(
                f"{CONFIRMED_MAX} reads wait for this node to apply committed entries, which is the maximum: retry later"
            )
        self._core.read(self._next_context)
        self._unconfirmed[self._next_context] = (request, serve)
        self._next_context += 1

    def ready(self, context: int, index: int) -> None:
        request, serve = self._unconfirmed.pop(context)
        self._confirmed.append((index, request, serve))

    def lost(self, context: int) -> None:
        request, _ = self._unconfirmed.pop(context)
        request.fail(Unavailable("this node stopped leading before it could serve the read"))

    def serve_up_to(self, applied: int) -> None:
        waiting, self._confirmed = self._confirmed, []
        for index, request, serve in waiting:
            if index <= applied:
                serve(request)
            else:
                self._confirmed.append((index, request, serve))

    def close(self, reason: StratalogError) -> None:
        for request, _ in self._unconfirmed.values():
            request.fail(reason)
        for _, request, _ in self._confirmed:
            request.fail(reason)
        self._unconfirmed.clear()
        self._confirmed.clear()
