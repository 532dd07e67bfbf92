"""Connections between simulated processes: when they break, and which end learns of it when.

The network carries requests one by one; a connection exists from the first request that arrives until one end's process dies,
or until it breaks at random. The kernel of a killed process notifies the other end, if the link carries anything; a machine
without power notifies nobody.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from simulation.world.loop import Process, SimulatedLoop
from stratalog_core.ports import Connection

SILENT_DEATH_CHANCE = 0.2
BREAK_CHANCE = 0.0005
"""Chance per request."""


class Link(Protocol):
    """The part of the network that connections use."""

    @property
    def loop(self) -> SimulatedLoop: ...
    def carries(self, source: str, target: str) -> bool: ...
    def delay_s(self) -> float: ...


class SimulatedConnection:
    """See :class:`stratalog_core.ports.Connection`."""

    def __init__(self, client: Process | None, server: Process | None) -> None:
        self.client = client
        self.server = server
        self.callbacks: list[Callable[[Connection], None]] = []

    def on_lost(self, callback: Callable[[Connection], None]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback) if callback in self.callbacks else None

    def tell(self) -> None:
        told, self.callbacks = self.callbacks, []
        for callback in told:
            callback(self)


class Connections:
    """All open connections, and the callbacks of clients' channels for broken ones."""

    def __init__(self, network: Link, randomness: random.Random) -> None:
        self._network = network
        self._random = randomness
        self.on_broken: Callable[[Process], None] = lambda client: None
        """Called when a client's connection breaks although the client lives."""
        self._standing: dict[tuple[Process | None, str, str], SimulatedConnection] = {}
        self._listeners: dict[tuple[Process | None, str], list[Callable[[], None]]] = {}

    def listen(self, client: Process | None, address: str, callback: Callable[[], None]) -> Callable[[], None]:
        listeners = self._listeners.setdefault((client, address), [])
        listeners.append(callback)
        return lambda: listeners.remove(callback) if callback in listeners else None

    def over(self, client: Process | None, source: str, address: str, server: Process | None) -> SimulatedConnection:
        """Return the connection of a request that arrives now; it may break first, at random."""
        key = (client, source, address)
        connection = self._standing.get(key)
        if connection is not None and self._random.random() < BREAK_CHANCE:
            self._break(key)
            connection = None
        if connection is None or connection.server is not server:
            connection = self._standing[key] = SimulatedConnection(client, server)
        return connection

    def process_died(self, process: Process) -> None:
        for key, connection in list(self._standing.items()):
            if process in (connection.client, connection.server):
                if self._random.random() < SILENT_DEATH_CHANCE:
                    del self._standing[key]
                else:
                    self._break(key)

    def _break(self, key: tuple[Process | None, str, str]) -> None:
        client, source, address = key
        connection = self._standing.pop(key)
        target = address.rpartition(":")[0]
        loop, network = self._network.loop, self._network
        if client is not None and client.alive:
            self.on_broken(client)
        if network.carries(source, target):
            loop.call_later_as(connection.server, network.delay_s(), connection.tell)
        if network.carries(target, source):
            for callback in self._listeners.get((client, address), ()):
                loop.call_later_as(client, network.delay_s(), callback)
