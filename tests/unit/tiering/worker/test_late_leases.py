"""A worker releases a lease that another one should have: it was acquired late, or its release failed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from unit.tiering.worker.test_worker import Cluster

from stratalog_core.errors import Conflict, Unavailable
from stratalog_metadata.records import Lease, TieringWorker, lease_key
from stratalog_metadata.state.commands import ABSENT, Applied, Command, Delete, Put, SessionAlive, VersionIs
from stratalog_tiering.store import ObjectStore
from stratalog_tiering.worker.copying import DELETIONS_LEASE
from stratalog_tiering.worker.leases import BUCKET_LEASE, preferred_worker

WORKERS = ("worker-1", "worker-2")


@pytest.mark.parametrize("name", [BUCKET_LEASE, DELETIONS_LEASE])
async def test_a_lease_that_was_acquired_late_is_released(cluster: Cluster, second: ObjectStore, name: str) -> None:
    """The command that acquires it has no answer, and takes effect after another worker has joined."""
    for worker_id in WORKERS:
        await cluster.start_worker(worker_id, second=second)
    view = cluster.metadata.view
    await cluster.until(lambda: len([*view.all(TieringWorker)]) == 2)
    preferred = preferred_worker(name, WORKERS)
    (other,) = (each for each in view.all(TieringWorker) if each.worker_id != preferred)
    lease = Lease(name=name, session_id=other.session_id)
    requirements = (SessionAlive(session_id=other.session_id), VersionIs(key=lease.key(), version=ABSENT))
    late = Command(updates=(Put(record=lease),), requirements=requirements)
    is_acquired = False
    while not is_acquired:
        await cluster.until(lambda: view.get(lease_key(name)) is None)
        with suppress(Conflict):  # A worker holds it, for its first run.
            await cluster.metadata.propose(late)
            is_acquired = True
    await cluster.until(lambda: view.get(lease_key(name)) is None, 10)


async def test_a_lease_whose_release_failed_is_released_after_another_worker_has_joined(
    cluster: Cluster, second: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, propose = cluster.metadata.view, cluster.metadata.propose
    leaves_it, joins = sorted(WORKERS, key=lambda worker_id: worker_id == preferred_worker(DELETIONS_LEASE, WORKERS))
    failed = False

    async def refuse_release(command: Command, *arguments: Any) -> Applied:
        nonlocal failed
        if not failed and Delete(key=lease_key(DELETIONS_LEASE)) in command.updates:
            failed = True
            await propose(Command(updates=(Put(record=TieringWorker(worker_id=joins, session_id=0)),)))
            await cluster.metadata.refresh()
            raise Unavailable("no leader")
        applied: Applied = await propose(command, *arguments)
        return applied

    monkeypatch.setattr(cluster.metadata, "propose", refuse_release)
    await cluster.start_worker(leaves_it, second=second)
    await cluster.until(lambda: failed and view.get(lease_key(DELETIONS_LEASE)) is None, 10)
