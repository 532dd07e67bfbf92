"""Object Lock: the arguments that lock a new object, for a bucket that is known to have it.

A server without locks may ignore them and report success. So the bucket is asked before the first lock, and the offload
compares the lock of each segment with what it asked for (``offload/locks.py``).
"""

from __future__ import annotations

import asyncio
from typing import Any

from botocore.exceptions import ClientError

from stratalog_core.errors import Invalid, OutcomeUnknown, Refused, Unavailable
from stratalog_core.moments import utc_time
from stratalog_core.object_lock import ObjectLock
from stratalog_tiering.store.s3_async import REQUEST_TIMEOUT_S, AsyncClient
from stratalog_tiering.store.s3_attempts import repeated, time_limit
from stratalog_tiering.store.s3_errors import REFUSED_CODES, from_botocore
from stratalog_tiering.store.store_url import S3Location


class S3Locks:
    """The locks of one bucket. Asks the bucket once."""

    def __init__(self, location: S3Location, client: AsyncClient) -> None:
        self._location = location
        self._client = client
        self._asking = asyncio.Lock()
        self._is_offered = False

    async def arguments(self, lock: ObjectLock) -> dict[str, Any]:
        """Arguments of the request that creates a locked object. Raises ``Invalid`` if the bucket cannot lock objects."""
        async with self._asking:
            if not self._is_offered:
                await repeated(self._require)
                self._is_offered = True
        return {"ObjectLockMode": lock.mode.value.upper(), "ObjectLockRetainUntilDate": utc_time(lock.until_ms)}

    async def _require(self) -> None:
        """Raise ``Invalid`` unless the bucket has Object Lock, ``Refused`` if it may not be asked."""
        place, code, answer = self._location.url, "", {}
        async with self._client.answering("the bucket's locks") as client, time_limit(REQUEST_TIMEOUT_S):
            try:
                answer = await client.get_object_lock_configuration(Bucket=self._location.bucket)
            except ClientError as refused:
                if isinstance(from_botocore(refused, "", place), Unavailable | OutcomeUnknown):
                    raise
                code = str(refused.response.get("Error", {}).get("Code", ""))
        if code in REFUSED_CODES:
            raise Refused(f"{place}: whether objects can be locked is unknown; allow s3:GetBucketObjectLockConfiguration")
        if answer.get("ObjectLockConfiguration", {}).get("ObjectLockEnabled") != "Enabled":
            raise Invalid(
                f"{place} cannot lock objects: the bucket was created without Object Lock. Use one that"
                " `stratalog store init --object-lock` creates, or set stratalog.tier.lock.mode=none"
            )
