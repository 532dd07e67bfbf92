"""A reader's lease: while it is in force, the bucket's collector deletes nothing that the reader may still read.

Acquire it before reading a manifest, renew it in time, and release it. ``check`` says whether it was in force all the time;
:func:`held` does all of that. A :class:`SharedLease` is for readers that go on whether it was in force or not: reads by several
processes, none of which lives as long as the read, and servers.
"""

from __future__ import annotations

import asyncio
import getpass
import hashlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final
from uuid import UUID

from stratalog_core.errors import Fenced, Invalid, Refused, StorageFailed, StratalogError
from stratalog_core.ports import Clock
from stratalog_core.restarting import restarting
from stratalog_tiering.format.descriptor import ReaderLease, encode_descriptor
from stratalog_tiering.format.object_keys import lease_key
from stratalog_tiering.store import ObjectStore

DURATION_MS: Final = 3_600_000
RETRY_S: Final = 5.0
_log = logging.getLogger(__name__)


def holder_name(what: str) -> str:
    """The name of a lease's holder: this process, which does ``what``."""
    return f"{what} by {user_name()}, process {os.getpid()}"


def user_name() -> str:
    """This process's user and host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"user {os.getuid()}"  # without an account, as in many containers
    return f"{user}@{socket.gethostname()}"


class LeaseExpired(Fenced):
    """A reader's lease ended before the reader did: objects that it reads may have been deleted. Begin again."""


class HeldLease:
    """A lease that this process holds, from :meth:`acquire` to :meth:`release`."""

    def __init__(
        self, store: ObjectStore, clock: Clock, random_id: int, holder: str, topic_ids: Sequence[UUID], duration_ms: int
    ) -> None:
        self._store = store
        self._clock = clock
        self._key = lease_key(random_id)
        self._lease = ReaderLease(
            holder=holder, topic_ids=tuple(topic_ids), began_at_ms=clock.wall_ms(), duration_ms=duration_ms
        )
        self._renewed_at = float("-inf")
        self._renewed_wall_ms = 0

    @property
    def renew_after_s(self) -> float:
        """Seconds after which to renew it."""
        return self._lease.duration_ms / 1000 / 4

    async def acquire(self) -> None:
        """Write the lease. Raises ``Invalid`` if the credentials do not allow it, ``Unavailable``, ``OutcomeUnknown``."""
        await self._write(if_absent=True)

    async def renew(self) -> None:
        """Write the lease again. Raises ``LeaseExpired`` if it has expired, ``Unavailable``: call it again soon."""
        self.check()
        await self._write(if_absent=False)

    async def _write(self, *, if_absent: bool) -> None:
        began, began_wall_ms = self._clock.monotonic(), self._clock.wall_ms()
        await self._store.put(self._key, [encode_descriptor(self._lease)], if_absent=if_absent)
        self._renewed_at, self._renewed_wall_ms = began, began_wall_ms

    def check(self) -> None:
        """Raise ``LeaseExpired`` unless the lease is in force.

        Both clocks must say so: the monotonic one stands still while a machine sleeps, and the wall clock may be set back.
        """
        since_wall_s = (self._clock.wall_ms() - self._renewed_wall_ms) / 1000
        since_s = max(self._clock.monotonic() - self._renewed_at, since_wall_s)
        if since_s * 1000 >= self._lease.duration_ms:
            raise LeaseExpired(
                f"the lease of {self._lease.holder} on {self._store.url} was renewed {since_s:.0f} s ago and is valid for"
                f" {self._lease.duration_ms // 1000} s: objects may have been deleted meanwhile; begin again"
            )

    async def release(self) -> None:
        """Delete the lease."""
        await self._store.delete([self._key])


@asynccontextmanager
async def held(lease: HeldLease) -> AsyncIterator[None]:
    """Hold ``lease``, and renew it, while a reader within reads.

    Raises ``LeaseExpired`` instead of the reader's own error, or at its end, if the lease could not be renewed in time. With
    credentials that may not write, the reader goes on without a lease, and a warning says so. Raises ``Unavailable`` or
    ``OutcomeUnknown`` if the lease cannot be acquired.
    """
    try:
        await lease.acquire()
    except (Invalid, Refused, StorageFailed) as refused:
        _log.warning("the history is read without a lease, so it may be deleted after the grace period: %s", refused.message)
        yield
        return
    ended = asyncio.Event()
    renewing = asyncio.get_running_loop().create_task(restarting(partial(_renew, lease, ended), "the renewal of a lease"))
    try:
        yield
    except StratalogError as failure:
        _raise_expired(lease, failure)
        raise
    else:
        lease.check()
    finally:
        # Not cancelled: a renewal under way may be written all the same, and must not be after the deletion.
        ended.set()
        try:
            await renewing
        finally:
            await _release(lease)


async def _renew(lease: HeldLease, ended: asyncio.Event) -> None:
    pause_s = lease.renew_after_s
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await ended.wait()
        if ended.is_set():
            return
        try:
            await lease.renew()
            pause_s = lease.renew_after_s
        except LeaseExpired:
            return
        except StratalogError as failure:
            _log.warning("a reader's lease was not renewed, and will be again: %s", failure.message)
            pause_s = min(RETRY_S, lease.renew_after_s)


def _raise_expired(lease: HeldLease, failure: StratalogError) -> None:
    try:
        lease.check()
    except LeaseExpired as expired:
        raise expired from failure


async def _release(lease: HeldLease) -> None:
    try:
        await lease.release()
    except StratalogError as failure:
        _log.info("a reader's lease was not deleted and will expire: %s", failure.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLease:
    """A lease that all processes of a read renew, and all reads of the same topics that one holder begins within an hour.

    ``begun_ms`` is the wall time at which the reader began that writes it first.
    """

    key: str
    lease: ReaderLease
    begun_ms: int

    @classmethod
    def of(cls, holder: str, topic_ids: Sequence[UUID], begun_ms: int) -> SharedLease:
        hour_ms = begun_ms // DURATION_MS * DURATION_MS
        topics = tuple(sorted(topic_ids))
        digest = hashlib.sha256(repr((holder, topics, hour_ms)).encode()).digest()
        return cls(
            key=lease_key(int.from_bytes(digest[:8], "big")),
            lease=ReaderLease(holder=holder, topic_ids=topics, began_at_ms=hour_ms, duration_ms=DURATION_MS),
            begun_ms=begun_ms,
        )

    async def write(self, store: ObjectStore) -> None:
        """Write the lease, perhaps again. Raises what the store raises."""
        await store.put(self.key, [encode_descriptor(self.lease)], if_absent=False)

    async def keep(self, store: ObjectStore, clock: Clock) -> None:
        """Renew the lease, whenever it is due, until cancelled. A failure is logged: what is read may be there all the same."""
        quarter_s = self.lease.duration_ms / 4 / 1000
        since_s = (clock.wall_ms() - self.begun_ms) / 1000
        # The wall clock may be another machine's, or be set: what it says only makes the first renewal earlier.
        pause_s = min(max(0.0, quarter_s - since_s), quarter_s)
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self.write(store)
                pause_s = quarter_s
            except StratalogError as failure:
                _log.warning("the lease of a read was not renewed: %s", failure.message)
                pause_s = min(RETRY_S, quarter_s)
