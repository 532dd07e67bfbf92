"""The bookie's record in metadata: checks and claims its cookie, keeps its session, publishes its address and disk states."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from stratalog_bookies.config import BookieSettings
from stratalog_core.errors import Conflict, Invalid, OutcomeUnknown, Retriable, SessionExpired, StratalogError, Unavailable
from stratalog_core.restarting import restarting
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import CLUSTER_KEY, Bookie, Cluster, Versioned, bookie_key
from stratalog_metadata.state.commands import ABSENT, Command, Put, SessionAlive, VersionIs

_log = logging.getLogger(__name__)
_RETRY_PAUSE_S = 0.1
_CLUSTER_ATTEMPTS = 300
_REFUSED_PAUSE_S = 5.0


class Registration:
    """Keeps the ``Bookie`` record true while the bookie runs. A lost session does not stop the bookie:
    fences protect ledgers.
    """

    def __init__(self, settings: BookieSettings, metadata: MetadataClient) -> None:
        self._settings = settings
        self._metadata = metadata
        self._greatest_ledger_id: Callable[[], int] = lambda: -1
        self._key = bookie_key(settings.bookie_id)
        self._wanted: Bookie | None = None
        self._session_id = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def cluster_id(self) -> str:
        """Id of the cluster. Waits briefly for a quorum that is just being created. Raises ``Unavailable``."""
        for _ in range(_CLUSTER_ATTEMPTS):
            try:
                (found,) = await self._metadata.read([CLUSTER_KEY])
            except Unavailable as away:
                _log.info("waiting for the metadata quorum: %s", away)
                found = None
            if found is not None and isinstance(found.record, Cluster):
                return found.record.cluster_id
            await asyncio.sleep(_RETRY_PAUSE_S)
        raise Unavailable("the metadata quorum does not answer or has no cluster record: start its nodes first")

    @property
    def session_id(self) -> int:
        """The current session; 0 if there is none."""
        return self._session_id

    async def read(self) -> Versioned | None:
        """The bookie's record, read from the quorum."""
        (found,) = await self._metadata.read([self._key])
        return found

    async def register(
        self,
        cookie: str,
        address: str,
        *,
        read_only: bool,
        low_on_space: bool,
        failed_disks: tuple[int, ...],
        full_disks: tuple[int, ...],
        greatest_ledger_id: Callable[[], int] = lambda: -1,
    ) -> None:
        """Claim the record and keep it up to date from now on. Raises ``Invalid`` if it has another cookie.

        ``greatest_ledger_id`` returns the greatest id of a ledger that the disks have held or deleted.
        """
        self._greatest_ledger_id = greatest_ledger_id
        self._wanted = Bookie(
            bookie_id=self._settings.bookie_id,
            address=address,
            cookie=cookie,
            rack=self._settings.rack,
            host=self._settings.host,
            read_only=read_only,
            low_on_space=low_on_space,
            disks=len(self._settings.data_dirs),
            failed_disks=failed_disks,
            full_disks=full_disks,
        )
        await self._publish()
        self._task = asyncio.get_running_loop().create_task(restarting(self._keep, "the registration of the bookie"))

    def set_state(
        self, *, read_only: bool, low_on_space: bool, failed_disks: tuple[int, ...], full_disks: tuple[int, ...]
    ) -> None:
        """Publish whether new ledgers may be placed here, whether space is short, and which disks have failed or are full."""
        if self._wanted is None:
            return
        wanted = msgspec.structs.replace(
            self._wanted,
            read_only=read_only,
            low_on_space=low_on_space,
            failed_disks=failed_disks,
            full_disks=full_disks,
        )
        if wanted != self._wanted:
            self._wanted = wanted
            self._changed.set()

    def report_ledger_ids(self) -> None:
        """Write the record again, with the greatest ledger id: metadata has forgotten that it allocated it."""
        self._changed.set()

    async def close(self) -> None:
        """End the session now, so that the cluster need not wait for the lease to expire."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._session_id:
            try:
                await self._metadata.close_session(self._session_id)
            except (Retriable, OutcomeUnknown, SessionExpired) as failure:
                _log.info("the session could not be closed and ends with its lease: %s", failure)

    async def _keep(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._publish()
            except StratalogError as refused:
                _log.critical("the bookie is not registered; it tries again in %s s: %s", _REFUSED_PAUSE_S, refused)
                self._changed.set()
                await asyncio.sleep(_REFUSED_PAUSE_S)
            except Exception:
                self._changed.set()
                raise

    async def _publish(self) -> None:
        """Write the record, retrying until the quorum has it."""
        while True:
            try:
                await self._write()
                return
            except (Conflict, OutcomeUnknown, Retriable) as failure:
                _log.info("the registration failed and is retried: %s", failure)
            except SessionExpired:
                self._session_id = 0
            await asyncio.sleep(_RETRY_PAUSE_S)

    async def _write(self) -> None:
        if not self._session_id:
            self._session_id = await self._open_session()
        wanted = self._wanted
        assert wanted is not None, "the wanted record is set"
        found = await self.read()
        if found is not None and isinstance(found.record, Bookie) and found.record.cookie != wanted.cookie:
            raise Invalid(f"bookie {wanted.bookie_id} is registered with another cookie: choose another bookie_id")
        # Draining is set by an operator and survives restarts.
        draining = found is not None and isinstance(found.record, Bookie) and found.record.draining
        record = msgspec.structs.replace(
            wanted, session_id=self._session_id, draining=draining, greatest_ledger_id=self._greatest_ledger_id()
        )
        if found is not None and found.record == record:
            return
        version = ABSENT if found is None else found.version
        requirements = (VersionIs(key=self._key, version=version), SessionAlive(session_id=self._session_id))
        await self._metadata.propose(Command(updates=(Put(record=record),), requirements=requirements))

    async def _open_session(self) -> int:
        def on_expired() -> None:
            # If a refused write told it first, another session may be open already.
            if self._session_id == session_id:
                _log.warning("the session expired; opening a new one")
                self._session_id = 0
                self._changed.set()

        session_id = await self._metadata.open_session(
            f"bookie {self._settings.bookie_id}", self._settings.lease_ms, on_expired
        )  # fmt: skip
        return session_id
