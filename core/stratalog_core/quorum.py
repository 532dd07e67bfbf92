"""Write-quorum and majority arithmetic, pure.

Notation is BookKeeper's: E bookies in the ensemble, Qw copies of each entry, Qa acknowledgements needed,
E >= Qw >= Qa >= 1. Entry ``i`` is stored on the Qw ensemble positions from ``i mod E`` on, wrapping.
"""

from __future__ import annotations

from collections.abc import Set

from stratalog_core.errors import Invalid


def majority(nodes: int) -> int:
    """Return the smallest size at which any two subsets of ``nodes`` nodes intersect."""
    return nodes // 2 + 1


def check_quorums(ensemble_size: int, write_quorum: int, ack_quorum: int) -> None:
    """Raise :class:`Invalid` unless E >= Qw >= Qa >= 1."""
    if not ensemble_size >= write_quorum >= ack_quorum >= 1:
        raise Invalid(
            f"ensemble size {ensemble_size}, write quorum {write_quorum} and ack quorum {ack_quorum}"
            " must satisfy E >= Qw >= Qa >= 1"
        )


def write_set(entry_id: int, ensemble_size: int, write_quorum: int) -> tuple[int, ...]:
    """Return the ensemble positions that store ``entry_id``."""
    first = entry_id % ensemble_size
    return tuple((first + step) % ensemble_size for step in range(write_quorum))


def absence_proved(write_quorum: int, ack_quorum: int, explicit_negatives: int) -> bool:
    """Whether ``explicit_negatives`` no-such-entry replies prove that an entry was never acknowledged.

    An acknowledged entry is on at least Qa of its Qw bookies, so at most Qw - Qa of them can lack it.
    """
    return explicit_negatives >= write_quorum - ack_quorum + 1


def fencing_complete(ensemble_size: int, write_quorum: int, ack_quorum: int, fenced: Set[int]) -> bool:
    """Whether no write set of the ensemble still has Qa bookies that are not fenced.

    ``fenced`` holds ensemble positions. Once this is true, the old writer cannot reach Qa for any entry.
    """
    return all(
        sum(position not in fenced for position in write_set(first, ensemble_size, write_quorum)) < ack_quorum
        for first in range(ensemble_size)
    )
