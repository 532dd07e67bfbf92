"""The client's sessions: renewed together, expired by the client's own clock.

Always: ``on_expired`` is called no later than one lease after the last successful renewal was *sent*. The quorum counts from
when it arrived and adds a margin, so the holder stops first.

A session with a grace may be ended earlier, when the leader sees its connection break (``controller/leases.py``). The client
therefore renews at once after a break, and calls ``on_expired`` as well when the log shows that the session has ended, or when
no node has been reached for longer than the grace.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from stratalog_core.errors import OutcomeUnknown, StratalogError, Unavailable
from stratalog_core.ports import Channel, Clock, Random, Transport
from stratalog_metadata.client.routing import Router
from stratalog_metadata.client.unreachable_peers import UnreachablePeers
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.broker_loads import BrokerLoad
from stratalog_metadata.protocol.messages import RenewAnswer, RenewRequest
from stratalog_metadata.records import Session
from stratalog_metadata.state.changes import Change

RENEWALS_PER_LEASE: Final = 4
SPACING_S: Final = 0.02
"""Minimum pause between two renewals, however often a connection breaks."""
RENEW_TIMEOUT_S_MAX: Final = 1.0
EARLY_S: Final = 0.001
"""Added to timers, which may fire a rounding error early."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    lease_s: float
    deadline: float
    on_expired: Callable[[], None]
    timer: asyncio.TimerHandle
    grace_s: float = 0.0


