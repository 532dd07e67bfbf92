"""Waiting reads and proposals of a node are bounded, and a refusal names the bound."""

from __future__ import annotations

import random
from typing import cast

import pytest

from stratalog_core.errors import Overloaded
from stratalog_core.ports import Request
from stratalog_metadata.node import linearizable_reads as reading
from stratalog_metadata.node.linearizable_reads import LinearizableReads
from stratalog_metadata.raft import HardState, LogTail, Membership, Raft, RaftSettings


def leader(settings: RaftSettings) -> Raft:
    """Return a single node, which is the leader."""
    core = Raft(
        settings,
        Membership.of_voters([1]),
        hard_state=HardState(),
        log=LogTail(),
        applied=0,
        random=random.Random(1),
        now=0.0,
    )
    core.tick(1.0)
    while (ready := core.ready()) is not None:
        core.persisted(ready.number)
    assert core.is_leader
    return core


def test_reads_that_wait_for_the_quorum_are_bounded() -> None:
    core = leader(RaftSettings(node_id=1, reads_max=2))
    core.read(1)
    core.read(2)
    with pytest.raises(Overloaded, match="2 reads"):
        core.read(3)


def test_reads_that_wait_for_the_replica_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CONFIRMED_MAX", 2)
    reads = LinearizableReads(leader(RaftSettings(node_id=1)))
    request = cast(Request, object())
    for context in (1, 2):
        reads.begin(request, lambda _: None)
        reads.ready(context, 9)
    with pytest.raises(Overloaded, match="wait for this node to apply"):
        reads.begin(request, lambda _: None)


def test_uncommitted_proposals_are_bounded() -> None:
    core = leader(RaftSettings(node_id=1, uncommitted_entries_max=3, uncommitted_bytes_max=100))
    core.propose([b"a", b"b"])
    with pytest.raises(Overloaded, match="maximum is 3"):
        core.propose([b"c", b"d"])
    with pytest.raises(Overloaded, match="maximum is 100"):
        core.propose([b"c" * 200])
