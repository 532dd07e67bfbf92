"""The object-store border: one suite over the local directory, and MinIO and versitygw by each engine of reads.

A few tests run against moto, too: a smoke run of the API (``-m smoke``) that needs no binary and proves no guarantee. The same
guarantees hold while answers fail in bursts: a few tests show it in every run, ``STRATALOG_CONTRACT_SEEDS`` runs all of them
over both servers and engines, as often as it says. Where ``STRATALOG_AZURITE`` or ``STRATALOG_FAKE_GCS`` is set
(``make contract-azure``, ``make contract-gcs``), the suite also runs over these emulators, with faults, too.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import pytest_asyncio
from conftest import AZURITE, FAKE_GCS
from support.s3_proxy import AZURE_REFUSALS, FAULTS, GCS_REFUSALS, S3_REFUSALS, Bursts, Fault, S3Proxy

from stratalog_core.errors import Conflict, Corrupt, Invalid, NoSuchObject, StratalogError
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.store import READ_ENGINES, ObjectStore, UploadedPart, get_pieces, open_store
from stratalog_tiering.store.checksums import crc_text, crc_text_of_parts

PART = b"p" * (5 * 1024 * 1024)
S3_BACKENDS = [f"{server}/{engine}" for server in ("minio", "versitygw") for engine in READ_ENGINES]
AZURE_BACKENDS = ["azurite/obstore"] if os.environ.get(AZURITE) else []
GCS_BACKENDS = ["gcs/obstore"] if os.environ.get(FAKE_GCS) else []
SERVER_BACKENDS = [*S3_BACKENDS, *AZURE_BACKENDS, *GCS_BACKENDS]
BACKENDS = ["directory", *(pytest.param(name, marks=pytest.mark.s3) for name in SERVER_BACKENDS)]
MOTO = [pytest.param(f"moto/{engine}", marks=pytest.mark.smoke) for engine in READ_ENGINES]
MOTO_IS_RIGHT_IN = {
    "test_what_is_put_is_read_back",
    "test_an_empty_object_is_an_object",
    "test_absence_is_explicit",
    "test_a_range_beyond_the_end_is_not_shortened",
    "test_if_absent_never_replaces",
    "test_listing_is_by_string_prefix_in_key_order",
    "test_deleting_is_idempotent",
    "test_a_part_can_be_sent_again",
}
"""It ignores ``If-None-Match`` when an upload is completed, and accepts wrong checksums: no more is asked of it."""


FAULT_SHARE = 0.2
"""Share of requests that get a fault."""
FAULTS_IN_A_ROW_MAX = 2
"""The client that repeats least, obstore, sends a request three times."""
REPEATED_FAULTS: tuple[Fault, ...] = tuple(fault for fault in FAULTS if fault != "etag")
"""After a lost answer another etag is no proof, so the outcome is rightly unknown."""
REFUSALS = {"azurite": AZURE_REFUSALS, "gcs": GCS_REFUSALS}
SEEDS = int(os.environ.get("STRATALOG_CONTRACT_SEEDS", "0"))
SAMPLE = {
    "test_what_is_put_is_read_back",
    "test_of_many_writers_one_wins",
    "test_deleting_is_idempotent",
    "test_a_multipart_upload_appears_whole_or_not_at_all",
    "test_completing_never_replaces",
    "test_of_many_completions_one_wins",
}


def faulty_backends(test: str) -> list[str]:
    """Return the backends that the test runs over while answers fail."""
    sample = ["minio/obstore/1"] if test in SAMPLE else []
    return [f"{name}/{seed}" for name in SERVER_BACKENDS for seed in range(1, SEEDS + 1)] if SEEDS else sample


def keeping_parts(fault: Fault | None, line: str) -> Fault | None:
    """No fault after which the emulator of Google Cloud Storage has a part's bytes, which it would append again."""
    return None if "upload_id=" in line and fault in ("lost", "cut") else fault


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "store_url" in metafunc.fixturenames:
        test = metafunc.function.__name__
        smoke = MOTO if test in MOTO_IS_RIGHT_IN else []
        faulty = [pytest.param(name, marks=pytest.mark.s3, id=f"faulty/{name}") for name in faulty_backends(test)]
        metafunc.parametrize("store_url", [*BACKENDS, *smoke, *faulty], indirect=True)


@pytest_asyncio.fixture
async def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    name, _, options = request.param.partition("/")
    if name == "directory":
        yield str(tmp_path / "store")
        return
    engine, _, seed = options.partition("/")
    server = request.getfixturevalue(f"{name}_server")
    url: str = server.make_bucket(f"test-{uuid4().hex[:12]}").replace("?", "/some/prefix?")
    if name not in ("azurite", "gcs"):
        url += f"&read_engine={engine}"
    if not seed:
        yield url
        return
    proxy = S3Proxy(server.endpoint, REFUSALS.get(name, S3_REFUSALS))
    choose = Bursts(random.Random(int(seed)), FAULT_SHARE, faults=REPEATED_FAULTS, in_a_row_max=FAULTS_IN_A_ROW_MAX)
    proxy.choose = choose if name != "gcs" else lambda line: keeping_parts(choose(line), line)
    origin = server.endpoint.removesuffix(urlsplit(server.endpoint).path)
    yield url.replace(origin, await proxy.start())
    await proxy.close()


