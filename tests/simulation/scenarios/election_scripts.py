"""Scripts of successive leader elections on a harness. In each, a single rule is all that keeps an entry.

The nodes a to e are drawn from the seed. A node whose vote request was refused has learned the term, and asks again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from simulation.scenarios.raft_harness import RaftHarness, begin, other_side

ASKS: Final = 3
"""How often a node asks for votes: enough to get past a term that others have seen meanwhile."""


def entry_of_an_earlier_term(randomness: random.Random) -> None:
    """Figure 8 of the Raft paper. An entry reaches a majority after its term is over, and can still be overruled."""
    harness = RaftHarness(randomness, founders=5)
    a, b, c, d, e = harness.parts
    begin(harness, a)
    harness.split((a, b), (c, d, e))
    harness.write(a)
    term, index = harness.cores[a].log.last
    harness.deaf = {c, d}
    harness.elect(e)
    harness.deaf = set()
    harness.split((a, b, c), (d, e))
    harness.forsake(a)
    harness.withheld = {(c, harness.cores[e].term + later) for later in range(1, ASKS + 1)}
    _elect_in_the_end(harness, a)
    assert all(harness.cores[each].log.term_at(index) == term for each in (a, b, c)), "the old entry stands at a majority"
    harness.withheld = set()
    harness.split((c, d, e), (a, b))
    harness.forsake(e)
    _elect_in_the_end(harness, e)
    harness.write(e)
    harness.split(harness.parts)
    harness.elect(a)


def candidate_that_lacks_an_entry(randomness: random.Random) -> None:
    """A node that missed a committed entry asks the only node it reaches, one of the majority that has it, for its vote."""
    harness = RaftHarness(randomness, founders=3)
    a, b, c, *_ = harness.parts
    begin(harness, a)
    harness.split((a, b), (c,))
    harness.write(a)
    assert harness.cores[a].commit == harness.cores[a].log.last_index, "two of three have it"
    harness.split((b, c), (a,))
    _elect_in_the_end(harness, c)
    harness.write(c)
    _elect_in_the_end(harness, b)
    harness.write(b)
    harness.split(harness.parts)
    harness.elect(b)


def two_candidates_in_one_term(randomness: random.Random) -> None:
    """Both candidates lack one vote and ask the same node, which has no entry of the term yet."""
    harness = RaftHarness(randomness, founders=5)
    a, b, c, d, e = harness.parts
    begin(harness, a)
    harness.split((a, b, c), (c, d, e))
    harness.deaf = {c}
    harness.elect(b)
    harness.deaf = set()
    harness.elect(e)
    for leader in (b, e):
        harness.beat(leader)
        harness.write(leader)
    harness.split(harness.parts)
    _elect_in_the_end(harness, e)


def leader_alone(randomness: random.Random) -> None:
    """A leader that is cut off continues to write; the others elect another."""
    harness = RaftHarness(randomness, founders=3)
    a, b, c, *_ = harness.parts
    begin(harness, a)
    harness.split((a,), (b, c))
    harness.write(a)
    other_side(harness, b, a)


SCRIPTS: Final[tuple[Callable[[random.Random], None], ...]] = (
    entry_of_an_earlier_term,
    candidate_that_lacks_an_entry,
    two_candidates_in_one_term,
    leader_alone,
)


def _elect_in_the_end(harness: RaftHarness, node_id: int) -> None:
    for _ in range(ASKS):
        if not harness.cores[node_id].is_leader:
            harness.elect(node_id)