class SessionKeeper:
    """``on_leader_moved`` is called with the address of the node that renews when it changes; ``on_failed`` with the
    exception of a holder's ``on_expired``: the holder may still act as if it had a session.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        transport: Transport,
        clock: Clock,
        random: Random,
        on_leader_moved: Callable[[str], None],
        on_failed: Callable[[Exception], None],
        cuts: UnreachablePeers | None = None,
    ) -> None:
        self._has_several_nodes = len(addresses) > 1
        self._on_leader_moved = on_leader_moved
        self._on_failed = on_failed
        self._transport = transport
        self._clock = clock
        self._router = Router(addresses, random, cuts)
        self._leader = ""
        self._is_forwarded = False
        self._loop = asyncio.get_running_loop()
        self._held: dict[int, _Held] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._due = asyncio.Event()
        self._channel: Channel | None = None
        self._stop_listening: Callable[[], None] = lambda: None
        self._silent: set[str] = set()
        self._silent_since = 0.0
        self._load: Callable[[], BrokerLoad | None] = lambda: None

    def learn(self, addresses: Sequence[str]) -> None:
        """Adopt the addresses of the quorum's members."""
        self._router.learn(addresses)
        self._has_several_nodes = len(addresses) > 1

    def hold(
        self,
        session_id: int,
        lease_s: float,
        sent_at: float,
        on_expired: Callable[[], None],
        grace_s: float = 0.0,
        load: Callable[[], BrokerLoad | None] | None = None,
    ) -> None:
        """Keep a session alive that was opened by a command sent at ``sent_at`` (monotonic seconds)."""
        if load is not None:
            self._load = load
        deadline = sent_at + lease_s
        timer = self._loop.call_later(max(deadline - self._clock.monotonic(), 0.0), self._check, session_id)
        self._held[session_id] = _Held(lease_s, deadline, on_expired, timer, grace_s)
        self._due.set()
        if self._renewing is None:
            self._renewing = self._loop.create_task(self._renew_forever())

    def follow(self, changes: Sequence[Change]) -> None:
        """Expire held sessions that the log shows as ended."""
        for change in changes:
            if change.after is None and change.before is not None and isinstance(change.before.record, Session):
                session_id = change.before.record.session_id
                if session_id in self._held:
                    self._expire(session_id)

    def release(self, session_id: int) -> None:
        """Stop renewing a session; ``on_expired`` is not called."""
        held = self._held.pop(session_id, None)
        if held is not None:
            held.timer.cancel()

    def expire_all(self) -> None:
        """Expire every session; nothing is renewed any more."""
        for session_id in list(self._held):
            self._expire(session_id)

    async def close(self) -> None:
        for session_id in list(self._held):
            self.release(session_id)
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        self._stop_listening()

    # --- renewals ----------------------------------------------------------------------------------------------------

    async def _renew_forever(self) -> None:
        while True:
            interval_s = min((held.lease_s for held in self._held.values()), default=1.0) / RENEWALS_PER_LEASE
            try:
                wait_s = await self._renew(interval_s) if self._held else interval_s
            except Exception:
                _log.exception("a renewal of sessions failed unexpectedly")
                wait_s = interval_s
            await self._pause(wait_s)

    async def _pause(self, wait_s: float) -> None:
        """Wait ``wait_s``, or until a connection breaks or a session is new."""
        await asyncio.sleep(min(wait_s, SPACING_S))
        with suppress(TimeoutError):
            async with asyncio.timeout(max(wait_s - SPACING_S, 0.0)):
                await self._due.wait()
        self._due.clear()

    def _listen(self, channel: Channel) -> None:
        if channel is not self._channel:
            self._stop_listening()
            self._channel, self._stop_listening = channel, channel.on_lost(self._due.set)

    async def _renew(self, interval_s: float) -> float:
        """Renew once. Returns the seconds until the next renewal."""
        sent_at = self._clock.monotonic()
        asked = list(self._held)
        timeout_s = min(RENEW_TIMEOUT_S_MAX, 2 * interval_s)
        request = messages.encode(RenewRequest(session_ids=asked, load=self._load()))
        method, request = self._router.addressed(messages.RENEW, request, timeout_s)
        channel = self._transport.channel(self._router.address)
        self._listen(channel)
        try:
            body = await channel.call(method, (request,), timeout_s)
            alive = set(messages.decode(body, RenewAnswer).alive)
        except StratalogError as failed:
            self._failed(failed, channel.address, sent_at)
            return self._router.failed(failed)
        self._router.succeeded()
        self._found_leader(channel.address, is_forwarded=method == messages.FORWARD)
        self._silent.clear()
        for session_id in asked:
            self._renewed(session_id, sent_at, session_id in alive)
        return interval_s

    def _found_leader(self, address: str, *, is_forwarded: bool) -> None:
        """Report the leader's address if it has changed. Requests in progress need not be given up when a direct link
        returns.
        """
        was_forwarded, self._is_forwarded = self._is_forwarded, is_forwarded
        if self._leader != address:
            self._leader = address
            if not was_forwarded:
                self._on_leader_moved(address)

    def _failed(self, failed: StratalogError, address: str, sent_at: float) -> None:
        """Expire sessions with a grace if no node has answered for longer than it.

        Either this client is cut off or all nodes are down. With a single node the two look the same, and a restarted node
        gives every session a full lease.
        """
        if not isinstance(failed, Unavailable | OutcomeUnknown) or failed.detail.get("forwarded"):
            self._silent.clear()
            return
        if not self._silent:
            self._silent_since = sent_at
        self._silent.add(address)
        if not self._has_several_nodes or not self._silent.issuperset(self._router.addresses):
            return
        silent_s = self._clock.monotonic() - self._silent_since
        for session_id in [number for number, held in self._held.items() if 0 < held.grace_s <= silent_s]:
            self._expire(session_id)

    def _renewed(self, session_id: int, sent_at: float, alive: bool) -> None:
        held = self._held.get(session_id)
        if held is None:
            return
        if alive:
            held.deadline = max(held.deadline, sent_at + held.lease_s)
        else:
            self._expire(session_id)

    def _check(self, session_id: int) -> None:
        held = self._held[session_id]
        left_s = held.deadline - self._clock.monotonic()
        if left_s > EARLY_S:
            held.timer = self._loop.call_later(left_s, self._check, session_id)
        else:
            self._expire(session_id)

    def _expire(self, session_id: int) -> None:
        held = self._held.get(session_id)
        if held is None:
            return
        self.release(session_id)
        try:
            held.on_expired()
        except Exception as failure:
            _log.exception("the holder of session %d failed while stopping", session_id)
            self._on_failed(failure)
