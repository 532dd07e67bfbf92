"""The client of the metadata quorum: proposals, linearizable reads, sessions, and a view that follows the log.

The view follows one node by long polls: the leader if it is known, and the next node if that one fails or loses touch with the
leader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from stratalog_core.errors import OutcomeUnknown, Retriable, StratalogError, Unavailable
from stratalog_core.ports import Clock, Random, Transport
from stratalog_metadata.client.administration import QuorumAdministration
from stratalog_metadata.client.proposer import Proposer
from stratalog_metadata.client.routing import Router
from stratalog_metadata.client.sessions import SessionKeeper
from stratalog_metadata.client.unreachable_peers import UnreachablePeers
from stratalog_metadata.client.view import LocalView
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.broker_loads import BrokerLoad
from stratalog_metadata.protocol.messages import (
    LoadsAnswer,
    LoadsRequest,
    ReadAnswer,
    ReadRequest,
    ScanAnswer,
    ScanRequest,
    SnapshotAnswer,
    SnapshotRequest,
    StatusAnswer,
    WatchAnswer,
    WatchRequest,
)
from stratalog_metadata.records import QUORUM_KEY, Quorum, Versioned
from stratalog_metadata.state import snapshot
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import Applied, Command, ExpireSession, OpenSession

WATCH_WAIT_MS: Final = 1_000
WATCH_TIMEOUT_S: Final = 1.5
READ_TIMEOUT_S: Final = 1.0
CLOSE_TIMEOUT_S: Final = 10.0
SNAPSHOT_TIMEOUT_S: Final = 5.0
_log = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=msgspec.Struct)


class QuorumClient:
    """Implements :class:`stratalog_metadata.client.api.MetadataClient`. ``addresses`` are ``host:port`` of any nodes.

    Create it in a running event loop; ``start`` it before any other call; ``close`` it before the transport.
    """

    def __init__(self, addresses: Sequence[str], transport: Transport, clock: Clock, random: Random) -> None:
        self._addresses = tuple(addresses)
        self._transport = transport
        self._clock = clock
        self._random = random
        self._failure: StratalogError | None = None
        self._view = LocalView(self._failed)
        self._cuts = UnreachablePeers(transport)
        self._proposer = Proposer(addresses, transport, clock, random, self._view, self._cuts)
        self._sessions = SessionKeeper(
            addresses, transport, clock, random, self._proposer.leader_moved, self._failed, self._cuts
        )
        self._view.subscribe(self._sessions.follow)
        self._readers = Router(addresses, random, self._cuts)
        self._watched = Router(addresses, random)
        self._left = ""
        self._view.subscribe(self._learn_members)
        self._watching: asyncio.Task[None] | None = None

    @property
    def view(self) -> LocalView:
        return self._view

    @property
    def failure(self) -> StratalogError | None:
        """Why this process must end: a subscriber missed a change and may act on stale state. None if that has not
        happened.
        """
        return self._failure

    async def start(self, timeout_s: float = 30.0) -> None:
        """Load the view, which then contains everything that was committed before the call.

        Raises ``Unavailable`` if no quorum answers in time.
        """
        self._watching = asyncio.get_running_loop().create_task(self._watch_forever())
        try:
            await self.refresh(timeout_s)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop. Sessions are not ended: use ``close_session``."""
        await self._sessions.close()
        await self._proposer.close()
        self._cuts.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None

    def _failed(self, failure: Exception) -> None:
        """Expire all sessions at once: their holders must stop serving now, not when the process ends."""
        if self._failure is None:
            self._failure = StratalogError(
                f"part of this process could not follow the metadata log and may be stale: {failure!r}; the process ends:"
                " restart it, and report the traceback in its log"
            )
            self._sessions.expire_all()

    async def propose(self, command: Command, timeout_s: float = 10.0) -> Applied:
        """See :meth:`stratalog_metadata.client.api.MetadataClient.propose`. Raises ``failure`` once there is one."""
        if self._failure is not None:
            raise self._failure
        return await self._proposer.propose(command, timeout_s)

    async def refresh(self, timeout_s: float = 10.0) -> int:
        """See :meth:`stratalog_metadata.client.api.MetadataClient.refresh`."""
        deadline = self._clock.monotonic() + timeout_s
        answer = await self._ask_leader(messages.READ, ReadRequest(keys=[]), ReadAnswer, timeout_s)
        try:
            async with asyncio.timeout(max(deadline - self._clock.monotonic(), 0.0)):
                await self._view.reached(answer.index)
        except TimeoutError:
            raise Unavailable(f"the metadata view did not reach {answer.index} in time") from None
        return self._view.index

    async def read(self, keys: Sequence[str], timeout_s: float = 10.0) -> list[Versioned | None]:
        answer = await self._ask_leader(messages.READ, ReadRequest(keys=list(keys)), ReadAnswer, timeout_s)
        return answer.records

    async def scan(self, prefix: str, timeout_s: float = 10.0) -> list[Versioned]:
        deadline = self._clock.monotonic() + timeout_s
        found: list[Versioned] = []
        after = ""
        while True:
            left_s = deadline - self._clock.monotonic()
            page = await self._ask_leader(messages.SCAN, ScanRequest(prefix=prefix, after=after), ScanAnswer, left_s)
            found.extend(page.records)
            after = page.last_key
            if not after:
                return found

    async def loads(self, timeout_s: float = 10.0) -> list[BrokerLoad]:
        """Brokers' recent load reports, from the leader. Raises ``Unavailable``."""
        return (await self._ask_leader(messages.LOADS, LoadsRequest(), LoadsAnswer, timeout_s)).loads

    async def quorum_status(self, timeout_s: float = 10.0) -> StatusAnswer:
        quorum = self._view.find(Quorum, QUORUM_KEY)
        members = [member.address for member in quorum.members if member.address] if quorum is not None else []
        addresses = list(dict.fromkeys([*members, *self._addresses]))
        return await QuorumAdministration(addresses, self._transport, self._clock, self._random).status(timeout_s)

    async def open_session(
        self,
        holder: str,
        lease_ms: int,
        on_expired: Callable[[], None],
        grace_ms: int = 0,
        load: Callable[[], BrokerLoad | None] | None = None,
    ) -> int:
        sent_at = self._clock.monotonic()
        opening = OpenSession(holder=holder, lease_ms=lease_ms, grace_ms=grace_ms)
        applied = await self.propose(Command(updates=(opening,)))
        if self._failure is not None:
            raise self._failure
        session_id = applied.allocated[0]
        self._sessions.hold(session_id, lease_ms / 1000, sent_at, on_expired, grace_ms / 1000, load)
        return session_id

    async def close_session(self, session_id: int) -> None:
        self._sessions.release(session_id)
        await self._proposer.propose(Command(updates=(ExpireSession(session_id=session_id),)), CLOSE_TIMEOUT_S)

    # --- reads -------------------------------------------------------------------------------------------------------

    async def _ask_leader(self, method: int, request: msgspec.Struct, kind: type[Answer], wait_s: float) -> Answer:
        """Ask the leader; reads may be repeated. Raises ``Unavailable`` if no node answers in time."""
        deadline = self._clock.monotonic() + wait_s
        body = messages.encode(request)
        last: StratalogError = Unavailable("the deadline passed before the request")
        while (left_s := deadline - self._clock.monotonic()) > 0:
            channel = self._transport.channel(self._readers.address)
            timeout_s = min(left_s, READ_TIMEOUT_S)
            asked_method, asked_body = self._readers.addressed(method, body, timeout_s)
            try:
                answer = await channel.call(asked_method, (asked_body,), timeout_s)
            except (Retriable, OutcomeUnknown) as failed:
                last = failed
                await asyncio.sleep(min(self._readers.failed(failed), left_s))
                continue
            self._readers.succeeded()
            return messages.decode(answer, kind)
        raise Unavailable(f"no metadata leader answered in time: {last.message}")

    def _learn_members(self, changes: Sequence[Change]) -> None:
        """Use the addresses of the quorum's current members, besides the configured ones."""
        for change in changes:
            if change.key == QUORUM_KEY and change.after is not None and isinstance(change.after.record, Quorum):
                addresses = [member.address for member in change.after.record.members if member.voter and member.address]
                for learner in (self._readers, self._watched, self._proposer, self._sessions):
                    learner.learn(addresses)

    # --- watching ----------------------------------------------------------------------------------------------------

    async def _watch_forever(self) -> None:
        while True:
            try:
                await self._watch_once()
                wait_s = 0.0
            except StratalogError as failed:
                self._left = self._watched.address
                wait_s = self._watched.failed(failed)
            except Exception:
                _log.exception("following the metadata log failed unexpectedly")
                wait_s = WATCH_TIMEOUT_S
            if wait_s:
                await asyncio.sleep(wait_s)

    async def _watch_once(self) -> None:
        # Following the leader saves one message before this client's own proposals are in the view.
        if self._proposer.leader != self._left:
            self._watched.prefer(self._proposer.leader)
        if self._view.index == 0:
            await self._take_snapshot()
        request = messages.encode(WatchRequest(index=self._view.index, wait_ms=WATCH_WAIT_MS))
        channel = self._transport.channel(self._watched.address)
        body = await channel.call(messages.WATCH, (request,), WATCH_TIMEOUT_S)
        self._watched.succeeded()
        answer = messages.decode(body, WatchAnswer)
        if answer.too_old:
            await self._take_snapshot()
        else:
            self._view.follow(answer.index, answer.changes)

    async def _take_snapshot(self) -> None:
        content = bytearray()
        request = SnapshotRequest()
        channel = self._transport.channel(self._watched.address)
        while True:
            body = await channel.call(messages.SNAPSHOT, (messages.encode(request),), SNAPSHOT_TIMEOUT_S)
            answer = messages.decode(body, SnapshotAnswer)
            if answer.index == 0:
                raise Unavailable("the node no longer has the snapshot")
            content += answer.content
            if len(content) >= answer.total_bytes:
                break
            request = SnapshotRequest(index=answer.index, position=len(content))
        self._view.jump(snapshot.decode(content))