@pytest_asyncio.fixture
async def store(store_url: str) -> AsyncIterator[ObjectStore]:
    background = ThreadBackground(8, "store")
    opened = open_store(store_url, background=background, clock=SystemClock(), random=random.Random(7))
    yield opened
    await opened.close()
    background.close()


async def keys(store: ObjectStore, prefix: str) -> list[str]:
    return [info.key async for info in store.list(prefix)]


async def test_what_is_put_is_read_back(store: ObjectStore) -> None:
    await store.put("a/b", [b"hello ", memoryview(b"wor"), bytearray(b"ld")])
    info = await store.head("a/b")
    assert (info.key, info.size_bytes) == ("a/b", 11)
    assert info.crc32c in ("", crc_text([b"hello world"]))
    assert await store.get("a/b") == b"hello world"
    assert bytes(await store.get_range("a/b", 6, 5)) == b"world"
    assert bytes(await store.get_range("a/b", 0, 1)) == b"h"


async def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    await store.put("empty", [])
    assert await store.get("empty") == b""


async def test_the_store_says_when_an_object_was_written(store: ObjectStore) -> None:
    await store.put("a", [b"x"])
    info = await store.head("a")
    assert abs(info.last_modified_ms - SystemClock().wall_ms()) < 60_000


async def test_absence_is_explicit(store: ObjectStore) -> None:
    for read in (store.get("none"), store.get_range("none", 0, 1), store.head("none")):
        with pytest.raises(NoSuchObject):
            await read
    await store.put("dir/object", [b"x"])
    with pytest.raises(NoSuchObject):
        await store.get("dir")
    with pytest.raises(NoSuchObject):
        await store.get("dir/object/below")


async def test_a_range_beyond_the_end_is_not_shortened(store: ObjectStore) -> None:
    await store.put("a", [b"12345"])
    for start, length in ((3, 5), (5, 1), (9, 2)):
        with pytest.raises(Corrupt):
            await store.get_range("a", start, length)
    with pytest.raises(Invalid):
        await store.get_range("a", 0, 0)


async def test_adjacent_pieces_are_each_in_memory_of_their_own(store: ObjectStore) -> None:
    content = bytes(range(256)) * 4000
    await store.put("a", [content])
    lengths = [1, 300_000, 7, 500_000]
    pieces = await get_pieces(store, "a", 3, lengths)
    assert [len(piece) for piece in pieces] == lengths
    assert b"".join(pieces) == content[3 : 3 + sum(lengths)]
    assert len({id(piece.obj) for piece in pieces}) == len(lengths)
    (alone,) = await get_pieces(store, "a", 5, [9])
    assert alone == content[5:14]


async def test_pieces_beyond_the_end_are_not_shortened(store: ObjectStore) -> None:
    await store.put("a", [b"12345"])
    for start, lengths in ((0, [2, 4]), (0, [5, 1]), (3, [3]), (4, [1, 1, 1])):
        with pytest.raises(Corrupt):
            await get_pieces(store, "a", start, lengths)
    with pytest.raises(NoSuchObject):
        await get_pieces(store, "none", 0, [1, 1])


async def test_if_absent_never_replaces(store: ObjectStore) -> None:
    await store.put("a", [b"first"])
    with pytest.raises(Conflict):
        await store.put("a", [b"second"])
    assert await store.get("a") == b"first"
    await store.put("a", [b"third"], if_absent=False)
    assert await store.get("a") == b"third"


async def test_of_many_writers_one_wins(store: ObjectStore) -> None:
    async def write(key: str, number: int) -> int | None:
        try:
            await store.put(key, [b"%d" % number])
        except Conflict:
            return None
        return number

    for key in ("race/1", "race/2", "race/3"):
        winners = [n for n in await asyncio.gather(*(write(key, n) for n in range(8))) if n is not None]
        assert len(winners) == 1
        assert await store.get(key) == b"%d" % winners[0]


async def test_listing_is_by_string_prefix_in_key_order(store: ObjectStore) -> None:
    written = ["a/1", "a/10", "a/2", "a-b", "ab/c", "b"]
    for key in written:
        await store.put(key, [b"x"])
    assert await keys(store, "") == sorted(written)
    assert await keys(store, "a/1") == ["a/1", "a/10"]
    assert await keys(store, "a") == sorted(key for key in written if key.startswith("a"))
    assert await keys(store, "zzz/") == []
    assert [info.size_bytes async for info in store.list("b")] == [1]


