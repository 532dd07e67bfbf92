"""``tier status`` and ``doctor`` show the damage that the continuous scrub could not repair."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner
from support.embedded_quorum import EmbeddedQuorum
from unit.broker.hand_fed_view import HandFedView

from stratalog.app import stratalog
from stratalog.commands import tier
from stratalog.exit_codes import ExitCode
from stratalog.health.cluster import check_history
from stratalog.health.finding import Verdict
from stratalog.tier.copies import copied_partitions
from stratalog.tier.unrepaired import unrepaired_damage
from stratalog_metadata.records import TierStatus, Topic
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.format import object_keys

TOPIC = Topic(name="flights", topic_id=UUID(int=7), partition_count=2, replication_factor=1)
SEGMENT = object_keys.segment_key(TOPIC.topic_id, 1, 300, 2, 9)
MANIFEST = object_keys.version_key(TOPIC.topic_id, 1, 4)
KEYS = (MANIFEST, SEGMENT)
SCRUB = "stratalog tier scrub --topic flights --partition 1 --repair"


def status(index: int, *keys: str, topic_id: UUID = TOPIC.topic_id) -> TierStatus:
    return TierStatus(topic_id=topic_id, index=index, worker_id="w", unrepaired=keys)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (SEGMENT, "segment"),
        (object_keys.data_key_key(SEGMENT), "data key"),
        (MANIFEST, "manifest"),
        (object_keys.manifest_key(TOPIC.topic_id, 1, 4, 9), "manifest"),
        (object_keys.marker_key(object_keys.manifest_key(TOPIC.topic_id, 1, 4, 9)), "commit marker"),
        (object_keys.page_key(TOPIC.topic_id, 1, 300, 0, 9), "index page"),
        (object_keys.removed_list_key(TOPIC.topic_id, 1, 1, 9), "list of removed objects"),
        (object_keys.tree_page_key(TOPIC.topic_id, 1, 0, 0, 9), "Merkle tree page"),
        ("of a later release", "object"),
    ],
)
def test_the_kind_of_a_damaged_object_is_told_by_its_key(key: str, kind: str) -> None:
    view = HandFedView()
    view.put(TOPIC, status(1, key))
    (damage,) = unrepaired_damage(view, [TOPIC])
    assert damage.sentence == f"flights-1: damage that is not repaired: 1 {kind}, such as {key}"


def test_the_doctor_fails_for_each_partition_with_damage() -> None:
    view = HandFedView()
    view.put(TOPIC, status(0), status(1, *KEYS, SEGMENT + "2"))
    (finding,) = check_history(view)
    assert (finding.check, finding.verdict) == ("history", Verdict.FAIL)
    assert finding.detail == f"flights-1: damage that is not repaired: 1 manifest, 1 object, 1 segment, such as {MANIFEST}"
    assert finding.remedy.startswith(f"`{SCRUB}`")


def test_the_doctor_names_some_of_many_damaged_partitions_and_counts_the_others() -> None:
    view, many = HandFedView(), Topic(name="many", topic_id=UUID(int=8), partition_count=30, replication_factor=1)
    view.put(many, *(status(index, "key", topic_id=many.topic_id) for index in range(30)))
    *named, others = check_history(view)
    assert [finding.detail.partition(":")[0] for finding in named] == [f"many-{index}" for index in range(10)]
    assert (others.verdict, others.detail) == (Verdict.FAIL, "20 more partitions have damage that is not repaired")
    assert "`stratalog tier status`" in others.remedy


def test_the_doctor_passes_without_damage_and_ignores_a_deleted_topic() -> None:
    view = HandFedView()
    view.put(TOPIC, status(0), status(1, SEGMENT, topic_id=UUID(int=99)))
    (finding,) = check_history(view)
    assert (finding.check, finding.verdict) == ("history", Verdict.OK)


async def test_the_commands_show_it(quorum: EmbeddedQuorum, tmp_path: Path) -> None:
    await quorum.client.propose(Command(updates=(Put(record=TOPIC), Put(record=status(0)), Put(record=status(1, *KEYS)))))
    (tmp_path / "store").mkdir()
    where = ["--metadata", ",".join(quorum.addresses), "--store", str(tmp_path / "store")]
    shown = await asyncio.to_thread(CliRunner().invoke, stratalog, ["tier", "status", *where], catch_exceptions=False)
    assert shown.exit_code == ExitCode.OK
    assert "unrepaired" in shown.stdout.splitlines()[0]
    assert f"flights-1: damage that is not repaired: 1 manifest, 1 segment, such as {MANIFEST}" in shown.stderr
    assert SCRUB in shown.stderr
    done = await asyncio.to_thread(CliRunner().invoke, stratalog, ["tier", "status", "--json", *where], catch_exceptions=False)
    assert [row["unrepaired"] for row in json.loads(done.stdout)["partitions"]] == [[], list(KEYS)]
    found = await asyncio.to_thread(CliRunner().invoke, stratalog, ["doctor", "--json", *where], catch_exceptions=False)
    assert found.exit_code == ExitCode.FAILED
    assert [each["verdict"] for each in json.loads(found.stdout)["findings"] if each["check"] == "history"] == ["fail"]


async def test_status_has_no_column_for_damage_without_any(quorum: EmbeddedQuorum) -> None:
    await quorum.client.propose(Command(updates=(Put(record=TOPIC), Put(record=status(0)))))
    where = ["--metadata", ",".join(quorum.addresses)]
    shown = await asyncio.to_thread(CliRunner().invoke, stratalog, ["tier", "status", *where], catch_exceptions=False)
    assert "unrepaired" not in shown.output


async def test_status_beside_a_topic_that_is_created_shows_the_lag_of_the_others(
    quorum: EmbeddedQuorum, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second copy is read after metadata: a topic created in between has no row yet."""
    await quorum.client.propose(Command(updates=(Put(record=TOPIC),)))
    (tmp_path / "copy").mkdir()
    loop = asyncio.get_running_loop()
    new = Topic(name="a-new-one", topic_id=UUID(int=9), partition_count=1, replication_factor=1)

    async def create_first(*given: Any) -> list[dict[str, object]]:
        creating = quorum.client.propose(Command(updates=(Put(record=new),)))
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(creating, loop))
        return await copied_partitions(*given)

    monkeypatch.setattr(tier, "copied_partitions", create_first)
    words = ["tier", "status", "--json", "--metadata", ",".join(quorum.addresses), "--copy", str(tmp_path / "copy")]
    done = await asyncio.to_thread(CliRunner().invoke, stratalog, words, catch_exceptions=False)
    rows = json.loads(done.stdout)["partitions"]
    assert [(row["topic"], row["copy_lag_versions"]) for row in rows] == [("flights", 0), ("flights", 0)]
