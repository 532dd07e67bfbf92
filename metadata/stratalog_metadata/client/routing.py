"""Chooses the node to ask: the leader if known, else one node after the other, with growing pauses between rounds.

If the leader does not answer this client but another node names it, requests go through that node (``node/forwarding.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stratalog_core.errors import Invalid, NotLeader, OutcomeUnknown, StratalogError, Unavailable
from stratalog_core.ports import Random
from stratalog_metadata.client.unreachable_peers import UnreachablePeers
from stratalog_metadata.protocol import messages

BACKOFF_S_MIN: Final = 0.005
BACKOFF_S_MAX: Final = 0.25


class Router:
    """One caller's choice of nodes; ``address`` is the next one to ask. Without ``cuts`` every node is asked directly."""

    def __init__(self, addresses: Sequence[str], random: Random, cuts: UnreachablePeers | None = None) -> None:
        if not addresses:
            raise Invalid("no metadata addresses are given: name at least one node as HOST:PORT")
        self._given = tuple(addresses)
        self._addresses = list(addresses)
        self._random = random
        self._position = 0
        self._failures = 0
        self._leader = ""
        self._cuts = cuts
        self._through = ""

    def learn(self, addresses: Sequence[str]) -> None:
        """Adopt the current members' addresses; the configured ones are kept as well."""
        asked = self._addresses[self._position]
        self._addresses = list(dict.fromkeys([*addresses, *self._given]))
        self._position = self._addresses.index(asked) if asked in self._addresses else 0

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of all known nodes."""
        return tuple(self._addresses)

    @property
    def address(self) -> str:
        return self._through if self.forwards else self._leader or self._addresses[self._position]

    @property
    def forwards(self) -> bool:
        """Whether the asked node must forward the request, because the leader cannot be reached."""
        return bool(self._through) and self._is_cut(self._leader)

    def addressed(self, method: int, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Method and body to send to ``address``."""
        if not self.forwards:
            return method, body
        timeout_ms = max(round(timeout_s * 1000), 1)
        return messages.FORWARD, messages.encode(messages.ForwardRequest(method=method, body=body, timeout_ms=timeout_ms))

    @property
    def leader(self) -> str:
        """Address of the leader; empty if it is unknown or unreachable."""
        return "" if self.forwards else self._leader

    def prefer(self, leader: str) -> None:
        """Adopt a leader that another part has found, unless nodes are failing: then continue the search."""
        if leader and not self._failures and not self.forwards:
            self._leader = leader

    def succeeded(self) -> None:
        """Record that the asked node is the right one."""
        if not self.forwards:
            self._leader, self._through = self.address, ""
        self._failures = 0

    def failed(self, error: StratalogError) -> float:
        """Record that the asked node failed. Returns the seconds to wait before asking the next."""
        self._failures += 1
        asked, was_forwarding = self.address, self.forwards
        self._through = ""
        if self._cuts is not None and isinstance(error, Unavailable | OutcomeUnknown) and not error.detail.get("forwarded"):
            self._cuts.lost(asked)
        named = str(error.detail.get("leader") or "") if isinstance(error, NotLeader) else ""
        if named and named != asked and self._is_cut(named) and not was_forwarding:
            self._leader, self._through = named, asked
            return 0.0
        if named and named != self._leader:
            self._leader = named
            return 0.0 if self._failures == 1 else self._wait_s()
        self._leader = ""
        self._ask_next()
        return self._wait_s()

    def _is_cut(self, address: str) -> bool:
        return self._cuts is not None and address in self._cuts

    def _ask_next(self) -> None:
        """The next node; unreachable ones come last."""
        for _ in self._addresses:
            self._position = (self._position + 1) % len(self._addresses)
            if not self._is_cut(self._addresses[self._position]):
                return
        self._position = (self._position + 1) % len(self._addresses)

    def _wait_s(self) -> float:
        """Pause that doubles with each failure, with jitter so that clients do not return at once."""
        bound = min(BACKOFF_S_MIN * 2.0 ** min(self._failures - 1, 10), BACKOFF_S_MAX)
        return bound * (0.5 + self._random.random() / 2)
