"""Nodes that do not answer this client although others may; each is probed in the background until it answers.

All parts of a client share one: the first to find the leader unreachable saves the others the wait, and requests go through a
follower meanwhile (``routing.py``).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from stratalog_core.errors import OutcomeUnknown, StratalogError, Unavailable
from stratalog_core.ports import Transport
from stratalog_metadata.protocol import messages

PROBE_S: Final = 1.0
"""Seconds to wait for a probe's answer, and between probes."""


class UnreachablePeers:
    """Create it in a running event loop; ``close`` it before the transport. Bounded by the nodes that the client knows."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle | None] = {}
        self._closed = False

    def __contains__(self, address: object) -> bool:
        return address in self._timers

    def lost(self, address: str) -> None:
        """Record that a request was not answered. If the node answers the first probe, it was reachable."""
        if address not in self._timers and not self._closed:
            self._probe(address)

    def close(self) -> None:
        self._closed = True
        for timer in self._timers.values():
            if timer is not None:
                timer.cancel()

    def _probe(self, address: str) -> None:
        self._timers[address] = None
        hello = messages.encode(messages.HelloRequest())
        self._transport.channel(address).send(messages.HELLO, (hello,), partial(self._answered, address), PROBE_S)

    def _answered(self, address: str, answer: memoryview | StratalogError) -> None:
        if self._closed:
            return
        if isinstance(answer, Unavailable | OutcomeUnknown):
            self._timers[address] = self._loop.call_later(PROBE_S, self._probe, address)
        else:
            del self._timers[address]
