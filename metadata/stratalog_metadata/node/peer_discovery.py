"""Asks the peers of a node with an empty directory for their identities until ``joining.py`` reaches a decision."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from stratalog_core.errors import StratalogError
from stratalog_core.ports import Transport
from stratalog_metadata.node import joining
from stratalog_metadata.node.joining import Begin
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import HelloAnswer, HelloRequest
from stratalog_metadata.storage.identity import Identity

ASK_TIMEOUT_S: Final = 2.0
WAIT_S_MIN: Final = 0.02
WAIT_S_MAX: Final = 0.5
_log = logging.getLogger(__name__)


class PeerDiscovery:
    """``addresses`` are those of all peers, this node's included."""

    def __init__(self, own: Identity, addresses: Mapping[int, str], transport: Transport) -> None:
        self._own = own
        self._addresses = addresses
        self._transport = transport
        self._said = ""

    async def until_begin(self) -> Begin:
        """Wait until the node may start, and return its members. Raises ``Invalid`` if it must not start."""
        wait_s = WAIT_S_MIN
        while True:
            decision = joining.decide(self._own, self._addresses, await self._ask_all())
            if isinstance(decision, Begin):
                return decision
            self._say(decision.reason)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, WAIT_S_MAX)

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            _log.warning("metadata node %d is waiting: %s", self._own.node_id, reason)

    async def _ask_all(self) -> dict[int, HelloAnswer]:
        others = sorted(self._addresses.keys() - {self._own.node_id})
        answers = await asyncio.gather(*(self._ask(other) for other in others))
        return {other: answer for other, answer in zip(others, answers, strict=True) if answer is not None}

    async def _ask(self, other: int) -> HelloAnswer | None:
        own = HelloRequest(
            node_id=self._own.node_id, identity=self._own.identity, address=self._addresses[self._own.node_id]
        )  # fmt: skip
        channel = self._transport.channel(self._addresses[other])
        try:
            answer = messages.decode(await channel.call(messages.HELLO, (messages.encode(own),), ASK_TIMEOUT_S), HelloAnswer)
        except StratalogError:
            return None
        return answer if answer.node_id == other else None
