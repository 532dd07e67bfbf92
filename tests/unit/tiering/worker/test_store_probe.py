"""Probes of stores that break one guarantee each: what is missing is named, and an unsafe store is refused before any write."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from unit.tiering.conftest import FaultyStore, TestCluster

from stratalog_core.errors import Invalid, NoSuchObject, Refused, Unavailable
from stratalog_core.object_lock import ObjectLock
from stratalog_core.ports import Buffer
from stratalog_core.system import SystemClock
from stratalog_tiering.format.object_keys import PROBE_PREFIX, owner_key, probe_key
from stratalog_tiering.store import ObjectInfo, ObjectStore, Upload, UploadedPart
from stratalog_tiering.worker.store_probe import LEFTOVER_AGE_MS, Need, StoreCheck, StoreReport, probe_store

REQUIRED = {"conditional create", "read after write", "ranged reads", "multipart uploads"}
WEAKER = {"conditional completion", "listing after write", "final deletion"}


class Overwriting(FaultyStore):
    """Ignores the condition of a PUT, as several servers do."""

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        storage_class: str = "",
        lock: ObjectLock | None = None,
    ) -> None:
        await super().put(key, parts, if_absent=False)


class Stale(FaultyStore):
    """Does not show an object at once."""

    async def get(self, key: str) -> bytes:
        raise NoSuchObject("not shown yet", key=key)


class WithoutRanges(FaultyStore):
    async def get_range(
        self, key: str, start: int, length: int, *, uncached: bool = False, or_less: bool = False
    ) -> memoryview:
        return memoryview(await super().get(key))


class WithoutUploads(FaultyStore):
    async def create_upload(
        self,
        key: str,
        part_bytes: int,
        storage_class: str = "",
        lock: ObjectLock | None = None,
        *,
        if_absent: bool = True,
    ) -> Upload:
        raise Invalid("not implemented")


class RefusingUploads(FaultyStore):
    """Answers 400 or 405 to requests that it does not know."""

    async def create_upload(
        self,
        key: str,
        part_bytes: int,
        storage_class: str = "",
        lock: ObjectLock | None = None,
        *,
        if_absent: bool = True,
    ) -> Upload:
        raise Refused("the request was refused")


class OverwritingUploads(FaultyStore):
    async def complete_upload(self, upload: Upload, parts: Sequence[UploadedPart]) -> str:
        return await super().complete_upload(replace(upload, if_absent=False), parts)


class StaleListings(FaultyStore):
    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        empty: tuple[ObjectInfo, ...] = ()
        for info in empty:
            yield info


async def probed(store: ObjectStore) -> StoreReport:
    return await probe_store(store, SystemClock(), random.Random(1))


def names(report: StoreReport, need: Need) -> set[str]:
    return {each.name for each in report.missing(need)}


async def test_a_directory_is_safe_and_a_probe_leaves_nothing(store: FaultyStore) -> None:
    report = await probed(store)
    calls = list(store.calls)
    report.check_writable()
    assert (names(report, Need.REQUIRED), names(report, Need.WEAKER), report.warnings) == (set(), set(), [])
    assert [info.key async for info in store.list("")] == []
    assert [upload async for upload in store.list_uploads()] == []
    assert all(key.startswith(PROBE_PREFIX) for _, key in calls)
    assert len({key for _, key in calls}) == 3
    assert len(calls) <= 35


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (Overwriting, {"conditional create"}),
        (Stale, {"read after write", "ranged reads"}),
        (WithoutRanges, {"ranged reads"}),
        (WithoutUploads, {"multipart uploads"}),
        (RefusingUploads, {"multipart uploads"}),
    ],
)
async def test_an_unsafe_store_is_refused_with_its_reason(
    kind: type[FaultyStore], missing: set[str], store: FaultyStore
) -> None:
    weak = kind(store)
    report = await probed(weak)
    assert names(report, Need.REQUIRED) == missing
    with pytest.raises(Invalid, match=r"is not safe to write to: no .*Use a server that"):
        report.check_writable()
    assert [info.key async for info in store.list("")] == []


@pytest.mark.parametrize(
    ("kind", "missing"), [(OverwritingUploads, "conditional completion"), (StaleListings, "listing after write")]
)
async def test_a_weaker_store_is_used_and_named(kind: type[FaultyStore], missing: str, store: FaultyStore) -> None:
    report = await probed(kind(store))
    report.check_writable()
    assert names(report, Need.WEAKER) == {missing}
    assert [warning.startswith(f"no {missing}: ") for warning in report.warnings] == [True]
    assert {each.name for each in report.guarantees if each.need is Need.WEAKER} == WEAKER
    assert {each.name for each in report.guarantees if each.need is Need.REQUIRED} == REQUIRED


class ShiftedClock(SystemClock):
    def __init__(self, shift_ms: int) -> None:
        self.shift_ms = shift_ms

    def wall_ms(self) -> int:
        return super().wall_ms() + self.shift_ms


@pytest.mark.parametrize("sign", [-1, 1])
async def test_a_clock_that_differs_is_named_and_a_far_one_refused(store: FaultyStore, sign: int) -> None:
    began_s = SystemClock().monotonic()
    near = await probe_store(store, ShiftedClock(sign * 120_000), random.Random(1))
    took_ms = (SystemClock().monotonic() - began_s) * 1000
    assert abs(-sign * near.clock_ahead_ms - 120_000) <= 1_000 + took_ms
    near.check_writable()
    assert "synchronise the clocks" in near.warnings[0]
    far = await probe_store(store, ShiftedClock(sign * 1_000_000), random.Random(1))
    with pytest.raises(Invalid, match="maximum is 900 s"):
        far.check_writable()


async def test_what_an_interrupted_probe_left_is_deleted_after_an_hour(store: FaultyStore, store_directory: Path) -> None:
    old, young = probe_key(1), probe_key(2)
    for key in (old, young):
        await store.put(key, [b"left"])
    past_s = (SystemClock().wall_ms() - LEFTOVER_AGE_MS) / 1000 - 60
    os.utime(store_directory / old, (past_s, past_s))
    await probed(store)
    assert [info.key async for info in store.list("")] == [young]


async def test_a_failure_of_the_store_is_no_result(store: FaultyStore) -> None:
    check = StoreCheck(store, SystemClock(), random.Random(1))
    store.before = lambda name, key: Unavailable("the store is away") if name == "get_range" else None
    with pytest.raises(Unavailable):
        await check.ensure()
    assert [info.key async for info in store.list("")] == []
    store.before = lambda name, key: None
    await check.ensure()


async def test_a_store_that_refuses_everything_from_some_request_on_is_not_judged(store: FaultyStore) -> None:
    """As with credentials that expire during the probe: the store may well offer uploads."""

    def expired_after(requests: int) -> Callable[[str, str], BaseException | None]:
        # S3 and others take a refused question about a feature for an unknown one.
        return lambda name, _: Refused("expired") if len(store.calls) > requests and name != "features" else None

    await probed(store)
    for requests in range([name for name, _ in store.calls].index("features")):
        store.calls.clear()
        store.before = expired_after(requests)
        with pytest.raises(Refused, match="expired"):
            await probed(store)


async def test_concurrent_callers_share_one_probe(store: FaultyStore) -> None:
    check = StoreCheck(store, SystemClock(), random.Random(1))
    await asyncio.gather(*(check.ensure() for _ in range(5)))
    await check.ensure()
    assert store.count("features") == 1


async def test_a_worker_writes_nothing_to_an_unsafe_store(
    cluster: TestCluster, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    check = StoreCheck(Overwriting(store), SystemClock(), random.Random(1))
    with pytest.raises(Invalid, match="conditional create"):
        await cluster.start_worker(check_store=check.ensure)
    assert [info.key async for info in store.list("")] == []
    weaker = StoreCheck(OverwritingUploads(store), SystemClock(), random.Random(1))
    with caplog.at_level(logging.WARNING):
        await cluster.start_worker(check_store=weaker.ensure)
    assert "no conditional completion" in caplog.text
    assert [info.key async for info in store.list("")] == [owner_key(0)]
