"""``stratalog job erase`` notices that a partition's history is not the one that it has searched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from unit.tiering.maintenance.test_erasure import SEGMENTS, batch_of, cold, erase, ports_of
from unit.tiering.maintenance.test_forks import decide, outcome
from unit.tiering.maintenance.test_replaced_objects import erase_searched, origin, searched

from stratalog.tier import erasing
from stratalog.tier.erasing import EraseFrom
from stratalog_core.errors import Conflict
from stratalog_metadata.records import KEEP_METADATA, KEEP_STORE, ManifestPointer
from stratalog_metadata.state.commands import Command, Delete, Put
from stratalog_tiering.offload.commit import refuse_fork

Cluster = Any
__all__ = ["origin"]


async def forked(cluster: Cluster) -> ManifestPointer:
    """Offloads `SEGMENTS`, and restores metadata as it was before the last two; returns the store's newest version."""
    pointers = list[ManifestPointer]()
    for batches in SEGMENTS:
        await cold(cluster, [batches])
        pointers.append(cluster.pointer())
    log = msgspec.structs.replace(cluster.log(), ledgers=())
    await cluster.metadata.propose(Command(updates=(Put(record=pointers[0]), Put(record=log))))
    return pointers[-1]


@pytest.mark.parametrize("found", [True, False])
async def test_a_fork_that_is_not_decided_is_named(cluster: Cluster, origin: EraseFrom, found: bool) -> None:
    """The search has read the store's line. If it found nothing there, nothing else looked at metadata's."""
    await forked(cluster)
    before = cluster.pointer()
    done = await erase_searched(origin, cluster, await searched(cluster), found=found)
    (reason,) = done.changed.values()
    assert "history of flights-0 has forked" in reason
    assert "stratalog tier resolve-fork flights 0 --keep metadata|store" in reason
    assert done.erased == []
    assert cluster.pointer() == before


@pytest.mark.parametrize("keep", [KEEP_METADATA, KEEP_STORE])
@pytest.mark.parametrize("found", [True, False])
async def test_a_fork_that_was_resolved_since_the_search_is_named(
    cluster: Cluster, origin: EraseFrom, keep: str, found: bool
) -> None:
    """The kept line has other records at the same offsets, which nothing has searched."""
    await forked(cluster)
    held = await searched(cluster)
    worker = await cluster.start_worker("worker-2", segment_bytes=1)
    await decide(cluster, keep)
    await cluster.until(lambda: outcome(cluster) == "" and not cluster.pointer().content)
    if keep == KEEP_METADATA:
        await cluster.add_ledger([batch_of(6, "bob", "alice")], 6)
        await cluster.until(lambda: not cluster.log().ledgers)
    await worker.close()
    before = cluster.pointer()
    done = await erase_searched(origin, cluster, held, found=found)
    assert {str(name): reason for name, reason in done.changed.items()} == {
        "flights-0": "a fork of it was resolved, or it was restored up to a point"
    }
    assert (done.hot, done.erased) == ({}, [])
    assert cluster.pointer() == before
    again = await erase_searched(origin, cluster, await searched(cluster), found=True)
    assert (again.changed, len(again.erased)) == ({}, 2)


async def test_a_version_that_is_in_metadata_alone_counts(cluster: Cluster, origin: EraseFrom) -> None:
    """As after a restore of metadata, before the store has any version of its line."""
    await cold(cluster, SEGMENTS)
    (name, history), *others = (await searched(cluster)).items()
    for changed in (replace(history, sha256="00" * 32), replace(history, version=history.version + 1)):
        done = await erase_searched(origin, cluster, {name: changed, **dict(others)}, found=True)
        assert done.erased == []
        assert done.changed[name].startswith(f"metadata has another manifest version {history.version} than the bucket had")


async def test_commits_of_workers_continue_the_history(cluster: Cluster, origin: EraseFrom) -> None:
    await cold(cluster, SEGMENTS[:2])
    held = await searched(cluster)
    await cold(cluster, SEGMENTS[2:])
    await erase(cluster)
    done = await erase_searched(origin, cluster, held, found=True)
    assert (done.changed, done.erased) == ({}, [])
    assert {str(name): offset for name, offset in done.hot.items()} == {"flights-0": 9}


async def test_a_commit_while_the_history_is_compared_makes_it_look_again(
    cluster: Cluster, origin: EraseFrom, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cold(cluster, SEGMENTS)
    held, lost = await searched(cluster), 0

    async def raced(*arguments: Any) -> None:
        nonlocal lost
        lost += 1
        if lost % 2:
            raise Conflict("the manifest has changed since this step was planned")
        await refuse_fork(*arguments)

    monkeypatch.setattr(erasing, "refuse_fork", raced)
    done = await erase_searched(origin, cluster, held, found=True)
    assert (done.changed, len(done.erased)) == ({}, 2)
    assert lost


async def test_a_topic_that_was_deleted_meanwhile_has_no_history(cluster: Cluster, origin: EraseFrom) -> None:
    await cold(cluster, SEGMENTS)
    held = await searched(cluster)
    assert await erasing.changed_histories(ports_of(cluster), held) == {}
    log = cluster.log()
    await cluster.metadata.propose(Command(updates=(Delete(key=cluster.topic.key()), Delete(key=log.key()))))
    assert await erasing.changed_histories(ports_of(cluster), held) == {}
