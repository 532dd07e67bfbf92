"""The simulated network: delays, reordering, lost and duplicated requests, lost answers, one-way partitions.

It carries the same requests as ``stratalog_core.rpc.tcp`` with the same guarantees: ``Unavailable`` only if a request was never
sent, ``OutcomeUnknown`` if it was sent and no answer came. Bytes are copied at both ends, so that no memory is shared.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from simulation.world.connections import Connections
from simulation.world.loop import CURRENT, Process, SimulatedLoop
from stratalog_core.connections import framing
from stratalog_core.errors import Conflict, OutcomeUnknown, StratalogError, Unavailable
from stratalog_core.ports import Buffer, Connection, Handler, OnReply
from stratalog_core.rpc.awaited_calls import call_by_send
from stratalog_metadata.protocol import messages

NEVER_REPEATED: Final = frozenset({messages.PROPOSE, messages.FORWARD})
"""Methods whose senders do not retry once a request may have arrived: neither they nor TCP deliver it twice.

A second copy of a proposal would be a fault that cannot occur, and would be blamed on the product: the copy is refused because
of the first one's changes, and if that answer comes first, the sender sees a conflict although its command took effect.
"""


@dataclass(slots=True)
class LinkFaults:
    """Chances per message, and delays in seconds."""

    delay_mean_s: float = 0.0005
    slow_chance: float = 0.01
    slow_s: float = 0.05
    loss_chance: float = 0.0
    duplicate_chance: float = 0.002
    """A request arrives twice. TCP does not do that; senders that retry do (exceptions: ``NEVER_REPEATED``)."""


BROKEN: Final = math.inf
"""Fate of an answer whose connection breaks: the sender learns at once that the outcome is unknown."""


class Message(NamedTuple):
    """The parts of a message that a nemesis may see: a request on its way to ``target``, or the answer on its way back."""

    source: str
    target: str
    method: int
    is_answer: bool


def hold_nothing_up(message: Message) -> float | None:
    return 0.0


class _Server:
    def __init__(self, handler: Handler, process: Process | None) -> None:
        self.handler = handler
        self.process = process

    @property
    def alive(self) -> bool:
        return self.process is None or self.process.alive


class Network:
    """All links. ``cut`` holds (source machine, target machine) pairs that carry nothing; an address's host is its machine."""

    def __init__(self, loop: SimulatedLoop, randomness: random.Random) -> None:
        self.loop = loop
        self.randomness = randomness
        self.faults = LinkFaults()
        self.cut: set[tuple[str, str]] = set()
        self.hold_up: Callable[[Message], float | None] = hold_nothing_up
        """Returns the extra seconds that a message takes, or None if it is lost; for an answer also ``BROKEN``."""
        self.on_answer: Callable[[str, int, memoryview, memoryview | StratalogError], None] = lambda *answered: None
        """Called for each answer that a machine gives, lost or not: machine, method, request, answer."""
        self.on_settled: Callable[[int, memoryview, memoryview | StratalogError], None] = lambda *settled: None
        """Called with the result that each request's sender learns: method, request, answer."""
        self.connections = Connections(self, random.Random(f"connections {randomness.random()}"))
        self._servers: dict[str, _Server] = {}
        self._next_port = 10_000

    def bind(self, address: str) -> str:
        """Return the address, with a new port for port 0. Raises ``Conflict`` if a live process listens there."""
        host, _, port = address.rpartition(":")
        if port == "0":
            self._next_port += 1
            address = f"{host}:{self._next_port}"
        if self.server(address) is not None:
            raise Conflict(f"{address} is in use by another process")
        return address

    def listen(self, address: str, handler: Handler) -> None:
        self._servers[self.bind(address)] = _Server(handler, CURRENT.get())

    def forget(self, address: str) -> None:
        self._servers.pop(address, None)

    def server(self, address: str) -> _Server | None:
        server = self._servers.get(address)
        return server if server is not None and server.alive else None

    def carries(self, source: str, target: str) -> bool:
        """Return whether a message sent now gets through."""
        if self.cut and (source, target) in self.cut:
            return False
        return not self.faults.loss_chance or self.randomness.random() >= self.faults.loss_chance

    def held_s(self, source: str, target: str, method: int, is_answer: bool) -> float | None:
        """See ``hold_up``."""
        if self.hold_up is hold_nothing_up:
            return 0.0
        return self.hold_up(Message(source, target, method, is_answer))

    def delay_s(self) -> float:
        faults, draw = self.faults, self.randomness.random
        delay_s = -math.log(1.0 - draw()) * faults.delay_mean_s
        return delay_s + faults.slow_s * draw() if draw() < faults.slow_chance else delay_s


class SimulatedRequest:
    """See :class:`stratalog_core.ports.Request`."""

    __slots__ = ("_answer", "body", "connection", "method")

    def __init__(self, method: int, body: memoryview, answer: OnReply, connection: Connection) -> None:
        self.method = method
        self.body = body
        self.connection = connection
        self._answer = answer

    def reply(self, *parts: Buffer) -> None:
        self._answer(memoryview(bytearray().join(parts)))

    def fail(self, error: StratalogError) -> None:
        self._answer(framing.decode_error(framing.encode_error(error)))