async def test_listings_of_more_than_a_page(store: ObjectStore) -> None:
    names = [f"many/{number:04d}" for number in range(1040)]
    for first in range(0, len(names), 40):
        await asyncio.gather(*(store.put(name, [b"x"]) for name in names[first : first + 40]))
    assert await keys(store, "many/") == names
    await store.delete(names)
    assert await keys(store, "") == []


async def test_deleting_is_idempotent(store: ObjectStore) -> None:
    await store.put("a/b", [b"x"])
    await store.delete(["a/b", "never/was"])
    await store.delete(["a/b"])
    await store.delete([])
    with pytest.raises(NoSuchObject):
        await store.head("a/b")
    await store.put("a/b", [b"again"])


async def test_a_multipart_upload_appears_whole_or_not_at_all(store: ObjectStore) -> None:
    upload = await store.create_upload("big/object", len(PART))
    parts = [await store.put_part(upload, 2, [b"the ", b"end"]), await store.put_part(upload, 1, [PART[:100], PART[100:]])]
    assert await keys(store, "") == []
    assert [open_.upload_id async for open_ in store.list_uploads()] == [upload.upload_id]
    checksum = await store.complete_upload(upload, parts)
    info = await store.head("big/object")
    assert info.size_bytes == len(PART) + 7
    assert {checksum, info.crc32c} <= {"", crc_text([PART, b"the end"]), crc_text_of_parts(parts[::-1])}
    assert bytes(await store.get_range("big/object", len(PART) - 1, 8)) == b"pthe end"
    assert [open_ async for open_ in store.list_uploads()] == []


async def test_a_part_can_be_sent_again(store: ObjectStore) -> None:
    upload = await store.create_upload("object", len(PART))
    await store.put_part(upload, 1, [b"spoiled"])
    part = await store.put_part(upload, 1, [b"whole"])
    await store.complete_upload(upload, [part])
    assert await store.get("object") == b"whole"


async def test_completing_never_replaces(store: ObjectStore) -> None:
    await store.put("object", [b"first"])
    upload = await store.create_upload("object", len(PART))
    part = await store.put_part(upload, 1, [b"second"])
    with pytest.raises(Conflict):
        await store.complete_upload(upload, [part])
    assert await store.get("object") == b"first"
    await store.abort_upload(upload)
    assert [open_ async for open_ in store.list_uploads()] == []


async def test_of_many_completions_one_wins(store: ObjectStore) -> None:
    async def upload(number: int) -> int | None:
        begun = await store.create_upload("race", len(PART))
        part = await store.put_part(begun, 1, [b"%d" % number])
        try:
            await store.complete_upload(begun, [part])
        except Conflict:
            await store.abort_upload(begun)
            return None
        return number

    winners = [n for n in await asyncio.gather(*(upload(n) for n in range(6))) if n is not None]
    assert len(winners) == 1
    assert await store.get("race") == b"%d" % winners[0]


async def test_an_aborted_upload_leaves_nothing(store: ObjectStore) -> None:
    upload = await store.create_upload("object", len(PART))
    part = await store.put_part(upload, 1, [b"x"])
    await store.abort_upload(upload)
    await store.abort_upload(upload)
    assert [open_ async for open_ in store.list_uploads()] == []
    with pytest.raises(StratalogError):
        await store.complete_upload(upload, [part])
    with pytest.raises(NoSuchObject):
        await store.head("object")


async def test_a_wrong_receipt_makes_no_object(store: ObjectStore) -> None:
    upload = await store.create_upload("object", len(PART))
    part = await store.put_part(upload, 1, [b"x"])
    wrong = UploadedPart(number=2, etag=part.etag, size_bytes=part.size_bytes, crc32c=part.crc32c)
    with pytest.raises(StratalogError):
        await store.complete_upload(upload, [part, wrong])
    with pytest.raises(NoSuchObject):
        await store.head("object")


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/../b", "a/", "ä", "a b", ".uploads/x", ".aside/x"])
async def test_keys_are_plain_names(store: ObjectStore, key: str) -> None:
    if key.startswith(".") and store.url.startswith(("s3", "az", "gs")):
        pytest.skip("reserved in a directory only")
    with pytest.raises(Invalid):
        await store.put(key, [b"x"])


async def test_a_finished_read_keeps_nothing_of_its_bytes(store: ObjectStore) -> None:
    """They are freed with the last reference, not by the garbage collector, which runs rarely where it is asked to."""
    await store.put("object", [PART])
    await store.get_range("object", 0, len(PART))
    gc.collect()
    gc.disable()
    try:
        task = asyncio.ensure_future(store.get_range("object", 0, len(PART)))
        content = weakref.ref(await task)
        del task
        async with asyncio.timeout(60):
            while content() is not None:  # noqa: ASYNC110 - no event tells that memory is free
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_a_read_that_is_cancelled_stops(store: ObjectStore) -> None:
    await store.put("object", [PART])
    task = asyncio.ensure_future(store.get_range("object", 0, len(PART)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(await store.get_range("object", 0, len(PART))) == len(PART)
