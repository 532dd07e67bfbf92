"""Small objects are uploaded in one put, larger ones in parts; a failure leaves no open upload."""

from __future__ import annotations

from typing import Any

import pytest

from stratalog_core.errors import Unavailable
from stratalog_tiering.offload.upload import StreamedUpload

Store = Any
PART = 5 * 1024 * 1024


async def test_a_small_object_is_one_put(store: Store) -> None:
    upload = StreamedUpload(store, "a/b", part_bytes=PART, parts_at_once=2)
    await upload.write([b"one", memoryview(b"two")])
    await upload.finish()
    assert await store.get("a/b") == b"onetwo"
    assert store.count("create_upload") == 0


async def test_a_large_object_is_uploaded_in_parts(store: Store) -> None:
    content = bytes(range(256)) * (PART * 3 // 256 + 77)
    upload = StreamedUpload(store, "a/b", part_bytes=PART, parts_at_once=2)
    for first in range(0, len(content), 1_234_567):
        await upload.write([content[first : first + 1_234_567]])
    await upload.finish()
    assert await store.get("a/b") == content
    assert store.count("put_part") == 4


async def test_a_failed_part_fails_the_upload_and_leaves_nothing(store: Store) -> None:
    failed = False

    def fail_once(name: str, key: str) -> BaseException | None:
        nonlocal failed
        if name == "put_part" and not failed:
            failed = True
            return Unavailable("no")
        return None

    store.before = fail_once
    upload = StreamedUpload(store, "a/b", part_bytes=PART, parts_at_once=2)
    with pytest.raises(Unavailable):
        await write_and_finish(upload)
    await upload.abort()
    assert [left async for left in store.list_uploads()] == []


async def write_and_finish(upload: StreamedUpload) -> None:
    for _ in range(4):
        await upload.write([b"x" * PART])
    await upload.finish()
