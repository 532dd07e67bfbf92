"""Faults of coordinators while an administrator changes a group: slow writes, lost writes, and a death right after an answer.

A coordinator whose writes are lost dies soon, as a machine that takes what it had not sent with it. So an answer that came
before its write is an answer to something that the next coordinator does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from simulation.world.machine import Machine, World
from simulation.world.network import Message
from stratalog_bookies.protocol import messages

SLOW_CHANCE: Final = 0.6
SLOW_S: Final = 0.4
LATE_ADD_S: Final = (0.05, 0.3)
DOOM_CHANCE: Final = 0.2
DOOMED_S: Final = 0.6
"""How long a coordinator lives at most whose writes are lost."""
DEATH_CHANCE: Final = 0.2
"""The chance that another one dies when it has answered."""
BACK_S: Final = (0.3, 1.0)


class CoordinatorFaults:
    """Has an effect between ``begin`` and ``end``. Coordinators are named by their addresses."""

    def __init__(self, world: World, brokers: Sequence[Machine]) -> None:
        self._world = world
        self._brokers = {broker.name: broker for broker in brokers}
        self._random = world.random("coordinator faults")
        self._slow_until: dict[str, float] = {}
        self._doomed: dict[str, int] = {}
        """By name: the incarnation whose writes are lost."""
        self._is_on = False
        self._hold_up = world.network.hold_up

    def begin(self) -> None:
        self._hold_up = self._world.network.hold_up
        self._is_on, self._world.network.hold_up = True, self._held

    def end(self) -> None:
        self._is_on, self._world.network.hold_up = False, self._hold_up
        self._doomed.clear()

    def slow_down(self, address: str) -> None:
        """Let the writes of a coordinator be late for a while, perhaps."""
        if self._happens(SLOW_CHANCE, "slow writes"):
            self._slow_until[self._at(address).name] = self._world.loop.time() + SLOW_S

    def lose_writes(self, address: str) -> None:
        """Let the writes of a coordinator be lost from now on, perhaps; it dies soon."""
        broker = self._at(address)
        if broker.is_up and broker.name not in self._doomed and self._happens(DOOM_CHANCE, "lost writes"):
            self._doomed[broker.name] = broker.starts
            self._world.loop.run_as(None, self._world.loop.call_later, DOOMED_S, self._die, broker, broker.starts)

    def answered(self, address: str) -> None:
        """Let a coordinator die that has answered a change: always if its writes are lost, else perhaps."""
        broker = self._at(address)
        if broker.name in self._doomed or self._happens(DEATH_CHANCE, "death after an answer"):
            self._world.loop.run_as(None, self._world.loop.call_soon, self._die, broker, broker.starts)

    def _die(self, broker: Machine, incarnation: int) -> None:
        if self._doomed.get(broker.name) == incarnation:
            del self._doomed[broker.name]
        if broker.is_up and broker.starts == incarnation:
            broker.crash()
            self._world.loop.call_later(self._random.uniform(*BACK_S), broker.boot)

    def _happens(self, chance: float, what: str) -> bool:
        is_drawn = self._random.random() < chance
        return self._is_on and is_drawn and self._world.decides(f"{what} {self._world.loop.time():.4f}")

    def _at(self, address: str) -> Machine:
        return self._brokers[address.rpartition(":")[0]]

    def _held(self, message: Message) -> float | None:
        if message.method == messages.ADD and not message.is_answer:
            if message.source in self._doomed:
                return None
            if self._slow_until.get(message.source, 0.0) > self._world.loop.time():
                return self._random.uniform(*LATE_ADD_S)
        return self._hold_up(message)
