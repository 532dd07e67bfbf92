"""Disaster drill: everything but the bucket is lost; ``stratalog restore`` brings the topics back, and clients go on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from conftest import AZURITE, FAKE_GCS

from stratalog.exit_codes import ExitCode
from stratalog.local.state import load_state

pytestmark = pytest.mark.integration
EMULATORS = {"azurite": AZURITE, "gcs": FAKE_GCS}
PARTITIONS = 2


@contextmanager
def up(data: Path, store: Path | str, *more: str) -> Iterator[str]:
    """``stratalog up`` on ``data``, with ``more`` options; its Kafka address."""
    options = ["--data", str(data), "--store", str(store), "--kafka", "127.0.0.1:0", *more]
    command = [sys.executable, "-m", "stratalog", "up", *options]
    with (
        (data.parent / f"{data.name}.log").open("a") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as node,
    ):
        try:
            assert node.stdout is not None
            assert "serves Kafka clients at" in node.stdout.readline(), (data.parent / f"{data.name}.log").read_text()
            yield load_state(data).bootstrap
        finally:
            node.kill()


def stratalog(*words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "stratalog", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == expect, done.stderr
    return done


def produce(bootstrap: str, first: int, count: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "batch.num.messages": 10})
    failed: list[Any] = []
    for number in range(first, first + count):
        producer.produce(
            "orders", str(number).encode(), partition=number % PARTITIONS,
            on_delivery=lambda error, message: failed.append(error) if error else None,
        )  # fmt: skip
    assert producer.flush(60) == 0
    assert failed == []


def consume(bootstrap: str, count: int) -> list[tuple[int, int, int]]:
    """The first ``count`` records: partition, offset, number."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "drill", "enable.auto.commit": False})
    consumer.assign([TopicPartition("orders", partition, 0) for partition in range(PARTITIONS)])
    rows: list[tuple[int, int, int]] = []
    try:
        while len(rows) < count:
            for message in consumer.consume(count - len(rows), timeout=30):
                assert message.error() is None
                partition, offset, value = message.partition(), message.offset(), message.value()
                assert partition is not None
                assert offset is not None
                rows.append((partition, offset, int(value or b"-1")))
    finally:
        consumer.close()
    return sorted(rows)


