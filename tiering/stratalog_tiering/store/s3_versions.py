"""Deletes objects with all of their versions.

In a bucket that keeps versions a plain deletion only hides an object behind a delete marker, so the versions are listed and
each is deleted by its id. Whether the bucket keeps versions is asked once; if that is refused, or changes later, the first
answer that reports a delete marker tells it.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from stratalog_core.errors import Invalid, NoSuchObject, Refused, Unavailable
from stratalog_core.moments import utc_text
from stratalog_tiering.store.base import Locked, delete_batches
from stratalog_tiering.store.s3_async import AsyncClient
from stratalog_tiering.store.s3_attempts import repeated
from stratalog_tiering.store.s3_catalogue import S3Catalogue
from stratalog_tiering.store.s3_errors import LOCKED_CODES, REFUSED_CODES
from stratalog_tiering.store.store_url import S3Location

_DELETE_BATCH: Final = 1000
_OTHERS_MAX: Final = 250
"""Versions of other keys in a row after which a listing ends and another one begins at the next wanted key."""
_log = logging.getLogger(__name__)


class S3Versions:
    """Implements deletion for :class:`stratalog_tiering.store.base.ObjectStore`."""

    def __init__(self, location: S3Location, client: AsyncClient, catalogue: S3Catalogue) -> None:
        self._location = location
        self._client = client
        self._catalogue = catalogue
        self._is_versioned: bool | None = None

    async def list_keys(self, prefix: str) -> AsyncIterator[str]:
        """Keys with any version, in order."""
        if not await self._keeps_versions():
            async for info in self._catalogue.list(prefix):
                yield info.key
            return
        last = ""
        async for key, _ in self._listed(self._location.prefix + prefix):
            if key != last:
                yield key
                last = key

    async def delete(self, keys: Sequence[str]) -> None:
        """See :class:`stratalog_tiering.store.base.ObjectStore`."""
        await delete_batches(keys, _DELETE_BATCH, self._delete)

    async def _delete(self, keys: Sequence[str]) -> None:
        if not await self._keeps_versions():
            keys = await self._delete_unversioned(keys)
        if keys:
            await self._delete_versions(keys)

    async def _keeps_versions(self) -> bool:
        if self._is_versioned is None:
            try:
                answer = await self._repeated("get_bucket_versioning", "the bucket's versioning")
                # A suspended bucket still has the versions of earlier days.
                self._is_versioned = answer.get("Status") in ("Enabled", "Suspended")
            except Invalid as unknown:
                _log.info("whether deletions must name versions is found out by the first one: %s", unknown.message)
                self._is_versioned = False
            except Refused as refused:
                # Denied by a policy, or expired credentials: the next deletion or listing asks again.
                _log.info("whether deletions must name versions is found out by the first one: %s", refused.message)
                return False
        return self._is_versioned

    async def _delete_unversioned(self, keys: Sequence[str]) -> list[str]:
        """Delete objects; return those keys of which delete markers were made instead."""
        answer = await self._request_deletion([{"Key": self._location.name(key)} for key in keys])
        hidden = [self._location.key(each["Key"]) for each in answer.get("Deleted", ()) if each.get("DeleteMarker")]
        self._is_versioned = self._is_versioned or bool(hidden)
        return hidden

    async def _delete_versions(self, keys: Sequence[str]) -> None:
        found = await self._versions_of(keys)
        versions = [{"Key": self._location.name(key), "VersionId": version_id} for key in keys for version_id in found[key]]
        await delete_batches(versions, _DELETE_BATCH, self._request_deletion)

    async def _request_deletion(self, objects: Sequence[Mapping[str, str]]) -> Any:
        """Delete objects or versions. Raises ``Unavailable``, ``Refused``, or ``Locked``: all others were deleted."""

        async def attempt() -> Any:
            answer = await self._client.request("delete_objects", objects[0]["Key"], Delete={"Objects": objects})
            # The server names each object. A page of a gateway would be a deletion without an error.
            if not (answer.get("Deleted") or answer.get("Errors")):
                raise Unavailable(f"{self._location.url} confirmed no deletion: is a proxy in between?")
            return answer

        answer = await repeated(attempt)
        failed = [each for each in answer.get("Errors", ()) if each.get("Code") not in ("NoSuchKey", "NoSuchVersion")]
        if not failed:
            return answer
        failed.sort(key=lambda each: each.get("Code") in LOCKED_CODES | REFUSED_CODES)
        first, what = failed[0], f"{self._location.url}: {len(failed)} objects were not deleted, the first: {failed[0]}"
        if first.get("Code") not in LOCKED_CODES | REFUSED_CODES:
            raise Unavailable(what)
        lock = await self._lock_of(first)
        if lock is None and first.get("Code") != "ObjectLocked":
            raise Refused(f"{what}; allow s3:DeleteObject and s3:DeleteObjectVersion")
        keys = [self._location.key(each["Key"]) for each in failed]
        raise Locked(f"{what}{'; ' + lock[1] if lock else ''}", until_ms=lock[0] if lock else 0, keys=keys)

    async def _lock_of(self, refused: Mapping[str, str]) -> tuple[int, str] | None:
        """The end of the lock because of which a deletion was refused, 0 if it has none, and what it is.

        None: there is no lock, or it may not be asked for.
        """
        version = {"VersionId": refused["VersionId"]} if refused.get("VersionId") else {}
        try:
            answer = await self._catalogue.headers(self._location.key(refused["Key"]), **version)
        except (Invalid, NoSuchObject, Refused):
            return None
        if answer.get("ObjectLockLegalHoldStatus") == "ON":
            return 0, "it is under a legal hold"
        until = answer.get("ObjectLockRetainUntilDate")
        until_ms = int(until.timestamp() * 1000) if until is not None else 0
        return (until_ms, f"it is locked until {utc_text(until_ms)}") if until_ms else None

    async def _versions_of(self, keys: Sequence[str]) -> dict[str, list[str]]:
        """Ids of all versions and markers of ``keys``, by key. Keys that follow each other closely are found by one listing."""
        found: dict[str, list[str]] = {key: [] for key in keys}
        wanted = sorted(found)
        passed = ""
        for key in wanted:
            if key > passed:
                passed = await self._find_from(key, wanted[-1], found)
        return found

    async def _find_from(self, key: str, last: str, found: Mapping[str, list[str]]) -> str:
        """Add versions of the keys ``found``, whose last is ``last``, from ``key`` on; return up to which key all are found."""
        directory = posixpath.commonpath([posixpath.dirname(key), posixpath.dirname(last)])
        prefix = f"{directory}/" if directory else ""
        passed, others = key, 0
        async for listed, version_id in self._listed(self._location.prefix + prefix, self._location.name(key)):
            if listed > last:
                break
            others = 0 if listed in found else others + 1
            if others > _OTHERS_MAX:
                return passed
            if listed in found:
                found[listed].append(version_id)
            passed = max(passed, listed)
        return last

    async def _listed(self, prefix: str, first: str = "") -> AsyncIterator[tuple[str, str]]:
        """Keys and ids of the versions and markers whose names begin with ``prefix``, by name, from the name ``first`` on."""
        # A listing begins after its marker.
        more: dict[str, Any] = {"KeyMarker": first[:-1] + chr(ord(first[-1]) - 1)} if first else {}
        while True:
            answer = await self._list_page(prefix, more)
            # A key's markers come last: without them its versions would be seen again.
            for row in sorted([*answer.get("Versions", ()), *answer.get("DeleteMarkers", ())], key=lambda row: row["Key"]):
                yield self._location.key(row["Key"]), row.get("VersionId", "null")
            if not answer.get("IsTruncated"):
                return
            more = {"KeyMarker": answer["NextKeyMarker"]}
            if answer.get("NextVersionIdMarker"):
                more["VersionIdMarker"] = answer["NextVersionIdMarker"]

    async def _list_page(self, prefix: str, more: Mapping[str, Any]) -> Any:
        try:
            return await self._catalogue.list_versions(prefix, **more)
        except (Invalid, Refused) as refused:
            raise type(refused)(
                f"{refused.message}. The bucket keeps versions, so deletions name them: allow s3:ListBucketVersions and"
                " s3:DeleteObjectVersion; `stratalog store init` sets that for MinIO accounts"
            ) from refused

    async def _repeated(self, operation: str, key: str, **arguments: Any) -> Any:
        return await repeated(lambda: self._client.request(operation, key, **arguments))
