"""A bulk write is killed before and after each of its requests to the store and to metadata: all of it is there, or nothing.

No Spark here: ``test_exactly_once_spark.py`` kills whole writes. Killed writes leave nothing in the bucket.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from integration.committed_reads import committed_values
from integration.process_cluster import ProcessCluster

from stratalog_pipeline.bucket import Bucket

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif("STRATALOG_EXACTLY_ONCE_POINTS" not in os.environ, reason="takes a minute: `make exactly-once`"),
]
FAST = "grace_ms = 0\nretention_interval_ms = 500\nsweep_interval_ms = 1000\ndeletion_lag_ms = 0\n"
ROWS, PARTITIONS = 300, 2
EXPIRY_MS = 30_000
"""A killed write may last as long; after it a worker deletes what it wrote."""
DELETED_S = 180.0
TOPIC_ID = re.compile(r"/([0-9a-f]{32})(?:[/.]|$)")
WRITES = f"""
import itertools, json, os, signal, sys
import pyarrow as pa
from stratalog_core.errors import Conflict
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_pipeline import bulk_sink
from stratalog_pipeline.arrow import encode
from stratalog_tiering.store.filesystem import FilesystemStore

store, metadata = sys.argv[1:]
CALLS = ((FilesystemStore, "put"), (FilesystemStore, "create_upload"), (FilesystemStore, "put_part"),
         (FilesystemStore, "complete_upload"), (QuorumClient, "propose"))
WRITTEN, TAKEN = 0, 99
rows = [pa.RecordBatch.from_pydict({{
    "value": pa.array([f"row-{{row}}" for row in range(of, {ROWS}, {PARTITIONS})]),
    "partition": pa.array([of] * len(range(of, {ROWS}, {PARTITIONS})), pa.int32()),
}}) for of in range({PARTITIONS})]

def counted(kind, name, numbers, point, moment):
    call = getattr(kind, name)
    async def counting(self, *arguments, **named):
        number = next(numbers)
        if (number, moment) == (point, "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        result = await call(self, *arguments, **named)
        if number == point:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(kind, name, counting)

def write(topic):
    options = bulk_sink.parse_bulk_options(
        {{"store": store, "metadata": metadata, "topic": topic, "partitions": "{PARTITIONS}", "replicationFactor": "1"}}
    )
    reserved = bulk_sink.begin(options)
    bulk_sink.commit(options, reserved, [bulk_sink.write_rows([each], options, reserved) for each in rows])

def forked(topic, point=-1, moment=""):
    # This process has no client and no thread, so that it can fork.
    child = os.fork()
    if child == 0:
        numbers = itertools.count()
        for kind, name in CALLS:
            counted(kind, name, numbers, point, moment)
        if point >= 0:
            bulk_sink.RESERVED_MS = {EXPIRY_MS}
        try:
            write(topic)
        except Conflict as taken:
            os._exit(TAKEN if "choose another name" in str(taken) else 1)
        os._exit(next(numbers))
    status = os.waitpid(child, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

calls = forked("unharmed")
assert 2 < calls < TAKEN, calls
found = {{}}
for point, moment in itertools.product(range(calls), ("before", "after")):
    topic = f"killed-{{moment}}-{{point}}"
    assert forked(topic, point, moment) == -signal.SIGKILL, topic
    again = forked(topic)
    assert again in (calls, TAKEN), (topic, again)
    found[topic] = again == TAKEN
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def bulk_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """A cluster whose tiering worker deletes garbage at once."""
    made = ProcessCluster(tmp_path_factory.mktemp("bulk"))
    sizes = [word for role in ("metadata", "bookies", "brokers") for word in (f"--{role}", "1")]
    made.run("cluster", "start", *sizes, "--tiering", "1")
    try:
        configuration = made.data / "config" / "tiering-1.toml"
        configuration.write_text(configuration.read_text().replace("[tiering]\n", f"[tiering]\n{FAST}"))
        made.restart("tiering-1")
        yield made
    finally:
        made.run("cluster", "stop")


@pytest.mark.timeout(600)
def test_a_bulk_write_that_is_killed_at_any_step_is_there_whole_or_not_at_all(bulk_cluster: ProcessCluster) -> None:
    command = [sys.executable, "-W", "ignore", "-c", WRITES, bulk_cluster.store, bulk_cluster.metadata]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    was_there: dict[str, bool] = json.loads(done.stdout)
    # The last request is the command that makes the topic: only after it the topic is there.
    last = list(was_there)[-1]
    assert [topic for topic, found in was_there.items() if found] == [last]
    for topic in ("unharmed", *was_there):
        for partition in range(PARTITIONS):
            rows = [f"row-{row}" for row in range(partition, ROWS, PARTITIONS)]
            assert committed_values(bulk_cluster.bootstrap, topic, partition) == rows, f"{topic}-{partition}"
    deadline = time.monotonic() + DELETED_S
    while (live := live_topics(bulk_cluster.store)) != stored_topics(bulk_cluster.store):
        assert time.monotonic() < deadline, f"{len(stored_topics(bulk_cluster.store) - live)} topics of killed writes are left"
        time.sleep(1)
    assert len(live) >= len(was_there) + 1


def live_topics(store: str) -> set[str]:
    with Bucket(store) as bucket:
        return {topic.topic_id.hex for topic in bucket.topics()}


def stored_topics(store: str) -> set[str]:
    """The ids of the topics that have any object in the bucket."""
    with Bucket(store) as bucket:

        async def keys() -> list[str]:
            return [info.key async for info in bucket.store.list("")]

        listed = bucket.run(keys())
    return {found.group(1) for key in listed if (found := TOPIC_ID.search(key))}