def test_the_bucket_alone_brings_a_cluster_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does its second copy, with the positions of groups."""
    monkeypatch.setenv("STRATALOG_BROKER_STATE_UPLOAD_INTERVAL_MS", "200")
    data, new, third = tmp_path / "data", tmp_path / "new", tmp_path / "third"
    store, second = tmp_path / "bucket", tmp_path / "second"
    with up(data, store, "--second-store", str(second)) as bootstrap:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        (made,) = admin.create_topics([NewTopic("orders", PARTITIONS, 1, config={"segment.ms": "3600000"})]).values()
        made.result(60)
        produce(bootstrap, 0, 1000)
        stratalog("tier", "offload", "orders", "--wait", "--data", str(data))
        offloaded = consume(bootstrap, 1000)
        assert len(consume_as_member(bootstrap, 1000)) == 1000
        until_stored(str(second), PARTITIONS, records=1000)
        delete_offloaded(bootstrap, "undone", data, store)
        undone = json.loads(stratalog("topic", "undelete", "undone", "--data", str(data), "--json").stdout)
        assert (undone["in_bucket"], list(store.glob("topics/*.deleted"))) == ("restored", [])
        delete_offloaded(bootstrap, "gone", data, store)
        produce(bootstrap, 1000, 10)
    shutil.move(data, tmp_path / "lost")

    found = json.loads(stratalog("restore", "--store", str(store), "--dry-run", "--json").stdout)
    ends = [(row["topic"], row["end_offset"], row["records"]) for row in found["partitions"]]
    assert [row["topic"] for row in found["deleted_topics"]] == ["gone"]
    assert ends == [("orders", 500, 500)] * PARTITIONS + [("undone", 1, 1)]
    into_new = ("restore", "--store", str(store), "--data", str(new), "--json")
    assert "Take file://" in stratalog(*into_new, expect=ExitCode.USAGE).stderr
    restored = json.loads(stratalog(*into_new, "--yes").stdout)
    assert [row["state"] for row in restored["partitions"]] == ["restored"] * (PARTITIONS + 1)
    assert restored["deleted_topics"] == found["deleted_topics"]

    with up(new, store) as bootstrap:
        assert consume(bootstrap, 1000) == offloaded
        configs = json.loads(stratalog("topic", "config", "orders", "--data", str(new), "--json").stdout)["configs"]
        assert {row["name"]: row["value"] for row in configs}["segment.ms"] == "3600000"
        produce(bootstrap, 2000, 10)
        stratalog("tier", "offload", "orders", "--wait", "--delete-hot", "--data", str(new))
        again = consume(bootstrap, 1010)
        assert [row for row in again if row[2] < 2000] == offloaded
        assert {offset for _, offset, number in again if number >= 2000} == set(range(500, 505))
        stratalog("tier", "verify", "orders", "--data", str(new))
        deadline = time.monotonic() + 120
        while not (reasons := why_it_waits("gone", new)):
            assert time.monotonic() < deadline
        assert reasons <= {"earlier-deletion", "deleted-topic"}, "it is a deletion of the cluster once a worker has recorded it"

    lost = tmp_path / "lost"
    command = [sys.executable, "-m", "stratalog", "up", "--data", str(lost), "--store", str(store), "--kafka", "127.0.0.1:0"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode != 0
    assert "belongs to cluster" in refused.stderr

    for each in (new, store):
        shutil.move(each, tmp_path / f"lost-{each.name}")
    shown = json.loads(stratalog("restore", "--store", str(second), "--data", str(third), "--yes", "--json").stdout)
    states = [row["state"] for row in shown["partitions"] if row["topic"] == "orders"]
    assert states == ["restored"] * PARTITIONS
    assert (shown["groups"]["positions"], shown["groups"]["moved"]) == (PARTITIONS, [])
    with up(third, second) as bootstrap:
        assert consume(bootstrap, 1000) == offloaded
        produce(bootstrap, 3000, 10)
        assert sorted(consume_as_member(bootstrap, 10)) == list(range(3000, 3010))


def delete_offloaded(bootstrap: str, topic: str, data: Path, store: Path) -> None:
    """Make a topic with one record in the object store, delete it, and return when the bucket says so."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(60)
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    producer.produce(topic, b"0")
    assert producer.flush(60) == 0
    stratalog("tier", "offload", topic, "--wait", "--data", str(data))
    admin.delete_topics([topic])[topic].result(60)
    deadline = time.monotonic() + 120
    while not list(store.glob("topics/*.deleted")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def why_it_waits(topic: str, data: Path) -> set[str]:
    """The reasons for which objects of the topic will be deleted later. Partitions that change just now are not judged."""
    command = [sys.executable, "-m", "stratalog", "tier", "gc", "--dry-run", "--data", str(data), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return {row["reason"] for row in json.loads(done.stdout)["waiting"] if row["topic"] == topic}


def consume_as_member(bootstrap: str, count: int, group: str = "billing") -> list[int]:
    """The next ``count`` numbers of a group with one member, which commits them and leaves."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False}
    )
    consumer.subscribe(["orders"])
    numbers: list[int] = []
    try:
        while len(numbers) < count:
            for message in consumer.consume(count - len(numbers), timeout=30):
                assert message.error() is None
                numbers.append(int(message.value() or b"-1"))
        consumer.commit(asynchronous=False)
    finally:
        consumer.close()
    return numbers


def until_stored(store: str, positions: int, records: int = 0) -> None:
    """Wait until the bucket has so many positions of groups, and at least so many records."""
    deadline = time.monotonic() + 120
    command = [sys.executable, "-m", "stratalog", "restore", "--store", store, "--dry-run", "--json"]
    while True:
        # A second copy may not have the topic yet: then the command fails.
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode == 0:
            report = json.loads(done.stdout)
            found = sum(row["records"] for row in report["partitions"])
            if report["groups"]["positions"] == positions and found >= records:
                return
        assert time.monotonic() < deadline, done.stderr


@pytest.mark.s3
@pytest.mark.parametrize("server", ["minio", *(name for name, variable in EMULATORS.items() if variable in os.environ)])
def test_groups_go_on_after_the_loss_of_all_but_the_bucket(
    tmp_path: Path, server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group goes on where it was, one that had read what was only hot goes on at the end, a producer keeps its id."""
    monkeypatch.setenv("STRATALOG_BROKER_STATE_UPLOAD_INTERVAL_MS", "200")
    data, new = tmp_path / "data", tmp_path / "new"
    store = request.getfixturevalue(f"{server}_server").make_bucket(f"drill-{uuid4().hex[:12]}")
    with up(data, store) as bootstrap:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        (made,) = admin.create_topics([NewTopic("orders", PARTITIONS, 1)]).values()
        made.result(60)
        produce(bootstrap, 0, 100)
        transactional = Producer({"bootstrap.servers": bootstrap, "transactional.id": "billing-1"})
        transactional.init_transactions(120)
        transactional.begin_transaction()
        transactional.produce("orders", b"100", partition=0)
        transactional.commit_transaction(120)
        assert len(consume(bootstrap, 101)) == 101, "its marker is written, which may come after the answer"
        stratalog("tier", "offload", "orders", "--wait", "--data", str(data))
        first = consume_as_member(bootstrap, 60)
        produce(bootstrap, 200, 10)
        assert len(consume_as_member(bootstrap, 111, "ahead")) == 111
        until_stored(store, 2 * PARTITIONS)
    shutil.move(data, tmp_path / "lost")

    shown = json.loads(stratalog("restore", "--store", store, "--data", str(new), "--yes", "--json").stdout)
    ends = {row["partition"]: row["end_offset"] for row in shown["partitions"]}
    assert shown["groups"]["groups"] == 2
    assert [
        (each["group_id"], each["topic"], each["partition"], each["committed"], each["restored"])
        for each in sorted(shown["groups"]["moved"], key=lambda each: int(each["partition"]))
    ] == [("ahead", "orders", index, ends[index] + 5, ends[index]) for index in range(PARTITIONS)]
    assert {row["topic"]: row["state"] for row in shown["internal_topics"]} == {
        "__consumer_offsets": "restored", "__transaction_state": "restored"
    }  # fmt: skip

    with up(new, store) as bootstrap:
        rest = consume_as_member(bootstrap, 41)
        assert sorted(first + rest) == list(range(101))
        produce(bootstrap, 300, 10)
        assert sorted(consume_as_member(bootstrap, 10, "ahead")) == list(range(300, 310))
        transactional = Producer({"bootstrap.servers": bootstrap, "transactional.id": "billing-1"})
        transactional.init_transactions(120)
        transactional.begin_transaction()
        transactional.produce("orders", b"310", partition=0)
        transactional.commit_transaction(120)
        assert sorted(consume_as_member(bootstrap, 11)) == list(range(300, 311))


def test_a_topic_returns_up_to_a_point_and_clients_go_on(tmp_path: Path) -> None:
    data, new, store = tmp_path / "data", tmp_path / "new", tmp_path / "bucket"
    with up(data, store) as bootstrap:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        (made,) = admin.create_topics([NewTopic("orders", PARTITIONS, 1)]).values()
        made.result(60)
        produce(bootstrap, 0, 1000)
        stratalog("tier", "offload", "orders", "--wait", "--delete-hot", "--data", str(data))
        offloaded = consume(bootstrap, 1000)
    point = ("--topic", "orders", "--to-offset", "0=303")
    planned = json.loads(stratalog("restore", "--store", str(store), "--dry-run", *point, "--json").stdout)["partitions"]
    assert [row["left_out_end_offset"] for row in planned] == [500, None]
    command = ("restore", "--store", str(store), "--data", str(new), *point, "--yes", "--json")
    first, second = json.loads(stratalog(*command).stdout)["partitions"]
    end = first["end_offset"]
    assert 303 - 10 < end <= 303
    assert [row["end_offset"] for row in planned] == [end, 500], "a dry run says where the cut will be"
    assert (first["records"], first["left_out_records"], first["left_out_end_offset"]) == (end, 500 - end, 500)
    assert (second["records"], second["left_out_records"], second["left_out_end_offset"]) == (500, 0, None)
    kept = [row for row in offloaded if row[0] == 1 or row[1] < end]
    with up(new, store) as bootstrap:
        assert consume(bootstrap, len(kept)) == kept
        produce(bootstrap, 2000, 10)
        stratalog("tier", "offload", "orders", "--wait", "--delete-hot", "--data", str(new))
        again = consume(bootstrap, len(kept) + 10)
        assert [row for row in again if row[2] < 2000] == kept
        assert {offset for partition, offset, number in again if partition == 0 and number >= 2000} == set(range(end, end + 5))
        stratalog("tier", "verify", "orders", "--data", str(new))
        stratalog("tier", "scrub", "--store", str(store))
