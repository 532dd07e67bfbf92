"""One auditor at a time: a lease under the bookie's own session, which the session's end gives back."""

from __future__ import annotations

from typing import Final

from stratalog_core.errors import Conflict, SessionExpired
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Lease, lease_key
from stratalog_metadata.state.commands import ABSENT, Command, Put, Requirement, SessionAlive, VersionIs

AUDIT_WORK: Final = "bookies/audit"


class AuditClaim:
    """The right to move copies."""

    def __init__(self, metadata: MetadataClient) -> None:
        self._metadata = metadata

    def guards(self, session_id: int) -> tuple[Requirement, ...] | None:
        """Requirements for every command of the auditor; None if this session does not hold the lease."""
        found = self._metadata.view.get(lease_key(AUDIT_WORK))
        if found is None or not session_id or not isinstance(found.record, Lease) or found.record.session_id != session_id:
            return None
        return SessionAlive(session_id=session_id), VersionIs(key=lease_key(AUDIT_WORK), version=found.version)

    async def hold(self, session_id: int) -> tuple[Requirement, ...] | None:
        """Take the lease if nobody has it. Raises ``Retriable`` or ``OutcomeUnknown``: ask again later."""
        if session_id and self._metadata.view.get(lease_key(AUDIT_WORK)) is None:
            lease = Lease(name=AUDIT_WORK, session_id=session_id)
            requirements = (SessionAlive(session_id=session_id), VersionIs(key=lease.key(), version=ABSENT))
            try:
                await self._metadata.propose(Command(updates=(Put(record=lease),), requirements=requirements))
            except (Conflict, SessionExpired):
                return None
        return self.guards(session_id)
