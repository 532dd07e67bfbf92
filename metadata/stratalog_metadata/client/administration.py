"""Administration of the quorum: its status and members, changed one node at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from stratalog_core.errors import NotFound, OutcomeUnknown, Retriable, StratalogError, Unavailable
from stratalog_core.ports import Clock, Random, Transport
from stratalog_metadata.client.routing import Router
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import ChangeAnswer, ChangeRequest, StatusAnswer, StatusRequest

REQUEST_TIMEOUT_S: Final = 5.0
POLL_S: Final = 0.2
Answer = TypeVar("Answer", bound=msgspec.Struct)


class QuorumAdministration:
    """``addresses`` are ``host:port`` of any nodes of the quorum."""

    def __init__(self, addresses: Sequence[str], transport: Transport, clock: Clock, random: Random) -> None:
        self._addresses = tuple(addresses)
        self._transport = transport
        self._clock = clock
        self._router = Router(addresses, random)

    async def status(self, timeout_s: float = 10.0) -> StatusAnswer:
        """The leader's status; without a leader, that of any node that answers. Raises ``Unavailable``."""
        deadline = self._clock.monotonic() + timeout_s
        seen: StatusAnswer | None = None
        while (left_s := deadline - self._clock.monotonic()) > 0:
            for address in dict.fromkeys([seen.leader_address if seen else "", *self._addresses]):
                if not address:
                    continue
                try:
                    answer = await self._ask(address, messages.STATUS, StatusRequest(), StatusAnswer, min(left_s, 1.0))
                except (Retriable, OutcomeUnknown):
                    continue
                if answer.node_id == answer.leader:
                    return answer
                seen = answer
            await asyncio.sleep(min(POLL_S, left_s))
        if seen is None:
            raise Unavailable(f"no metadata node answers at {', '.join(self._addresses)}")
        return seen

    async def add(self, node_id: int, address: str, timeout_s: float = 60.0, *, wait: bool = True) -> None:
        """Add the node that waits at ``address`` as a learner. With ``wait``, return when it has caught up and votes.

        For a member that still has its own disk, record the new address.

        Raises ``Conflict`` (node id or address is taken), ``Invalid`` (not an empty node with that id) or ``Unavailable``.
        """
        deadline = self._clock.monotonic() + timeout_s
        await self._change(ChangeRequest(node_id=node_id, address=address), timeout_s)
        while wait and not await self._votes(node_id):
            if self._clock.monotonic() > deadline:
                raise Unavailable(
                    f"node {node_id} is a learner and has not caught up yet: `stratalog metadata status` shows how far it is"
                )
            await asyncio.sleep(POLL_S)

    async def remove(self, node_id: int, timeout_s: float = 30.0) -> None:
        """Remove a node and return when the change is committed. Raises ``NotFound``, ``Invalid`` (the only voter) or
        ``Unavailable``.
        """
        await self._change(ChangeRequest(node_id=node_id), timeout_s)

    async def _votes(self, node_id: int) -> bool:
        status = await self.status()
        return any(member.node_id == node_id and member.voter for member in status.members)

    async def _change(self, request: ChangeRequest, timeout_s: float) -> None:
        """Request a change until it is answered. Repeating it is safe: it is made once, and later answers confirm it."""
        deadline = self._clock.monotonic() + timeout_s
        last: StratalogError = Unavailable("the deadline passed before the request")
        may_be_done = False
        while (left_s := deadline - self._clock.monotonic()) > 0:
            try:
                await self._ask(
                    self._router.address, messages.CHANGE_MEMBERS, request, ChangeAnswer, min(left_s, REQUEST_TIMEOUT_S)
                )
            except (Retriable, OutcomeUnknown) as failed:
                last = failed
                may_be_done = may_be_done or isinstance(failed, OutcomeUnknown)
                await asyncio.sleep(max(self._router.failed(failed), 0.02))
            except NotFound:
                if may_be_done:
                    return
                raise
            else:
                return
        raise Unavailable(f"the change was not made in time: {last.message}")

    async def _ask(self, address: str, method: int, request: msgspec.Struct, kind: type[Answer], timeout_s: float) -> Answer:
        channel = self._transport.channel(address)
        return messages.decode(await channel.call(method, (messages.encode(request),), timeout_s), kind)
