"""``tier gc`` on topics that an earlier owner of the bucket deleted: what it says, and what ``--deleted`` decides."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from uuid import UUID

import pytest
from click.testing import CliRunner, Result
from support.embedded_quorum import EmbeddedQuorum

from stratalog.app import stratalog
from stratalog_core.errors import Invalid, NotFound
from stratalog_tiering.format.descriptor import DeletionMarker, OwnerDescriptor, TopicDescriptor, encode_descriptor
from stratalog_tiering.format.object_keys import deletion_marker_key, owner_key, topic_key, version_key
from stratalog_tiering.offload.ownership import cluster_id_in

TOPIC_ID = UUID(int=7)
LONG_AGO_S = 1_700_000_000
DAY_S = 86_400


def _put(store: Path, key: str, content: bytes, written_s: int) -> None:
    path = store / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (written_s, written_s))


@pytest.fixture
def store(tmp_path: Path, quorum: EmbeddedQuorum) -> Path:
    """A bucket that the cluster has taken over from another one, which had deleted a topic long before."""
    made, own = tmp_path / "bucket", cluster_id_in(quorum.client)
    marker = DeletionMarker(topic_id=TOPIC_ID, deleted_at_ms=LONG_AGO_S * 1000, cluster_id="earlier", restorable_ms=0)
    topic = TopicDescriptor(topic_id=TOPIC_ID, name="flights", partition_count=1, replication_factor=1)
    for number, cluster_id in enumerate(("earlier", own)):
        owner = OwnerDescriptor(cluster_id=cluster_id, number=number, taken_at_ms=LONG_AGO_S * 1000)
        _put(made, owner_key(number), encode_descriptor(owner), LONG_AGO_S)
    _put(made, topic_key(TOPIC_ID, 1), encode_descriptor(topic), LONG_AGO_S)
    _put(made, version_key(TOPIC_ID, 0, 1), b"a manifest", LONG_AGO_S)
    _put(made, deletion_marker_key(TOPIC_ID), encode_descriptor(marker), LONG_AGO_S)
    return made


async def _gc(quorum: EmbeddedQuorum, store: Path, *words: str) -> Result:
    where = ["--metadata", ",".join(quorum.addresses), "--store", str(store)]
    return await asyncio.to_thread(CliRunner().invoke, stratalog, ["tier", "gc", *words, *where], catch_exceptions=False)


async def test_what_waits_for_a_worker_is_listed_with_its_reason(quorum: EmbeddedQuorum, store: Path) -> None:
    done = await _gc(quorum, store, "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert (shown["due"], shown["refused"]) == ([], [])
    (row,) = shown["waiting"]
    assert (row["topic"], row["partition"], row["reason"], row["objects"]) == ("flights", None, "earlier-deletion", 2)


async def test_an_operator_decides_on_a_topic_whose_history_went_on(quorum: EmbeddedQuorum, store: Path) -> None:
    _put(store, version_key(TOPIC_ID, 0, 2), b"a manifest", LONG_AGO_S + DAY_S)
    refused = await _gc(quorum, store, "--dry-run")
    assert refused.exit_code == 1
    assert "deleted topic flights: its history went on after its deletion" in refused.stderr
    assert f"stratalog tier gc --deleted {TOPIC_ID}" in refused.stderr
    decide = ("--deleted", str(TOPIC_ID))
    with pytest.raises(Invalid, match="give --yes to confirm"):
        await _gc(quorum, store, *decide)
    assert (await _gc(quorum, store, *decide, "--dry-run")).exit_code == 2
    done = await _gc(quorum, store, *decide, "--yes", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["deleted"] == [], "its periods begin again"
    assert json.loads(done.stdout)["waiting"][0]["objects"] == 3
    assert json.loads((store / deletion_marker_key(TOPIC_ID)).read_bytes())["deleted_at_ms"] > LONG_AGO_S * 1000
    with pytest.raises(NotFound, match="waits for a decision"):
        await _gc(quorum, store, *decide, "--yes")
