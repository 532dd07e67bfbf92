"""Sends the client's proposals; those of one turn of the event loop travel in one request if they wait equally long.

A command is sent again only if it certainly had no effect: it was never sent, or the quorum said so. Any other failure after
it was sent is ``OutcomeUnknown``, so no command takes effect twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from stratalog_core.errors import (
    Invalid,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    Retriable,
    StratalogError,
    Unavailable,
)
from stratalog_core.ports import Clock, Random, Transport
from stratalog_metadata.client.routing import Router
from stratalog_metadata.client.unreachable_peers import UnreachablePeers
from stratalog_metadata.client.view import LocalView
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import CommandAnswer, ProposeAnswer, ProposeRequest
from stratalog_metadata.state.commands import Applied, Command

BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
WAITING_MAX: Final = 100_000
LATER_S_MAX: Final = 0.25
"""Longest time for which a proposal waits beyond its deadline for others in its request."""
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Proposal:
    encoded: bytes
    deadline: float
    future: asyncio.Future[CommandAnswer]


class Proposer:
    def __init__(
        self,
        addresses: Sequence[str],
        transport: Transport,
        clock: Clock,
        random: Random,
        view: LocalView,
        cuts: UnreachablePeers | None = None,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._view = view
        self._router = Router(addresses, random, cuts)
        self._loop = asyncio.get_running_loop()
        self._gathered: list[_Proposal] = []
        self._unanswered = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: dict[asyncio.Future[memoryview], str] = {}
        """Requests in progress, with the address that they were sent to."""
        self._closed = False

    @property
    def leader(self) -> str:
        """Address of the leader that proposals have found; empty if unknown."""
        return self._router.leader

    def leader_moved(self, address: str) -> None:
        """Give up requests to other nodes: another node leads now.

        A leader that is suspended, or whose machine is gone, may never answer and leaves its connections open.
        """
        for reply, asked in self._asked.items():
            if asked != address and not reply.done():
                reply.set_exception(OutcomeUnknown(f"{asked} did not answer, and {address} leads now"))

    def learn(self, addresses: Sequence[str]) -> None:
        """Adopt the addresses of the quorum's members."""
        self._router.learn(addresses)

    async def propose(self, command: Command, timeout_s: float) -> Applied:
        """See :meth:`stratalog_metadata.client.api.MetadataClient.propose`."""
        encoded = _encode(command)
        if self._closed:
            raise Unavailable("the metadata client is closed")
        if len(encoded) > messages.COMMAND_BYTES_MAX:
            raise Invalid(f"a command has {len(encoded)} bytes; maximum is {messages.COMMAND_BYTES_MAX}: split it")
        if self._unanswered >= WAITING_MAX:
            raise Overloaded(f"{WAITING_MAX} proposals are waiting for answers, which is the maximum: retry later")
        deadline = self._clock.monotonic() + timeout_s
        proposal = _Proposal(encoded, deadline, self._loop.create_future())
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered.append(proposal)
        self._unanswered += 1
        try:
            answer = await proposal.future
        finally:
            self._unanswered -= 1
        await self._until_seen(answer, deadline)
        if answer.error is not None:
            raise messages.raised_error(answer.error)
        return Applied(index=answer.index, allocated=answer.allocated)

    async def _until_seen(self, answer: CommandAnswer, deadline: float) -> None:
        """Wait until the view has reached the answer, after a refusal too, so that the caller sees what caused it."""
        if self._view.index >= answer.index:
            return
        try:
            async with asyncio.timeout(max(deadline - self._clock.monotonic(), 0.0)):
                await self._view.reached(answer.index)
        except TimeoutError:
            if answer.error is None:
                text = f"the command took effect at {answer.index}, but the local view did not reach it in time"
                raise OutcomeUnknown(text, index=answer.index) from None

    async def close(self) -> None:
        self._closed = True
        gathered, self._gathered = self._gathered, []
        for proposal in gathered:
            _settle(proposal, Unavailable("the metadata client was closed before the command was sent"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- sending -----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        for batch in _cut(gathered):
            task = self._loop.create_task(self._carry(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, batch: Sequence[_Proposal]) -> None:
        """Send a batch until every proposal is answered; repeat those that certainly had no effect until their deadline."""
        waiting = list(batch)
        try:
            while waiting:
                waiting = await self._attempt(waiting)
        finally:
            for proposal in waiting:
                _settle(proposal, OutcomeUnknown("the metadata client was closed before the answer"))

    async def _attempt(self, batch: Sequence[_Proposal]) -> list[_Proposal]:
        """Send one request. Returns the proposals to send again, after waiting as long as required."""
        now = self._clock.monotonic()
        timeout_s = max(proposal.deadline for proposal in batch) - now
        request = ProposeRequest(commands=[proposal.encoded for proposal in batch])
        try:
            body = await self._ask(messages.encode(request), max(timeout_s, 0.001))
            answers = messages.decode(body, ProposeAnswer).answers
        except Retriable as refused:
            return await self._again(batch, refused)
        except StratalogError as failed:
            if isinstance(failed, OutcomeUnknown):
                self._router.failed(failed)
            for proposal in batch:
                _settle(proposal, failed)
            return []
        self._router.succeeded()
        return await self._distribute(batch, answers)

    async def _ask(self, request: bytes, timeout_s: float) -> memoryview:
        address = self._router.address
        method, body = self._router.addressed(messages.PROPOSE, request, timeout_s)
        reply: asyncio.Future[memoryview] = self._loop.create_future()
        self._asked[reply] = address
        try:
            self._transport.channel(address).send(method, (body,), partial(_answer, reply), timeout_s)
            return await reply
        finally:
            del self._asked[reply]

    async def _distribute(self, batch: Sequence[_Proposal], answers: Sequence[CommandAnswer]) -> list[_Proposal]:
        again = []
        for proposal, answer in zip(batch, answers, strict=True):
            if answer.error is not None and answer.error.code in (NotLeader.code, Unavailable.code):
                again.append(proposal)
            elif not proposal.future.done():
                proposal.future.set_result(answer)
        return await self._again(again, NotLeader()) if again else []

    async def _again(self, batch: Sequence[_Proposal], refused: StratalogError) -> list[_Proposal]:
        wait_s = self._router.failed(refused)
        if wait_s:
            await asyncio.sleep(wait_s)
        now = self._clock.monotonic()
        for proposal in batch:
            if proposal.deadline <= now:
                _settle(proposal, Unavailable(f"no metadata leader accepted the command in time: {refused.message}"))
        return [proposal for proposal in batch if not proposal.future.done()]


def _answer(reply: asyncio.Future[memoryview], answer: memoryview | StratalogError) -> None:
    if reply.done():
        return
    if isinstance(answer, StratalogError):
        reply.set_exception(answer)
    else:
        reply.set_result(answer)


def _settle(proposal: _Proposal, error: StratalogError) -> None:
    if not proposal.future.done():
        proposal.future.set_exception(error)


def _cut(proposals: Sequence[_Proposal]) -> list[list[_Proposal]]:
    """Split proposals into batches with about the same deadline, within the bounds of one request."""
    batches: list[list[_Proposal]] = []
    size = 0
    for proposal in sorted(proposals, key=lambda each: each.deadline):
        size += len(proposal.encoded)
        full = not batches or len(batches[-1]) >= messages.PROPOSE_COMMANDS_MAX or size > BATCH_BYTES_MAX
        if full or proposal.deadline > batches[-1][0].deadline + LATER_S_MAX:
            batches.append([])
            size = len(proposal.encoded)
        batches[-1].append(proposal)
    return batches
