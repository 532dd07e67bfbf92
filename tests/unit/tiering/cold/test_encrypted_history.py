"""Encrypted history: readers, verification, merging and the sweep work as on plain history, and the bucket holds no record."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from click.testing import CliRunner
from support.directory_store import object_contents, object_files

from stratalog.commands.key import key
from stratalog_core.errors import Conflict, Corrupt, Invalid, StorageFailed
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.proofs import prove_batch
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.cold.segment_check import require_sound
from stratalog_tiering.cold.verifier import Verifier
from stratalog_tiering.core.damage import Damage
from stratalog_tiering.format.object_keys import data_key_key, marker_key, segment_key
from stratalog_tiering.format.segment import plain_block
from stratalog_tiering.maintenance.merging import FAN_IN
from stratalog_tiering.metrics import ScrubMetrics
from stratalog_tiering.offload.data_keys import rewrap, rewrap_topic
from stratalog_tiering.store import ObjectStore, open_store
from stratalog_tiering.store.key_ring import FileKeyRing, create_key

MIB = 1024 * 1024
Cluster = Any
Batches = Callable[..., list[bytes]]
SETTINGS = ColdReaderSettings(read_ahead_blocks=0)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    create_key(tmp_path / "keys", "k1")
    return tmp_path / "keys"


@pytest_asyncio.fixture
async def store(store_directory: Path, keys: Path, background: ThreadBackground) -> ObjectStore:
    """The store of ``cluster``."""
    url = f"{store_directory}?keys={keys}"
    return open_store(url, background=background, clock=SystemClock(), random=random.Random(3))


async def configure(cluster: Cluster, **configs: str) -> None:
    topic = msgspec.structs.replace(cluster.topic, configs={"retention.ms": "-1", **configs})
    await cluster.metadata.propose(Command(updates=(Put(record=topic),)))


async def write(cluster: Cluster, make_batches: Batches, written: list[bytes], ledgers: int) -> None:
    for _ in range(ledgers):
        base = len(written) * 10
        batches = make_batches(base, [10] * 5)
        written.extend(batches)
        await cluster.add_ledger(batches, base)
    await cluster.until(lambda: cluster.pointer() is not None and not cluster.log().ledgers)


async def encrypted(cluster: Cluster, make_batches: Batches, ledgers: int = 3, compression: str = "none") -> list[bytes]:
    """An encrypted history of one segment for each ledger; returns its batches."""
    written: list[bytes] = []
    await configure(cluster, **{"stratalog.tier.encryption.key": "k1", "stratalog.tier.compression": compression})
    await cluster.start_worker(segment_bytes=1, block_bytes=600)
    await write(cluster, make_batches, written, ledgers)
    return written


def names(directory: Path, suffix: str) -> set[str]:
    return {path.stem for path in object_files(directory) if path.suffix == suffix}


def contents(directory: Path) -> list[bytes]:
    return list(object_contents(directory).values())


async def read_all(store: ObjectStore, pointer: Any, **reader: Any) -> bytes:
    source = ColdReader(store, reader.pop("settings", SETTINGS), SystemClock(), **reader)
    content, offset = b"", pointer.start_offset
    while offset < pointer.end_offset:
        found = await source.fetch(pointer, offset, MIB, 60)
        content, offset = content + b"".join(found.batches), found.end_offset
    await source.close()
    return content


@pytest.mark.parametrize("compression", ["none", "zstd"])
async def test_readers_see_the_batches_and_the_bucket_does_not(
    cluster: Cluster, make_batches: Batches, store_directory: Path, background: ThreadBackground, compression: str
) -> None:
    written = await encrypted(cluster, make_batches, compression=compression)
    store, pointer = cluster.store, cluster.pointer()
    assert await read_all(store, pointer) == b"".join(written)
    assert not any(batch[70:] in content for content in contents(store_directory) for batch in written)
    source = ManifestSource(store)
    manifest = await source.manifest(pointer)
    footers = [await source.footer(entry) for entry in manifest.segments]
    assert {footer.block_encryption for footer in footers} == {"aes-256-gcm"}
    assert [footer.data_key for footer in footers] == [data_key_key(entry.key) for entry in manifest.segments]
    assert {block.is_compressed for footer in footers for block in footer.blocks} == {compression == "zstd"}
    report = await Verifier(store, background).partition("flights", pointer)
    assert report.findings == ()
    proof = await prove_batch(store, source, background, manifest, 70)
    assert proof.holds(written[7]), "a leaf is over the batch, not over the stored bytes"


async def test_the_disk_cache_holds_encrypted_blocks(
    cluster: Cluster, make_batches: Batches, tmp_path: Path, background: ThreadBackground
) -> None:
    written = await encrypted(cluster, make_batches)
    files, settings = SystemFiles(tmp_path / "cache"), ColdReaderSettings(disk_bytes=MIB, read_ahead_blocks=0)
    content = await read_all(
        cluster.store, cluster.pointer(), settings=settings, memory_bytes=400, files=files, background=background
    )
    assert content == b"".join(written)
    cached = [(tmp_path / "cache/blocks" / name).read_bytes() for name in files.list("blocks")]
    assert cached
    assert not any(batch[70:] in block for block in cached for batch in written)


async def test_a_key_that_is_not_there_is_named(
    cluster: Cluster, make_batches: Batches, store_directory: Path, keys: Path, background: ThreadBackground
) -> None:
    await encrypted(cluster, make_batches)
    await cluster.close()
    (keys / "k1.key").rename(keys / "elsewhere")
    options = {"background": background, "clock": SystemClock(), "random": random.Random(4)}
    for url, message in ((f"{store_directory}?keys={keys}", f"'k1' is not in {keys}"), (str(store_directory), "add keys=")):
        store = open_store(url, **options)  # type: ignore[arg-type]
        with pytest.raises(StorageFailed, match=message):
            await read_all(store, cluster.pointer())
        with pytest.raises(StorageFailed, match=message):
            await Verifier(store, background).partition("flights", cluster.pointer())


async def test_a_worker_without_the_key_says_so_and_keeps_the_hot_copy(
    cluster: Cluster, make_batches: Batches, keys: Path
) -> None:
    await configure(cluster, **{"stratalog.tier.encryption.key": "k2"})
    worker = await cluster.start_worker()
    await cluster.add_ledger(make_batches(0, [10]), 0)
    await cluster.until(lambda: "key 'k2' is not in" in cluster.last_error())
    assert len(cluster.log().ledgers) == 1
    create_key(keys, "k2")
    await cluster.until(lambda: not cluster.log().ledgers)
    await worker.close()


async def test_a_lost_or_altered_data_key_is_damage(
    cluster: Cluster, make_batches: Batches, store_directory: Path, background: ThreadBackground
) -> None:
    await encrypted(cluster, make_batches)
    manifest = await ManifestSource(cluster.store).manifest(cluster.pointer())
    first, second, third = (store_directory / data_key_key(entry.key) for entry in manifest.segments)
    first.unlink()
    second.write_bytes(third.read_bytes().replace(b'"wrapped": "', b'"wrapped": "AAAA'))
    third.write_bytes(b"{")
    report = await Verifier(cluster.store, background).partition("flights", cluster.pointer())
    lost = [(Damage.DATA_KEY_MISSING, 0), (Damage.DATA_KEY_ALTERED, 50), (Damage.DATA_KEY_ALTERED, 100)]
    assert [(found.kind, found.base_offset) for found in report.findings] == lost


async def test_a_block_in_another_place_or_under_another_key_is_refused(cluster: Cluster, make_batches: Batches) -> None:
    await encrypted(cluster, make_batches)
    source = ManifestSource(cluster.store)
    first, second, _ = (await source.manifest(cluster.pointer())).segments
    footer, other = await source.footer(first), await source.footer(second)
    block = footer.blocks[0]
    stored = await cluster.store.get_range(first.key, block.position, block.length)
    assert plain_block(stored, block, await source.cipher(footer))
    with pytest.raises(Corrupt, match="does not decrypt"):
        plain_block(stored, block, await source.cipher(other))
    moved = msgspec.structs.replace(block, base_offset=block.base_offset + 10, last_offset=block.last_offset + 10)
    with pytest.raises(Corrupt, match="does not decrypt"):
        plain_block(stored, moved, await source.cipher(footer))


async def test_after_a_rotation_the_old_key_is_not_needed(
    cluster: Cluster, make_batches: Batches, store_directory: Path, keys: Path, background: ThreadBackground
) -> None:
    written = await encrypted(cluster, make_batches)
    source = ManifestSource(cluster.store)
    manifest = await source.manifest(cluster.pointer())
    segments = {entry.key: (store_directory / entry.key).read_bytes() for entry in manifest.segments}
    create_key(keys, "k2")
    assert [await rewrap(cluster.store, data_key_key(key), "k2") for key in segments] == [True] * 3
    assert [await rewrap(cluster.store, data_key_key(key), "k2") for key in segments] == [False] * 3
    (keys / "k1.key").unlink()
    url = f"{store_directory}?keys={keys}"
    store = open_store(url, background=background, clock=SystemClock(), random=random.Random(4))
    assert await read_all(store, cluster.pointer()) == b"".join(written)
    assert {key: (store_directory / key).read_bytes() for key in segments} == segments


async def test_a_rotation_reaches_the_second_copy(
    cluster: Cluster, make_batches: Batches, store_directory: Path, tmp_path: Path, keys: Path, background: ThreadBackground
) -> None:
    directory = tmp_path / "second"
    url = f"{directory}?keys={keys}"
    second = open_store(url, background=background, clock=SystemClock(), random=random.Random(4))
    written: list[bytes] = []
    await configure(cluster, **{"stratalog.tier.encryption.key": "k1"})
    await cluster.start_worker(segment_bytes=1, block_bytes=600, second=second)
    await write(cluster, make_batches, written, 3)
    pointer = cluster.pointer()
    async with asyncio.timeout(60):
        while not (directory / marker_key(pointer.object_key)).exists():  # noqa: ASYNC110 - stores tell nobody
            await asyncio.sleep(0.02)
    create_key(keys, "k2")
    words = ("rotate", "flights", "--to", "k2", "--store", f"{store_directory}?keys={keys}", "--copy", url, "--json")
    done = await asyncio.to_thread(CliRunner().invoke, key, words, catch_exceptions=False)
    counts = json.loads(done.stdout)
    assert (counts["rewrapped"], counts["rewrapped_in_copy"]) == (3, 3)
    (keys / "k1.key").unlink()
    alone = open_store(url, background=background, clock=SystemClock(), random=random.Random(5))
    assert await read_all(alone, pointer) == b"".join(written)


async def test_a_rotation_reaches_segments_whose_version_is_not_in_the_bucket_yet(
    cluster: Cluster, make_batches: Batches, store_directory: Path, keys: Path, background: ThreadBackground
) -> None:
    """The worker ended between its commit and the write of the manifest, which metadata has until then."""
    written = await encrypted(cluster, make_batches)
    await cluster.close()
    pointer = cluster.pointer()
    manifest = (store_directory / pointer.object_key).read_bytes()
    (store_directory / pointer.object_key).unlink()
    orphan = data_key_key(segment_key(cluster.topic.topic_id, 0, 0, 0, 1))
    await cluster.store.put(orphan, [b"damaged"])
    create_key(keys, "k2")
    url = f"{store_directory}?keys={keys}"
    words = ("rotate", "flights", "--to", "k2", "--store", url, "--json")
    done = await asyncio.to_thread(CliRunner().invoke, key, words, catch_exceptions=False)
    counts = json.loads(done.stdout)
    assert (counts["rewrapped"], counts["unencrypted_segments"]) == (3, 0)
    (keys / "k1.key").unlink()
    store = open_store(url, background=background, clock=SystemClock(), random=random.Random(4))
    assert await read_all(store, msgspec.structs.replace(pointer, content=manifest)) == b"".join(written)


async def test_a_data_key_that_is_rotated_while_it_is_copied_is_copied_again(
    cluster: Cluster, make_batches: Batches, tmp_path: Path, keys: Path, background: ThreadBackground,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    written = await encrypted(cluster, make_batches, 1)
    await cluster.close()
    (entry,) = (await ManifestSource(cluster.store).manifest(cluster.pointer())).segments
    data_key, url = data_key_key(entry.key), f"{tmp_path / 'second'}?keys={keys}"
    second = open_store(url, background=background, clock=SystemClock(), random=random.Random(4))
    create_key(keys, "k2")
    put = second.put

    async def late(name: str, parts: Any, **options: Any) -> None:
        """The first write takes as long as the rotation of both stores, which does not find the key in the second yet."""
        if name == data_key and await rewrap(cluster.store, data_key, "k2"):
            assert await rewrap_topic(second, cluster.topic.topic_id, "k2") == 0
        await put(name, parts, **options)

    monkeypatch.setattr(second, "put", late)
    await cluster.start_worker("copier", second=second)
    async with asyncio.timeout(60):
        while not (tmp_path / "second" / marker_key(cluster.pointer().object_key)).exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    (keys / "k1.key").unlink()
    alone = open_store(url, background=background, clock=SystemClock(), random=random.Random(5))
    assert await read_all(alone, cluster.pointer()) == b"".join(written)


async def test_a_damaged_data_key_is_not_copied(
    cluster: Cluster, make_batches: Batches, store_directory: Path, tmp_path: Path, keys: Path, background: ThreadBackground
) -> None:
    written = await encrypted(cluster, make_batches, 1)
    await cluster.close()
    (entry,) = (await ManifestSource(cluster.store).manifest(cluster.pointer())).segments
    path = store_directory / data_key_key(entry.key)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"wrapped": "', b'"wrapped": "AAAA'))
    url = f"{tmp_path / 'second'}?keys={keys}"
    second = open_store(url, background=background, clock=SystemClock(), random=random.Random(4))
    worker = await cluster.start_worker("copier", second=second)
    async with asyncio.timeout(60):
        while worker._second is None or not worker._second.counters.failures:  # noqa: ASYNC110 - stores tell nobody
            await asyncio.sleep(0.02)
    path.write_bytes(content)
    async with asyncio.timeout(60):
        while not (tmp_path / "second" / marker_key(cluster.pointer().object_key)).exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    alone = open_store(url, background=background, clock=SystemClock(), random=random.Random(5))
    assert await read_all(alone, cluster.pointer()) == b"".join(written)


async def test_segments_follow_the_policy_and_merges_too(
    cluster: Cluster, make_batches: Batches, background: ThreadBackground
) -> None:
    written: list[bytes] = []

    async def encryptions() -> list[str]:
        source = ManifestSource(cluster.store)
        manifest = await source.manifest(cluster.pointer())
        return [(await source.footer(entry)).block_encryption for entry in manifest.segments]

    await configure(cluster)
    await cluster.start_worker("worker-1", segment_bytes=1)
    await write(cluster, make_batches, written, 1)
    await configure(cluster, **{"stratalog.tier.encryption.key": "k1"})
    await write(cluster, make_batches, written, FAN_IN - 1)
    assert await encryptions() == ["none", *["aes-256-gcm"] * (FAN_IN - 1)]
    version = cluster.pointer().manifest_version
    await cluster.close()
    await cluster.start_worker("worker-2")
    await cluster.until(lambda: cluster.pointer().manifest_version > version)
    assert await encryptions() == ["aes-256-gcm"]
    assert await read_all(cluster.store, cluster.pointer()) == b"".join(written)
    assert (await Verifier(cluster.store, background).partition("flights", cluster.pointer())).findings == ()


async def test_data_keys_stay_as_long_as_their_segments(
    cluster: Cluster, make_batches: Batches, store_directory: Path, background: ThreadBackground
) -> None:
    written = await encrypted(cluster, make_batches)
    await cluster.close()
    await cluster.start_worker("worker-2", grace_ms=0, sweep_interval_ms=10, retention_interval_ms=10)
    await asyncio.sleep(0.3)
    assert await read_all(cluster.store, cluster.pointer()) == b"".join(written)
    await configure(cluster, **{"stratalog.tier.encryption.key": "k1", "retention.bytes": "1"})
    await cluster.until(lambda: cluster.log().log_start_offset >= 100)
    async with asyncio.timeout(60):
        # They are deleted one after the other.
        while len(names(store_directory, ".segment")) > 1 or len(names(store_directory, ".key")) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert names(store_directory, ".key") == names(store_directory, ".segment")


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_lost_or_altered_data_key_keeps_the_hot_copy(
    cluster: Cluster, make_batches: Batches, store_directory: Path, is_lost: bool
) -> None:
    await configure(cluster, **{"stratalog.tier.encryption.key": "k1"})
    await cluster.add_ledger(make_batches(0, [3]), 0)
    worker = await cluster.start_worker(deletion_lag_ms=3_600_000)
    await cluster.until(lambda: cluster.pointer() is not None and not cluster.pointer().content)
    await worker.close()
    (path,) = (each for each in object_files(store_directory) if each.suffix == ".key")
    content = path.read_bytes()
    path.write_bytes(b"altered")
    if is_lost:
        path.unlink()
    await cluster.start_worker("worker-2")
    await cluster.until(lambda: cluster.last_error() != "" or not cluster.log().ledgers)
    assert len(cluster.log().ledgers) == 1, "the only copy that can be read is dropped"
    assert "data key" in cluster.last_error() or path.name in cluster.last_error()
    path.write_bytes(content)
    await cluster.until(lambda: not cluster.log().ledgers)


async def test_segments_whose_key_is_missing_do_not_end_the_scrub_of_the_others(
    cluster: Cluster, make_batches: Batches, store_directory: Path, keys: Path, background: ThreadBackground
) -> None:
    """They are reported until the key is back."""
    await encrypted(cluster, make_batches)
    await cluster.close()
    manifest = await ManifestSource(cluster.store).manifest(cluster.pointer())
    *_, last = (entry.key for entry in manifest.segments)
    create_key(keys, "k2")
    await rewrap(cluster.store, data_key_key(last), "k2")
    content = (store_directory / last).read_bytes()
    (store_directory / last).write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    kept = (keys / "k1.key").rename(keys / "k1.kept")
    url = f"{store_directory}?keys={keys}"
    cluster.store = open_store(url, background=background, clock=SystemClock(), random=random.Random(4))
    worker = await cluster.start_worker("scrubber", scrub_interval_ms=1000)

    def unrepaired() -> int:
        return int(next(group for group in worker.metrics() if isinstance(group, ScrubMetrics)).unrepaired)

    async with asyncio.timeout(60):
        while unrepaired() != 3:  # noqa: ASYNC110 - stores tell nobody
            await asyncio.sleep(0.02)
        kept.rename(keys / "k1.key")
        while unrepaired() != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_copy_that_was_encrypted_with_another_data_key_is_not_sound(
    cluster: Cluster, make_batches: Batches, store_directory: Path, background: ThreadBackground
) -> None:
    """An upload is read back with the data key from the store, so that a data key that was not stored is noticed in time."""
    await encrypted(cluster, make_batches, 1)
    source = ManifestSource(cluster.store)
    (entry,) = (await source.manifest(cluster.pointer())).segments
    (store_directory / data_key_key(entry.key)).unlink()
    with pytest.raises(Corrupt, match="is missing"):
        await require_sound(cluster.store, ManifestSource(cluster.store), entry, background, reads_at_once=4)


async def test_a_key_is_made_once_and_checked(tmp_path: Path) -> None:
    path = create_key(tmp_path / "new", "k1")
    assert path.stat().st_mode & 0o777 == 0o600
    content = path.read_bytes()
    with pytest.raises(Conflict, match="exists"):
        create_key(tmp_path / "new", "k1")
    assert path.read_bytes() == content
    ring = FileKeyRing(tmp_path / "new")
    data_key, wrapped = await ring.make("k1", b"here")
    assert await ring.unwrap("k1", wrapped, b"here") == data_key
    with pytest.raises(Corrupt, match="wrapped by another"):
        await ring.unwrap("k1", wrapped, b"there")
    with pytest.raises(Invalid, match="is invalid"):
        await ring.make("../k1", b"")
    (tmp_path / "new/short.key").write_text("AAAA")
    with pytest.raises(Invalid, match="holds a key of 3 bytes"):
        await ring.make("short", b"")
    (tmp_path / "new/text.key").write_text("no key")
    with pytest.raises(Invalid, match="32 bytes in base64"):
        await ring.make("text", b"")
