"""Deletions in stores that delete one object with each request."""

from __future__ import annotations

import pytest

from stratalog_core.errors import Unavailable
from stratalog_tiering.store.base import Locked
from stratalog_tiering.store.http_requests import delete_each

KEYS = [f"object-{number:02d}" for number in range(50)]


@pytest.mark.parametrize("locked", [KEYS[:1], KEYS[:20], [KEYS[3], KEYS[40]]])
async def test_locked_objects_keep_no_other(locked: list[str]) -> None:
    deleted: list[str] = []

    async def delete(key: str) -> None:
        if key in locked:
            raise Locked(f"{key} is held", until_ms=0)
        deleted.append(key)

    with pytest.raises(Locked, match=f"{locked[0]} is held") as left:
        await delete_each(KEYS, delete)
    assert left.value.detail == {"until_ms": 0, "keys": locked}
    assert sorted(deleted) == [key for key in KEYS if key not in locked]


async def test_an_error_ends_it_after_those_that_were_deleted_together() -> None:
    asked: list[str] = []

    async def delete(key: str) -> None:
        asked.append(key)
        if key == KEYS[2]:
            raise Unavailable("away")
        if key == KEYS[1]:
            raise Locked("held", until_ms=0)

    with pytest.raises(Unavailable, match="away"):
        await delete_each(KEYS, delete)
    assert KEYS[2] in asked
    assert len(asked) < len(KEYS)
