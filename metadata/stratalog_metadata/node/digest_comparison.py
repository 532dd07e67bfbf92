"""Compares this node's state digests with those of the other voters, and stops a node whose state differs.

Each node asks all others every few seconds. A node that a majority of the voters contradicts stops, because it does not know
what else is wrong. Without a majority (two voters, or one of three away) nobody knows which state is right, and a critical
message is logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from stratalog_core.errors import Corrupt, StratalogError
from stratalog_core.ports import Transport
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import DigestsAnswer, DigestsRequest
from stratalog_metadata.state.digest import SCHEMA, StateDigest
from stratalog_metadata.storage.identity import REPLACE

COMPARE_INTERVAL_S: Final = 5.0
ASK_TIMEOUT_S: Final = 2.0
_log = logging.getLogger(__name__)

Marks = Mapping[int, bytes]
"""Digests by the index of the log entry after which they were taken."""


class Verdict(Enum):
    AGREES = "agrees"
    UNDECIDED = "undecided"
    """Another node's state differs, and no majority decides which is right."""
    OUTVOTED = "outvoted"


class Comparison(NamedTuple):
    """``after`` is the first marked entry after which the nodes differ; 0 if they do not."""

    verdict: Verdict
    after: int = 0


def compare(own: Marks, others: Sequence[Marks], voters: int) -> Comparison:
    """Compare this node's marks with the marks that others answered; ``voters`` counts all voters, this node included."""
    majority = voters // 2 + 1
    undecided = 0
    for index in sorted(own):
        found = Counter(marks[index] for marks in others if index in marks)
        found[own[index]] += 1
        digest, count = found.most_common(1)[0]
        if digest != own[index] and count >= majority:
            return Comparison(Verdict.OUTVOTED, index)
        if len(found) > 1 and found[own[index]] < majority:
            undecided = undecided or index
    return Comparison(Verdict.UNDECIDED, undecided) if undecided else Comparison(Verdict.AGREES)


class DigestComparer:
    """``voters`` returns the addresses of the other voters (empty if unknown). ``on_failed`` is called when they outvote
    this node.
    """

    def __init__(
        self,
        node_id: int,
        digest: StateDigest,
        transport: Transport,
        voters: Callable[[], Iterable[str]],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._node_id = node_id
        self._digest = digest
        self._transport = transport
        self._voters = voters
        self._on_failed = on_failed

    def answer(self) -> DigestsAnswer:
        """The answer to DIGESTS: this node's marks."""
        return DigestsAnswer(schema=SCHEMA, marks=list(self._digest.marks.items()))

    async def run(self) -> None:
        """Compare at intervals until this node is outvoted."""
        while True:
            await asyncio.sleep(COMPARE_INTERVAL_S)
            found = await self.compare_once()
            if found.verdict is Verdict.OUTVOTED:
                self._on_failed(self._outvoted(found.after))
                return
            if found.verdict is Verdict.UNDECIDED:
                _log.critical(
                    "the state of metadata node %d differs from another node's after entry %d, and too few nodes answer to tell"
                    " whose is right: start the others, and back up the data directories",
                    self._node_id,
                    found.after,
                )

    async def compare_once(self) -> Comparison:
        """Ask all other voters and compare their marks with this node's."""
        addresses = list(self._voters())
        answers = await asyncio.gather(*map(self._ask, addresses))
        others = [dict(each.marks) for each in answers if each is not None and each.schema == SCHEMA]
        return compare(self._digest.marks, others, len(addresses) + 1)

    def _outvoted(self, index: int) -> Corrupt:
        return Corrupt(
            f"the state of metadata node {self._node_id} differs from a majority's after entry {index}: its disk or memory has"
            f" changed what it had applied. Keep a copy of its directory and replace the node: {REPLACE}"
        )

    async def _ask(self, address: str) -> DigestsAnswer | None:
        if not address:
            return None
        channel = self._transport.channel(address)
        try:
            body = await channel.call(messages.DIGESTS, (messages.encode(DigestsRequest()),), ASK_TIMEOUT_S)
            return messages.decode(body, DigestsAnswer)
        except StratalogError:
            # A node that is away, or runs a version without digests, does not count.
            return None
