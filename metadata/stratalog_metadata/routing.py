"""Which node to ask: the leader as far as it is known, else one after the other; waits grow between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stratalog_core.errors import Invalid, NotLeader, StratalogError
from stratalog_core.ports import Random

BACKOFF_S_MIN: Final = 0.005
BACKOFF_S_MAX: Final = 0.25


class Router:
    """One caller's path through the nodes. ``address`` is whom to ask now."""

    def __init__(self, addresses: Sequence[str], random: Random) -> None:
        if not addresses:
            raise Invalid("no metadata addresses are given: name at least one node as HOST:PORT")
        self._given = tuple(addresses)
        self._addresses = list(addresses)
        self._random = random
        self._position = 0
        self._failures = 0
        self._leader = ""

    def learn(self, addresses: Sequence[str]) -> None:
        """These are the nodes of today; the addresses that were given at the beginning are kept besides."""
        asked = self._addresses[self._position]
        self._addresses = list(dict.fromkeys([*addresses, *self._given]))
        self._position = self._addresses.index(asked) if asked in self._addresses else 0

    @property
    def addresses(self) -> tuple[str, ...]:
        """All nodes that are known."""
        return tuple(self._addresses)

    @property
    def address(self) -> str:
        return self._leader or self._addresses[self._position]

    @property
    def leader(self) -> str:
        """Address of the leader; empty while it is not known."""
        return self._leader

    def prefer(self, leader: str) -> None:
        """Somebody else has found the leader. Ignored while nodes fail: then the own search goes on."""
        if leader and not self._failures:
            self._leader = leader

    def succeeded(self) -> None:
        """The asked node is the right one."""
        self._leader = self.address
        self._failures = 0

    def failed(self, error: StratalogError) -> float:
        """The asked node is not; says how many seconds to wait before asking the next."""
        self._failures += 1
        named = str(error.detail.get("leader") or "") if isinstance(error, NotLeader) else ""
        if named and named != self._leader:
            self._leader = named
            return 0.0 if self._failures == 1 else self._wait_s()
        self._leader = ""
        self._position = (self._position + 1) % len(self._addresses)
        return self._wait_s()

    def _wait_s(self) -> float:
        """Doubling per failure, with jitter so that clients do not come back together."""
        bound = min(BACKOFF_S_MIN * 2.0 ** min(self._failures - 1, 10), BACKOFF_S_MAX)
        return bound * (0.5 + self._random.random() / 2)