class _Call:
    """One request in flight: settled by its answer or its timeout, whichever is first."""

    __slots__ = ("_address", "_body", "_method", "_network", "_on_reply", "_timer", "settled")

    def __init__(
        self, network: Network, address: str, method: int, body: memoryview, on_reply: OnReply, timeout_s: float
    ) -> None:
        self._network = network
        self._address = address
        self._method = method
        self._body = body
        self._on_reply = on_reply
        self.settled = False
        self._timer = network.loop.call_later(timeout_s, self._expire)

    def _expire(self) -> None:
        self.settle(OutcomeUnknown(f"no answer from {self._address} in time"))

    def settle(self, answer: memoryview | StratalogError) -> None:
        if self.settled:
            return
        self.settled = True
        self._timer.cancel()
        self._network.on_settled(self._method, self._body, answer)
        self._on_reply(answer)


class SimulatedChannel:
    """See :class:`stratalog_core.ports.Channel`."""

    def __init__(self, network: Network, source: str, address: str) -> None:
        self._network = network
        self._source = source
        self._address = address
        self._target = address.rpartition(":")[0]
        self._closed = False

    @property
    def address(self) -> str:
        return self._address

    def send(self, method: int, parts: Sequence[Buffer], on_reply: OnReply, timeout_s: float) -> None:
        loop = self._network.loop
        if self._closed:
            loop.call_soon(on_reply, Unavailable(f"the channel to {self._address} is closed"))
            return
        client = CURRENT.get()
        body = memoryview(bytearray().join(parts))
        network, source, target = self._network, self._source, self._target
        call = _Call(network, self._address, method, body, on_reply, timeout_s)
        if network.server(self._address) is None and (source, target) not in network.cut:
            loop.call_later(network.delay_s(), call.settle, Unavailable(f"{self._address} refuses the connection"))
            return
        held_s = network.held_s(source, target, method, False)
        if not network.carries(source, target) or held_s is None:
            return

        def answered(answer: memoryview | StratalogError) -> None:
            network.on_answer(target, method, body, answer)
            held_s = network.held_s(target, source, method, True)
            if network.carries(target, source) and held_s is not None:
                if held_s == BROKEN:
                    held_s, answer = 0.0, self._broken()
                loop.call_later_as(client, held_s + network.delay_s(), call.settle, answer)

        delay_s = held_s + network.delay_s()
        loop.call_later_as(None, delay_s, self._arrive, method, body, answered, call, client)
        is_repeated = network.randomness.random() < network.faults.duplicate_chance
        if is_repeated and method not in NEVER_REPEATED:
            again = memoryview(bytearray(body))
            loop.call_later_as(None, delay_s + network.delay_s(), self._arrive, method, again, answered, call, client)

    def _arrive(self, method: int, body: memoryview, answered: OnReply, call: _Call, client: Process | None) -> None:
        server = self._network.server(self._address)
        if server is None:
            self._network.loop.call_later_as(client, self._network.delay_s(), call.settle, self._broken())
            return
        connection = self._network.connections.over(client, self._source, self._address, server.process)
        request = SimulatedRequest(method, body, answered, connection)
        self._network.loop.deliver_as(server.process, server.handler, request)

    def _broken(self) -> OutcomeUnknown:
        return OutcomeUnknown(f"the connection to {self._address} was lost before the answer")

    async def call(self, method: int, parts: Sequence[Buffer], timeout_s: float) -> memoryview:
        return await call_by_send(self, method, parts, timeout_s)

    def on_lost(self, callback: Callable[[], None]) -> Callable[[], None]:
        return self._network.connections.listen(CURRENT.get(), self._address, callback)

    async def close(self) -> None:
        self._closed = True


class _SimulatedBound:
    """See :class:`stratalog_core.ports.Bound`."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self.address = network.bind(address)

    async def listen(self, handler: Handler) -> _SimulatedListener:
        self._network.listen(self.address, handler)
        return _SimulatedListener(self._network, self.address)

    def close(self) -> None:
        pass


class _SimulatedListener:
    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self.address = address

    async def close(self) -> None:
        self._network.forget(self.address)


class SimulatedTransport:
    """The network as one machine sees it; see :class:`stratalog_core.ports.Transport`."""

    def __init__(self, network: Network, machine: str) -> None:
        self._network = network
        self._machine = machine
        self._channels: dict[str, SimulatedChannel] = {}

    def channel(self, address: str) -> SimulatedChannel:
        if address not in self._channels:
            self._channels[address] = SimulatedChannel(self._network, self._machine, address)
        return self._channels[address]

    async def bind(self, address: str) -> _SimulatedBound:
        return _SimulatedBound(self._network, address)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
