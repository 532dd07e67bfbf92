"""Which worker does which work: rendezvous hashing over the live workers proposes one, a lease in metadata decides.

Every command of a worker requires that its session is alive and that it still holds the lease (``guards``), so a worker that
has lost either cannot change anything, even if it does not know yet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from stratalog_core.errors import Conflict
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Lease, TieringWorker, lease_key
from stratalog_metadata.state.commands import ABSENT, Command, Delete, Put, Requirement, SessionAlive, VersionIs

BUCKET_LEASE: Final = "tiering/uploads"
"""Name of the lease on what concerns the whole bucket: stale multipart uploads, deletions by its earlier owners."""


def partition_lease(topic_id: UUID, index: int) -> str:
    """Name of the lease on a partition."""
    return f"tiering/{topic_id.hex}/{index}"


def deletion_lease(topic_id: UUID) -> str:
    """Name of the lease on the objects of a deleted topic."""
    return f"tiering/deleted/{topic_id.hex}"


def preferred_worker(name: str, workers: Sequence[str]) -> str | None:
    """The worker that should hold the lease ``name``; a worker that joins or leaves moves only its own share of names."""
    return max(workers, key=lambda worker: (hashlib.blake2b(f"{worker}\0{name}".encode()).digest(), worker), default=None)


class WorkerLeases:
    """The leases of one session. It holds none before ``begin``."""

    def __init__(self, metadata: MetadataClient, worker_id: str) -> None:
        self._metadata = metadata
        self._worker_id = worker_id
        self._session_id = -1

    def begin(self, session_id: int) -> None:
        self._session_id = session_id

    def is_ours(self, name: str) -> bool:
        """Whether this worker is the preferred one among the live workers of the view."""
        workers = sorted(worker.worker_id for worker in self._metadata.view.all(TieringWorker))
        return preferred_worker(name, workers) == self._worker_id

    def is_misplaced(self, lease: Lease) -> bool:
        """Whether this session holds a lease that another worker should have: the command that acquired it took effect late."""
        return lease.session_id == self._session_id and not self.is_ours(lease.name)

    def guards(self, name: str) -> tuple[Requirement, ...] | None:
        """The requirements of every command under the lease; None if this session does not hold it."""
        found = self._metadata.view.get(lease_key(name))
        if found is None or not isinstance(found.record, Lease) or found.record.session_id != self._session_id:
            return None
        return SessionAlive(session_id=self._session_id), VersionIs(key=lease_key(name), version=found.version)

    async def hold(self, name: str) -> tuple[Requirement, ...] | None:
        """Acquire the lease if it is free; returns its guards, or None if another session holds it."""
        if self._metadata.view.get(lease_key(name)) is None:
            lease = Lease(name=name, session_id=self._session_id)
            requirements = (SessionAlive(session_id=self._session_id), VersionIs(key=lease.key(), version=ABSENT))
            try:
                await self._metadata.propose(Command(updates=(Put(record=lease),), requirements=requirements))
            except Conflict:
                return None
        return self.guards(name)

    async def release(self, name: str) -> None:
        """Release the lease; does nothing if this session does not hold it."""
        guards = self.guards(name)
        if guards is not None:
            try:
                await self._metadata.propose(Command(updates=(Delete(key=lease_key(name)),), requirements=guards))
            except Conflict:
                return
