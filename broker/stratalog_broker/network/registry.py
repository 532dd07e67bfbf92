"""All client connections of a broker: bounds their number and the bytes that their requests hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final, Protocol

from stratalog_broker.configs.memory import MemoryShares
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.handlers import HANDLERS
from stratalog_broker.metrics import RequestMetrics
from stratalog_broker.network.admission import Admission
from stratalog_broker.requests.unsent_responses import UnsentResponses
from stratalog_core.connections.silent_clients import Client, SilentClients
from stratalog_core.ports import Clock

_log = logging.getLogger(__name__)
_REFUSALS_TOLD_S: Final = 10.0
SHARED_BUFFER_BYTES: Final = 64 * 1024


class ManagedConnection(Client, Protocol):
    """The part of a connection that the registry uses."""

    @property
    def is_idle(self) -> bool:
        """Whether all of its requests are answered."""
        ...

    def regulate(self) -> None:
        """Pause or resume reading according to the bounds."""
        ...

    def room_made(self) -> None:
        """Resume reading; requests hold fewer bytes than before."""
        ...

    def drain(self) -> None:
        """Stop accepting requests."""
        ...


class ConnectionRegistry:
    """All connections and the memory that their requests and responses occupy."""

    def __init__(
        self, settings: BrokerSettings, shares: MemoryShares, clock: Clock, admission: Admission, responses: UnsentResponses
    ) -> None:
        self.admission = admission
        self.frame_bytes_max = settings.frame_bytes_max
        self.connection_requests_max = settings.connection_requests_max
        self.responses = responses
        self.requests = RequestMetrics({key: info.name for key, info in HANDLERS.items()})
        self._connections_max = settings.connections_max
        self._request_bytes_max = shares.requests
        self.clock = clock
        self.shared_buffer = memoryview(bytearray(SHARED_BUFFER_BYTES))
        self.is_draining = False
        self.is_full = False
        """Requests fill their share of memory: no connection starts reading another request."""
        self._connections: dict[ManagedConnection, None] = {}
        """In the order in which they were opened, so that a simulated broker closes them in the same order in every run."""
        self._silent = SilentClients(self._connections, settings.connection_idle_ms / 1000)
        self._bytes_held = 0
        self._arriving_bytes = 0
        """Those of ``_bytes_held`` for requests that are still being received, for as long as their clients take."""
        self._has_arrived = False
        """They have become fewer since the stalled connections were last resumed."""
        self._stalled: dict[ManagedConnection, None] = {}
        self._making_room = False
        self._answered = asyncio.Event()
        self.refused = 0
        """Connections refused because ``connections_max`` were open."""
        self._refusals_told_until_s = 0.0

    @property
    def bytes_held(self) -> int:
        """Bytes of requests that are being read, handled or written."""
        return self._bytes_held

    def __len__(self) -> int:
        return len(self._connections)

    def opened(self, connection: ManagedConnection) -> bool:
        """Add a new connection; return False if ``connections_max`` are open already."""
        if len(self._connections) >= self._connections_max:
            self._count_refused()
            return False
        self._connections[connection] = None
        return True

    def _count_refused(self) -> None:
        """Count a refused connection; log at most once per interval, because refused clients reconnect immediately."""
        self.refused += 1
        now = self.clock.monotonic()
        if now >= self._refusals_told_until_s:
            self._refusals_told_until_s = now + _REFUSALS_TOLD_S
            text = "%d clients are connected, which is connections_max: further ones are closed at once (%d so far)"
            _log.warning(text, len(self._connections), self.refused)

    def closed(self, connection: ManagedConnection) -> None:
        self._connections.pop(connection, None)
        self._stalled.pop(connection, None)
        self._answered.set()

    def charge(self, request_bytes: int) -> bool:
        """Charge a request; return False if it does not fit now. A request is always admitted when no other is held.

        Then no connection starts reading another request, unless the room is taken by requests that are still arriving: the
        others are no reason why it does not fit, and their clients need not wait for a slow one.
        """
        if self._bytes_held and self._bytes_held + request_bytes > self._request_bytes_max:
            if not self._arriving_bytes or self._arriving_bytes + request_bytes <= self._request_bytes_max:
                self._set_full(True)
            return False
        self._bytes_held += request_bytes
        return True

    def arriving(self, request_bytes: int) -> None:
        """Note that a charged request is still being received."""
        self._arriving_bytes += request_bytes

    def arrived(self, request_bytes: int) -> None:
        """Note that such a request is complete, or will never be."""
        self._arriving_bytes -= request_bytes
        self._has_arrived = True
        if self._stalled:
            self._make_room_soon()

    def charge_more(self, request_bytes: int) -> None:
        """Charge more bytes for a request that is already held; never refused."""
        self._bytes_held += request_bytes

    def _set_full(self, is_full: bool) -> None:
        if self.is_full is not is_full:
            self.is_full = is_full
            for connection in list(self._connections):
                connection.regulate()

    def discharge(self, request_bytes: int) -> None:
        self._bytes_held -= request_bytes
        if self.is_full or (self._has_arrived and self._stalled):
            self._make_room_soon()

    def _make_room_soon(self) -> None:
        if not self._making_room:
            self._making_room = True
            asyncio.get_running_loop().call_soon(self._make_room)

    def wait_for_room(self, connection: ManagedConnection) -> None:
        """Register ``connection``: its ``room_made`` is called once when there is room again."""
        self._stalled[connection] = None

    def _make_room(self) -> None:
        self._making_room = False
        # Resume only below three quarters: each resumption calls every connection, so it must not follow each discharge.
        arriving = self._arriving_bytes
        if self._bytes_held - arriving > max(self._request_bytes_max - arriving, 0) // 4 * 3:
            return
        self._has_arrived = False
        self._set_full(False)
        stalled, self._stalled = self._stalled, {}
        for connection in stalled:
            connection.room_made()

    def sweep(self) -> None:
        """Close connections that were silent for too long or stopped within a frame; note which clients read responses."""
        self._silent.look()
        self.responses.look()

    async def drain(self, timeout_s: float) -> None:
        """Stop accepting requests and wait until those in progress are answered, for at most ``timeout_s``."""
        self.is_draining = True
        for connection in list(self._connections):
            connection.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(not connection.is_idle for connection in self._connections):
                    self._answered.clear()
                    await self._answered.wait()

    def became_idle(self) -> None:
        """Wake ``drain``: a connection has answered all of its requests."""
        self._answered.set()

    def close_all(self) -> None:
        for connection in list(self._connections):
            connection.close("the broker is stopping")
