"""A reader's lease: while it is in force, the bucket's collector deletes nothing that the reader may still read.

Acquire it before reading a manifest, renew it in time, and release it. ``check`` says whether it was in force all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from stratalog_core.errors import Fenced
from stratalog_core.ports import Clock
from stratalog_tiering.format.descriptor import ReaderLease, encode_descriptor
from stratalog_tiering.format.object_keys import lease_key
from stratalog_tiering.store import ObjectStore

DURATION_MS: Final = 3_600_000


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
        began = self._clock.monotonic()
        await self._store.put(self._key, [encode_descriptor(self._lease)], if_absent=if_absent)
        self._renewed_at = began

    def check(self) -> None:
        """Raise ``LeaseExpired`` unless the lease is in force."""
        since_s = self._clock.monotonic() - self._renewed_at
        if since_s * 1000 >= self._lease.duration_ms:
            raise LeaseExpired(
                f"the lease of {self._lease.holder} on {self._store.url} was renewed {since_s:.0f} s ago and is valid for"
                f" {self._lease.duration_ms // 1000} s: objects may have been deleted meanwhile; begin again"
            )

    async def release(self) -> None:
        """Delete the lease."""
        await self._store.delete([self._key])
