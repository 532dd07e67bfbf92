"""A worker leaves a manifest alone that requires a newer writer: it commits nothing, deletes nothing, and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from stratalog_metadata.records import ManifestPointer
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.format.manifest import encode_manifest, pointer_to
from stratalog_tiering.format.manifest_writers import WRITER_VERSION
from stratalog_tiering.format.object_frame import object_sha256
from stratalog_tiering.format.object_keys import manifest_key, segment_key
from stratalog_tiering.offload.commit_markers import mark_committed

Cluster = Any
Batches = Callable[..., list[bytes]]


async def upgraded(cluster: Cluster) -> ManifestPointer:
    """The pointer to a version that a newer release has committed."""
    pointer = cluster.pointer()
    manifest = await ManifestSource(cluster.store).manifest(pointer)
    newer = msgspec.structs.replace(
        manifest, version=manifest.version + 1, oldest_writer=WRITER_VERSION + 1, previous_key=pointer.object_key,
        previous_sha256=bytes.fromhex(pointer.sha256),
    )  # fmt: skip
    content = encode_manifest(newer)
    key = manifest_key(manifest.topic_id, manifest.partition, newer.version, 7)
    await cluster.store.put(key, [content])
    committed = pointer_to(newer, key, object_sha256(content))
    await cluster.metadata.propose(Command(updates=(Put(record=committed),)))
    await mark_committed(cluster.store, committed, 0)
    return committed


async def test_a_manifest_of_a_newer_writer_is_left_alone(cluster: Cluster, make_batches: Batches) -> None:
    await cluster.add_ledger(make_batches(0, [3]), 0)
    await cluster.start_worker("worker-1")
    await cluster.until(lambda: not cluster.log().ledgers)
    await cluster.close()
    pointer = await upgraded(cluster)
    unknown = segment_key(pointer.topic_id, pointer.index, 3, 0, 9)
    await cluster.store.put(unknown, [b"of a kind that only the newer release refers to"])
    cluster.store.calls.clear()
    await cluster.add_ledger(make_batches(3, [3]), 3)
    await cluster.start_worker("worker-2", grace_ms=0)
    await cluster.until(lambda: f"may be edited by writers from version {WRITER_VERSION + 1} on" in cluster.last_error())
    assert cluster.pointer() == pointer
    assert len(cluster.log().ledgers) == 1, "the hot copy stays"
    changes = [(name, key) for name, key in cluster.store.calls if name in ("delete", "put", "create_upload")]
    assert [key for _, key in changes if not key.endswith(".committed")] == []
