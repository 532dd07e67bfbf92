"""How one leader follows another, played on a stage. In each script one rule is all that keeps an entry.

The parts a to e are drawn from the seed. A node that was refused has learnt the term, and asks again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from simulation.stage import Stage, begin, other_side

ASKS: Final = 3
"""So often a node asks for votes: enough to get past a term that others have seen meanwhile."""


def entry_of_an_earlier_term(randomness: random.Random) -> None:
    """Figure 8 of the Raft paper. An entry comes to stand at a majority when its term is over, and can still be overruled."""
    stage = Stage(randomness, founders=5)
    a, b, c, d, e = stage.parts
    begin(stage, a)
    stage.split((a, b), (c, d, e))
    stage.write(a)
    term, index = stage.cores[a].log.last
    stage.deaf = {c, d}
    stage.elect(e)
    stage.deaf = set()
    stage.split((a, b, c), (d, e))
    stage.forsake(a)
    stage.withheld = {(c, stage.cores[e].term + later) for later in range(1, ASKS + 1)}
    _elect_in_the_end(stage, a)
    assert all(stage.cores[each].log.term_at(index) == term for each in (a, b, c)), "the old entry stands at a majority"
    stage.withheld = set()
    stage.split((c, d, e), (a, b))
    stage.forsake(e)
    _elect_in_the_end(stage, e)
    stage.write(e)
    stage.split(stage.parts)
    stage.elect(a)


def candidate_that_lacks_an_entry(randomness: random.Random) -> None:
    """Whoever was away for a committed entry asks the one node of the majority that it meets for its vote."""
    stage = Stage(randomness, founders=3)
    a, b, c, *_ = stage.parts
    begin(stage, a)
    stage.split((a, b), (c,))
    stage.write(a)
    assert stage.cores[a].commit == stage.cores[a].log.last_index, "two of three have it"
    stage.split((b, c), (a,))
    _elect_in_the_end(stage, c)
    stage.write(c)
    _elect_in_the_end(stage, b)
    stage.write(b)
    stage.split(stage.parts)
    stage.elect(b)


def two_candidates_in_one_term(randomness: random.Random) -> None:
    """Either lacks one more vote, and both ask the same node, which has no entry of the term yet."""
    stage = Stage(randomness, founders=5)
    a, b, c, d, e = stage.parts
    begin(stage, a)
    stage.split((a, b, c), (c, d, e))
    stage.deaf = {c}
    stage.elect(b)
    stage.deaf = set()
    stage.elect(e)
    for leader in (b, e):
        stage.beat(leader)
        stage.write(leader)
    stage.split(stage.parts)
    _elect_in_the_end(stage, e)


def leader_alone(randomness: random.Random) -> None:
    """A leader that is cut off writes on; the others elect another."""
    stage = Stage(randomness, founders=3)
    a, b, c, *_ = stage.parts
    begin(stage, a)
    stage.split((a,), (b, c))
    stage.write(a)
    other_side(stage, b, a)


SCRIPTS: Final[tuple[Callable[[random.Random], None], ...]] = (
    entry_of_an_earlier_term,
    candidate_that_lacks_an_entry,
    two_candidates_in_one_term,
    leader_alone,
)


def _elect_in_the_end(stage: Stage, node_id: int) -> None:
    for _ in range(ASKS):
        if not stage.cores[node_id].is_leader:
            stage.elect(node_id)
