"""Faults of messages of one kind on one link: lost or late. Links of a real network rarely fail evenly.

A nemesis that cuts whole machines off never lets a read through after it lost a fence. Protocols must not depend on which of
their messages are late; mistakes in them mostly show when exactly one is.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from simulation.world.network import Message, Network

LOST = None


class LinkFaults:
    """Per-link faults; installs itself in the network. ``set`` gives messages extra seconds, or ``LOST``."""

    def __init__(self, network: Network) -> None:
        self._held: dict[Message, float | None] = {}
        network.hold_up = lambda message: self._held.get(message, 0.0)

    def set(self, source: str, target: str, method: int, fate: float | None, *, answers: bool = False) -> None:
        """Set the fate of requests of ``method`` from ``source`` to ``target``, or with ``answers`` of the replies to them."""
        message = Message(target, source, method, True) if answers else Message(source, target, method, False)
        self._held[message] = fate

    def clear(self, machine: str) -> None:
        """Remove all faults from this machine's links. Messages that are already delayed stay delayed."""
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
        """Draw a fate for each method on each link, in both directions; ``calm`` is the chance of no fault."""
        for target in targets:
            for method in methods:
                for answers in (False, True):
                    if randomness.random() >= calm:
                        fate = LOST if randomness.random() < 0.4 else randomness.uniform(0.01, late_s)
                        self.set(source, target, method, fate, answers=answers)
