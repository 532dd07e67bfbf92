"""Bounds and intervals of the Raft core."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RaftSettings:
    """``election_timeout_s``: a follower starts an election after one to two of them without a leader; a leader steps down
    after one without a quorum's answers. ``committed_max``: entries to apply in one ``Ready``. ``uncommitted_*_max``:
    bounds on what is proposed and not committed. ``identity``: the identity of this node's disk.
    """

    node_id: int
    identity: str = ""
    election_timeout_s: float = 0.5
    heartbeat_s: float = 0.1
    append_bytes_max: int = 1024 * 1024
    in_flight_max: int = 64
    snapshot_chunk_bytes: int = 1024 * 1024
    snapshot_bytes_max: int = 1024 * 1024 * 1024
    uncommitted_bytes_max: int = 64 * 1024 * 1024
    uncommitted_entries_max: int = 100_000
    committed_max: int = 1_000
    reads_max: int = 10_000

    def __post_init__(self) -> None:
        assert self.node_id > 0, "node ids are positive"
        assert 0 < self.heartbeat_s * 2 <= self.election_timeout_s, "an election needs at least two missed heartbeats"
