"""Behind ``stratalog tier attach`` and ``detach``: creates a topic from existing history, removes one and keeps its history."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stratalog.output import progress_bar
from stratalog.tier.offload import OnProgress, Waiting, request_offload, wait_for_offload
from stratalog.tier.report import topics_named
from stratalog.tier.session import metadata_session, reader_lease, store_session
from stratalog.topic_deletion import BUCKET_TIMEOUT_S, wait_for_owners
from stratalog_broker.admin.deleted_topics import until_in_bucket
from stratalog_broker.admin.errors import Protected
from stratalog_core.errors import Invalid, NotFound
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.client.guarded_updates import decide_again
from stratalog_metadata.client.protection import is_protected
from stratalog_metadata.records import Topic
from stratalog_tiering.attach import detachment
from stratalog_tiering.attach.attachment import AttachPorts, attach, new_topic
from stratalog_tiering.attach.bucket import stored_topic
from stratalog_tiering.attach.kafka_logs import is_kafka_directory, kafka_topic
from stratalog_tiering.attach.source import TopicSource
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.core.restoring import TopicHistory
from stratalog_tiering.offload.ownership import check_claim, cluster_id_in

_THREADS: Final = 4
Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOptions:
    """The topic to make. ``name`` None: the source's; ``replication_factor`` None: the default of `new_topic`."""

    source_topic: str | None = None
    name: str | None = None
    configs: Mapping[str, str] = field(default_factory=dict)
    replication_factor: int | None = None


@asynccontextmanager
async def opened_source(sources: Sequence[str], topic: str | None, *, leased: bool) -> AsyncIterator[TopicSource]:
    """The topic in ``sources``: one bucket, or directories of Kafka's brokers. Raises ``Invalid``, ``NotFound``.

    ``leased``: a reader's lease keeps the bucket's owner from deleting it.
    """
    background = ThreadBackground(_THREADS, "source")
    try:
        directories = [Path(source) for source in sources if "://" not in source]
        if directories and all(path.is_dir() and is_kafka_directory(path) for path in directories):
            yield await background.run(lambda: kafka_topic(directories, topic, background))
            return
        if len(sources) != 1:
            raise Invalid("several sources must all be log directories of Kafka, with subdirectories TOPIC-PARTITION")
        if directories and not directories[0].is_dir():
            raise Invalid(f"{directories[0]} is not a directory: name a bucket, or log directories of Kafka")
        async with store_session(sources[0]) as store, reader_lease(store, "attach") if leased else nullcontext():
            yield await stored_topic(store, topic, background)
    finally:
        background.close()


async def attach_source(addresses: Sequence[str], store_url: str, sources: Sequence[str], options: AttachOptions) -> list[Row]:
    """Attach the topic; returns a row for each partition. Raises as ``attach`` and ``until_in_bucket`` do."""
    background = ThreadBackground(_THREADS, "attach")
    try:
        async with (
            metadata_session(addresses) as client,
            store_session(store_url) as store,
            opened_source(sources, options.source_topic, leased=True) as source,
        ):
            topic = new_topic(
                client.view,
                options.name or source.name,
                source.partition_count,
                {**source.configs, **options.configs},
                options.replication_factor,
            )
            ports = AttachPorts(
                metadata=client, store=store, clock=SystemClock(), random=random.SystemRandom(), background=background,
                settings=TieringSettings(worker_id="attach"),
            )  # fmt: skip
            with progress_bar() as progress:
                task = progress.add_task(f"attaching {topic.name}", total=source.stored_bytes)
                history = await attach(ports, topic, source, lambda count: progress.advance(task, count))
            await wait_for_owners(client, topic, "attached")
            await until_in_bucket(client, topic, BUCKET_TIMEOUT_S, "attached")
            return _rows(topic, history)
    finally:
        background.close()


async def detach(addresses: Sequence[str], store_url: str, name: str, timeout_s: float) -> None:
    """Move a topic to the bucket as a whole and remove it from the cluster.

    Raises ``NotFound``, ``Invalid`` for a protected topic, ``Unavailable`` if it cannot be offloaded in time, and ``Conflict``
    if it is being written. The topic stays until the last step; its hot copies may have gone by then.
    """
    async with metadata_session(addresses) as client, store_session(store_url) as store:
        await check_claim(store, cluster_id_in(client))
        meant: Topic | None = None

        async def attempt() -> None:
            nonlocal meant
            (topic,) = topics_named(client.view, [name])
            if meant is not None and topic.topic_id != meant.topic_id:
                raise NotFound(f"topic {name!r} was detached or deleted meanwhile, and created again: the new one stays")
            meant = topic
            if topic.internal or is_protected(topic, client.view):
                raise Protected(name)
            await request_offload(client, topic, delete_hot=True)
            with progress_bar() as progress:
                task = progress.add_task(f"offloading {name}", total=topic.partition_count)
                on_progress: OnProgress = lambda done: progress.update(task, completed=done)  # noqa: E731
                await wait_for_offload(client, topic, Waiting(timeout_s=timeout_s, on_progress=on_progress))
            await detachment.detach(client, store, SystemClock(), topic, timeout_s)

        await decide_again(f"topic {name!r}, which clients still write to,", attempt)


async def source_rows(sources: Sequence[str], options: AttachOptions) -> list[Row]:
    """A row for each partition that would be attached; only its first records are read."""
    async with opened_source(sources, options.source_topic, leased=False) as source:
        return [
            {
                "topic": options.name or source.name,
                "partition": index,
                "start_offset": found.log_start_offset if found is not None else 0,
                "bytes": found.stored_bytes if found is not None else 0,
            }
            for index, found in ((index, source.partitions.get(index)) for index in range(source.partition_count))
        ]


def _rows(topic: Topic, history: TopicHistory) -> list[Row]:
    return [
        {
            "topic": topic.name,
            "partition": found.index,
            "start_offset": found.log_start_offset,
            "end_offset": found.pointer.end_offset if found.pointer is not None else found.log_start_offset,
            "records": found.record_count,
            "bytes": found.pointer.cold_bytes if found.pointer is not None else 0,
        }
        for found in history.partitions
    ]
