"""The client's proposals: those of one turn of the event loop travel in one request.

A command is sent again only when it surely did nothing: it never left, or the quorum said so. Whatever else goes wrong
after it left is ``OutcomeUnknown``, so that no command takes effect twice.
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
        """Requests that are not answered yet, with the address they went to."""
        self._closed = False

    @property
    def leader(self) -> str:
        """Address of the leader as far as proposals have found it; else empty."""
        return self._router.leader

    def leader_moved(self, address: str) -> None:
        """Another node leads from now on: what an earlier one has not answered is given up.

        A leader that stands still, or whose machine is gone, may never answer and leaves its connections as they are.
        """
        for reply, asked in self._asked.items():
            if asked != address and not reply.done():
                reply.set_exception(OutcomeUnknown(f"{asked} did not answer, and {address} leads now"))

    def learn(self, addresses: Sequence[str]) -> None:
        """The quorum's members are at these addresses now."""
        self._router.learn(addresses)

    async def propose(self, command: Command, timeout_s: float) -> Applied:
        """See :meth:`stratalog_metadata.client.api.MetadataClient.propose`."""
        encoded = _encode(command)
        if self._closed:
            raise Unavailable("the metadata client is closed")
        if len(encoded) > messages.COMMAND_BYTES_MAX:
            raise Invalid(f"a command of {len(encoded)} bytes; the most is {messages.COMMAND_BYTES_MAX}: split it")
        if self._unanswered >= WAITING_MAX:
            raise Overloaded(f"{WAITING_MAX} proposals wait for their answers already")
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
        """After a refusal too: what stood in the way is in the view when the caller looks."""
        if self._view.index >= answer.index:
            return
        try:
            async with asyncio.timeout(max(deadline - self._clock.monotonic(), 0.0)):
                await self._view.reached(answer.index)
        except TimeoutError:
            if answer.error is None:
                text = f"the command took effect at {answer.index}, but the local view did not get there in time"
                raise OutcomeUnknown(text, index=answer.index) from None

    async def close(self) -> None:
        self._closed = True
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
        """Bring a batch to the leader; go on with those that surely did nothing until their time is up."""
        waiting = list(batch)
        try:
            while waiting:
                waiting = await self._attempt(waiting)
        finally:
            for proposal in waiting:
                _settle(proposal, OutcomeUnknown("the metadata client was closed before the answer"))

    async def _attempt(self, batch: Sequence[_Proposal]) -> list[_Proposal]:
        """One request; returns what is to be tried again, after the wait that is due."""
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
                _settle(proposal, Unavailable(f"no metadata leader took the command in time: {refused.message}"))
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
    """Batches within the bounds of one request."""
    batches: list[list[_Proposal]] = []
    size = 0
    for proposal in proposals:
        size += len(proposal.encoded)
        full = not batches or len(batches[-1]) >= messages.PROPOSE_COMMANDS_MAX or size > BATCH_BYTES_MAX
        if full:
            batches.append([])
            size = len(proposal.encoded)
        batches[-1].append(proposal)
    return batches
