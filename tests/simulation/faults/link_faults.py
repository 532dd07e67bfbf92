"""What happens to messages of one kind on one link: lost, or late. The links of a network hardly ever fail evenly.

A nemesis that cuts whole machines off never lets a read through where a fence was lost. Protocols must not care which of their
messages are late; mistakes in them mostly show when exactly one is.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from simulation.world.network import Message, Network

LOST = None


class LinkFaults:
    """Installs itself. ``set`` says what messages meet from now on: seconds more, or ``LOST``."""

    def __init__(self, network: Network) -> None:
        self._held: dict[Message, float | None] = {}
        network.hold_up = lambda message: self._held.get(message, 0.0)

    def set(self, source: str, target: str, method: int, fate: float | None, *, answers: bool = False) -> None:
        """For requests of ``method`` from ``source`` to ``target``; with ``answers`` for what ``target`` answers to them."""
        message = Message(target, source, method, True) if answers else Message(source, target, method, False)
        self._held[message] = fate

    def clear(self, machine: str) -> None:
        """All is well again on every link of this machine. What is held up stays so."""
        self._held = {message: fate for message, fate in self._held.items() if machine not in (message.source, message.target)}

    def draw(
        self,
        randomness: random.Random,
        source: str,
        targets: Iterable[str],
        methods: Sequence[int],
        *,
        calm: float,
        late_s: float,
    ) -> None:
        """A fate for each method on each link, there and back; ``calm`` is the chance that nothing is wrong with it."""
        for target in targets:
            for method in methods:
                for answers in (False, True):
                    if randomness.random() >= calm:
                        fate = LOST if randomness.random() < 0.4 else randomness.uniform(0.01, late_s)
                        self.set(source, target, method, fate, answers=answers)
