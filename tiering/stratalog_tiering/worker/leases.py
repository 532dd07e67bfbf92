"""Which worker does what: rendezvous hashing over the live workers says who should, a lease in metadata says who may.

Every command of tiering requires the session to live and the lease's version, so that a worker that lost either can
change nothing any more, whatever it still believes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from uuid import UUID

from stratalog_core.errors import Conflict
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Lease, TieringWorker, lease_key
from stratalog_metadata.state.commands import ABSENT, Command, Delete, Put, Requirement, SessionAlive, VersionIs


def preferred_worker(name: str, workers: Sequence[str]) -> str | None:
    """The worker that should do the work called ``name``: each join or leave moves only that worker's share."""
    return max(workers, key=lambda worker: (hashlib.blake2b(f"{worker}\0{name}".encode()).digest(), worker), default=None)


def partition_work(topic_id: UUID, index: int) -> str:
    return f"tiering/{topic_id.hex}/{index}"


def deletion_work(topic_id: UUID) -> str:
    return f"tiering/deleted/{topic_id.hex}"


UPLOADS_WORK = "tiering/uploads"


class Claims:
    """Leases of one session; none are held before ``begin``."""

    def __init__(self, metadata: MetadataClient, worker_id: str) -> None:
        self._metadata = metadata
        self._worker_id = worker_id
        self._session_id = -1

    def begin(self, session_id: int) -> None:
        self._session_id = session_id

    def is_ours(self, name: str) -> bool:
        """Whether this worker should do it, as far as the view knows the live workers."""
        workers = sorted(worker.worker_id for worker in self._metadata.view.all(TieringWorker))
        return preferred_worker(name, workers) == self._worker_id

    def guards(self, name: str) -> tuple[Requirement, ...] | None:
        """Requirements under which we may act, or None if we do not hold the lease."""
        found = self._metadata.view.get(lease_key(name))
        if found is None or not isinstance(found.record, Lease) or found.record.session_id != self._session_id:
            return None
        return SessionAlive(session_id=self._session_id), VersionIs(key=lease_key(name), version=found.version)

    async def hold(self, name: str) -> tuple[Requirement, ...] | None:
        """Take the lease if nobody has it; the guards, or None if another session holds it."""
        if self._metadata.view.get(lease_key(name)) is None:
            lease = Lease(name=name, session_id=self._session_id)
            requirements = (SessionAlive(session_id=self._session_id), VersionIs(key=lease.key(), version=ABSENT))
            try:
                await self._metadata.propose(Command(updates=(Put(record=lease),), requirements=requirements))
            except Conflict:
                return None
        return self.guards(name)

    async def release(self, name: str) -> None:
        """Give the lease up, if we hold it."""
        guards = self.guards(name)
        if guards is not None:
            try:
                await self._metadata.propose(Command(updates=(Delete(key=lease_key(name)),), requirements=guards))
            except Conflict:
                return
