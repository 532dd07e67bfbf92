"""Finds out what an S3 server and its bucket offer beyond the store's interface, by asking.

A refusal is a result here: a server without a feature answers with an error, or ignores the header and reports success.
"""

from __future__ import annotations

from typing import Any, Final

from botocore.exceptions import ClientError

from stratalog_core.errors import OutcomeUnknown, Unavailable
from stratalog_tiering.store.base import StoreFeatures
from stratalog_tiering.store.checksums import crc_text
from stratalog_tiering.store.s3_async import REQUEST_TIMEOUT_S, AsyncClient
from stratalog_tiering.store.s3_attempts import repeated, time_limit
from stratalog_tiering.store.s3_errors import REFUSED_CODES, from_botocore
from stratalog_tiering.store.store_url import S3Location

_DAMAGED: Final = frozenset({"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"})
"""Refusals of bytes that do not match their checksum."""
_NO_OBJECTS_ETAG: Final = '"00000000000000000000000000000000"'


async def read_features(client: AsyncClient, location: S3Location, key: str) -> StoreFeatures:
    """See :class:`stratalog_tiering.store.base.ObjectStore`. Sends five requests."""

    async def ask(operation: str, **arguments: Any) -> tuple[str, Any]:
        return await repeated(lambda: _asked(client, location, key, operation, arguments))

    name = location.name(key)
    head_code, head = await ask("head_object", Key=name, ChecksumMode="ENABLED")
    versioning_code, versioning = await ask("get_bucket_versioning")
    lock_code, lock = await ask("get_object_lock_configuration")
    damaged_code, _ = await ask("put_object", Key=name, Body=b"other bytes", ChecksumCRC32C=crc_text([b"these bytes"]))
    replace_code, _ = await ask("put_object", Key=name, Body=b"", IfMatch=_NO_OBJECTS_ETAG)
    return StoreFeatures(
        conditional_replace=_unless_refused(replace_code, replace_code in ("PreconditionFailed", "412")),
        checksums_at_rest=_unless_refused(head_code, bool(head.get("ChecksumCRC32C")) and damaged_code in _DAMAGED),
        versioning=_unless_refused(versioning_code, versioning.get("Status") == "Enabled"),
        object_lock=_unless_refused(lock_code, lock.get("ObjectLockConfiguration", {}).get("ObjectLockEnabled") == "Enabled"),
        final_deletion=True,  # deletions name every version
    )


def _unless_refused(code: str, holds: bool) -> bool | None:
    return None if code in REFUSED_CODES else holds


async def _asked(
    client: AsyncClient, location: S3Location, key: str, operation: str, arguments: dict[str, Any]
) -> tuple[str, Any]:
    """Return the code of the refusal, empty if there was none, and the response."""
    async with client.answering(key) as opened, time_limit(REQUEST_TIMEOUT_S):
        try:
            return "", await getattr(opened, operation)(Bucket=location.bucket, **arguments)
        except ClientError as refused:
            code = str(refused.response.get("Error", {}).get("Code", ""))
            if code not in _DAMAGED and isinstance(from_botocore(refused, key, location.url), Unavailable | OutcomeUnknown):
                raise
            return code, {}
