"""Aborts multipart uploads that were never completed, because their workers died."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from stratalog_tiering.format.object_keys import is_upload_key
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.store import ObjectStore, Upload


async def stale_uploads(store: ObjectStore, before_ms: int) -> list[Upload]:
    """The uploads of segments and probes that began before the wall time ``before_ms``. Raises ``Unavailable``, ``Refused``."""
    uploads = [upload async for upload in store.list_uploads()]
    return [upload for upload in uploads if 0 < upload.initiated_ms < before_ms and is_upload_key(upload.key)]


async def abort_uploads(
    ports: WorkerPorts, store: ObjectStore, uploads: Sequence[Upload], confirm: Callable[[], Awaitable[None]]
) -> None:
    """Abort the uploads, each after ``confirm`` has found that the bucket is still this cluster's. Raises as that does."""
    for upload in uploads:
        await ports.deleting.take(1)
        await confirm()
        await store.abort_upload(upload)
