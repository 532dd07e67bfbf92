"""Simulated TCP connections for code that uses asyncio's transports and protocols: brokers and their Kafka clients.

A connection delivers written bytes in order, each piece after a delay. If the network carries nothing between its two machines,
or one end's process has crashed, the connection breaks and the other end is notified.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from simulation.world.loop import CURRENT, Process, SimulatedLoop
from simulation.world.network import Network

Protocol = asyncio.BufferedProtocol | asyncio.Protocol
BREAK_S = 0.3


class _Socket:
    def __init__(self, host: str, port: int) -> None:
        self._name = (host, port)

    def getsockname(self) -> tuple[str, int]:
        return self._name


class SimulatedServer:
    """The result of ``loop.create_server``, as far as our servers use it."""

    def __init__(self, streams: Streams, address: tuple[str, int], factory: Callable[[], Protocol]) -> None:
        self.sockets = [_Socket(*address)]
        self.factory = factory
        self.process = CURRENT.get()
        self._streams = streams
        self._address = address

    @property
    def is_open(self) -> bool:
        return self.process is None or self.process.alive

    def close(self) -> None:
        self._streams.servers.pop(self._address, None)

    async def wait_closed(self) -> None:
        pass


class End(asyncio.Transport):
    """One end of a connection. Bytes written here go to the other end's protocol."""

    def __init__(self, streams: Streams, machine: str, process: Process | None, protocol: Protocol) -> None:
        super().__init__({"peername": (machine, 0)})
        self._streams = streams
        self._machine = machine
        self._protocol = protocol
        self._is_broken = False
        self._arrives_at = 0.0
        self._held: list[bytes] | None = None
        self.process = process
        self.peer: End

    def connect(self, peer: End) -> None:
        self.peer = peer
        self._streams.loop.run_as(self.process, self._streams.loop.call_soon, self._protocol.connection_made, self)

    def write(self, data: Any) -> None:
        if self._is_broken:
            return
        if not self._streams.network.carries(self._machine, self.peer._machine):
            self._streams.loop.call_later_as(None, BREAK_S, self.break_off)
            self._is_broken = True
            return
        now = self._streams.loop.time()
        self._arrives_at = max(self._arrives_at, now + self._streams.network.delay_s())
        self._streams.loop.call_at_as(None, self._arrives_at, self.peer.receive, bytes(data))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def receive(self, data: bytes) -> None:
        """Deliver data from the network, in the process that owns this end."""
        if self.process is not None and not self.process.alive:
            self.peer.break_off()
        elif self._held is not None:
            self._held.append(data)
        elif not self._is_broken:
            self._streams.loop.deliver_as(self.process, self._deliver, data)

    def _deliver(self, data: bytes) -> None:
        if isinstance(self._protocol, asyncio.Protocol):
            self._protocol.data_received(data)
            return
        while data and not self._is_broken:
            room = memoryview(self._protocol.get_buffer(-1))
            taken = min(len(room), len(data))
            room[:taken] = data[:taken]
            data = data[taken:]
            self._protocol.buffer_updated(taken)

    def pause_reading(self) -> None:
        self._held = self._held if self._held is not None else []

    def resume_reading(self) -> None:
        held, self._held = self._held, None
        for data in held or []:
            self.receive(data)

    def is_reading(self) -> bool:
        return self._held is None

    def break_off(self) -> None:
        """Break the connection; both protocols get ``connection_lost``."""
        for end in (self, self.peer):
            end._lose()

    def _lose(self) -> None:
        if self in self._streams.ends:
            del self._streams.ends[self]
            self._is_broken = True
            self._streams.loop.run_as(self.process, self._streams.loop.call_soon, self._protocol.connection_lost, None)

    def close(self) -> None:
        self._streams.loop.call_later_as(None, self._streams.network.delay_s(), self.break_off)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._is_broken

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


class Streams:
    """All connections; installs itself as the loop's ``create_server`` and ``create_connection``."""

    def __init__(self, loop: SimulatedLoop, network: Network) -> None:
        self.loop = loop
        self.network = network
        self.servers: dict[tuple[str, int], SimulatedServer] = {}
        self.ends: dict[End, None] = {}
        loop.streams = self

    async def create_server(self, factory: Callable[[], Protocol], host: str, port: int) -> SimulatedServer:
        server = self.servers[host, port] = SimulatedServer(self, (host, port), factory)
        return server

    async def create_connection(self, protocol: Protocol, source: str, host: str, port: int) -> End:
        """Connect. Raises ``ConnectionRefusedError`` without a listener, ``TimeoutError`` if the link carries nothing."""
        if not self.network.carries(source, host):
            await asyncio.sleep(BREAK_S)
            raise TimeoutError
        await asyncio.sleep(self.network.delay_s())
        server = self.servers.get((host, port))
        if server is None or not server.is_open:
            raise ConnectionRefusedError
        near = End(self, source, CURRENT.get(), protocol)
        far = End(self, host, server.process, self.loop.run_as(server.process, server.factory))
        self.ends |= {near: None, far: None}
        near.connect(far)
        far.connect(near)
        return near

    def process_died(self, process: Process) -> None:
        """Reset the connections of a process that has died, as its machine's kernel does."""
        for end in [end for end in self.ends if end.process is process]:
            self.loop.call_later(self.network.delay_s(), end.break_off)
