"""Requests the offload or the compaction of a topic, and waits until it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from stratalog.tier.report import open_requests
from stratalog_broker.admin.view_waiting import wait_until
from stratalog_core.errors import Invalid, NotFound, Unavailable
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.guarded_updates import decide_again
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.records import TierRequest, TierStatus, Topic, Versioned, configs_in_force, is_hot_only, tier_status_key
from stratalog_metadata.state.commands import ABSENT, Command, Put, VersionIs
from stratalog_tiering.core.policy import tier_policy

OnProgress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How long to wait for a topic. ``on_progress`` is called with the number of its partitions that are done."""

    timeout_s: float
    on_progress: OnProgress


async def request_offload(metadata: MetadataClient, topic: Topic, *, delete_hot: bool) -> None:
    """Request the offload of all partitions in one command. Owners seal their ledgers, tiering workers do the rest.

    Raises ``Invalid`` for a topic that is not offloaded, ``NotFound`` if the topic is gone.
    """

    def requested(current: Topic) -> list[TierRequest]:
        if refusal := offload_refusal(metadata.view, current):
            raise Invalid(refusal)
        indexes = range(current.partition_count)
        return [TierRequest(topic_id=topic.topic_id, index=index, delete_hot=delete_hot) for index in indexes]

    await _request(metadata, topic, requested)


def offload_refusal(view: MetadataView, topic: Topic) -> str:
    """Return why a topic is not offloaded, and how to change that if it can be changed; empty if it is offloaded."""
    if topic.internal:
        return f"topic {topic.name} is internal: it is never offloaded"
    configs = configs_in_force(topic, topic_defaults(view))
    if tier_policy(configs).is_copied:
        return ""
    remedy = "remote.storage.enable=true" if is_hot_only(configs) else "remote.log.copy.disable=false"
    return f"the policy of topic {topic.name} keeps it out of the object store; set {remedy}"


async def request_compaction(metadata: MetadataClient, topic: Topic, partitions: Iterable[int]) -> None:
    """Request that everything in ``partitions`` moves to the store and is compacted there, however little is dirty.

    Raises ``Invalid`` if the topic is not compacted, ``NotFound`` for a partition that it does not have, or if it is gone.
    """
    wanted = tuple(partitions)

    def requested(current: Topic) -> list[TierRequest]:
        if current.internal:
            raise Invalid(f"topic {topic.name} is internal: it is never offloaded, and its coordinator compacts it")
        if tier_policy(configs_in_force(current, topic_defaults(metadata.view))).compaction is None:
            raise Invalid(f"topic {topic.name} is not compacted; set cleanup.policy=compact or compact,delete")
        unknown = [index for index in wanted if not 0 <= index < current.partition_count]
        if unknown:
            raise NotFound(f"topic {topic.name} has no partition {unknown[0]}; it has {current.partition_count}")
        return [TierRequest(topic_id=topic.topic_id, index=index, delete_hot=True, compact=True) for index in wanted]

    await _request(metadata, topic, requested)


async def _request(metadata: MetadataClient, topic: Topic, requested: Callable[[Topic], Sequence[TierRequest]]) -> None:
    """Put what is ``requested`` of the topic as it is now, with what open requests of the same partitions ask for.

    It is put while the topic exists: nothing would ever delete the requests of a topic that is gone.
    """

    async def attempt() -> None:
        (found,) = await metadata.read([topic.key()])
        if found is None or not isinstance(found.record, Topic) or found.record.topic_id != topic.topic_id:
            raise _gone(topic)
        requests = requested(found.record)
        present = await metadata.read([request.key() for request in requests])
        await metadata.propose(
            Command(
                updates=tuple(Put(record=_joined(*pair)) for pair in zip(requests, present, strict=True)),
                requirements=(
                    VersionIs(key=topic.key(), version=found.version),
                    *(
                        VersionIs(key=request.key(), version=stored.version if stored is not None else ABSENT)
                        for request, stored in zip(requests, present, strict=True)
                    ),
                ),
            )
        )

    await decide_again(f"topic {topic.name!r}", attempt)


def _joined(request: TierRequest, present: Versioned | None) -> TierRequest:
    """``request``, and what the open one asks for: whoever made that takes it for fulfilled when the record has gone."""
    if present is None or not isinstance(present.record, TierRequest):
        return request
    earlier = present.record
    return msgspec.structs.replace(
        request, delete_hot=request.delete_hot or earlier.delete_hot, compact=request.compact or earlier.compact
    )


async def wait_for_offload(metadata: MetadataClient, topic: Topic, waiting: Waiting) -> None:
    """Return when ``topic`` has no open request.

    Raises ``NotFound`` if the topic goes, and its requests with it, ``Unavailable`` with the last errors after the time-out.
    """

    def is_done() -> bool:
        current = metadata.view.find(Topic, topic.key())
        if current is None or current.topic_id != topic.topic_id:
            raise _gone(topic)
        left = len(open_requests(metadata.view, topic))
        waiting.on_progress(topic.partition_count - left)
        return not left

    if not await wait_until(metadata.view, is_done, waiting.timeout_s):
        raise Unavailable(_why_not(metadata, topic, waiting.timeout_s))


def _gone(topic: Topic) -> NotFound:
    return NotFound(f"topic {topic.name!r} is gone: it was deleted or detached meanwhile")


def _why_not(metadata: MetadataClient, topic: Topic, timeout_s: float) -> str:
    left = open_requests(metadata.view, topic)
    unsealed = sum(request.end_offset < 0 for request in left)
    wanted = "compacted" if any(request.compact for request in left) else "cold"
    text = f"{len(left)} of {topic.partition_count} partitions of {topic.name} are not {wanted} after {timeout_s:.0f} s"
    if unsealed:
        text += f"; {unsealed} are not sealed: is every broker running?"
    errors = {status.last_error for request in left if (status := _status(metadata, request)) is not None and status.last_error}
    return text + "".join(f"; last error: {error}" for error in sorted(errors))


def _status(metadata: MetadataClient, request: TierRequest) -> TierStatus | None:
    return metadata.view.find(TierStatus, tier_status_key(request.topic_id, request.index))
