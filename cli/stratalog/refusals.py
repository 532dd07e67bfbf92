"""Explains why brokers refused to delete a topic or its records: the client library returns only the error code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from confluent_kafka.admin import ConfigEntry

from stratalog.target import found_data, metadata_of
from stratalog.tier.session import metadata_session
from stratalog_broker.admin.errors import ObjectsLocked, Protected
from stratalog_broker.admin.locked_history import require_unlocked
from stratalog_core.errors import Invalid, NotFound
from stratalog_core.system import SystemClock
from stratalog_metadata.client.protection import PROTECTION
from stratalog_metadata.records import Topic, topic_key
from stratalog_metadata.topic_rules.tier_topic_configs import LOCK_MODE

ConfigsOf = Callable[[str], Mapping[str, ConfigEntry]]
"""The configs in force of a topic."""


@contextmanager
def explained(configs_of: ConfigsOf, names: Sequence[str], data: Path | None, metadata: str | None = None) -> Iterator[None]:
    """Name the topic that is protected or whose history is locked, and until when, if a deletion is refused."""
    try:
        yield
    except Invalid as refused:
        if metadata or found_data(data) is not None:
            asyncio.run(_explain_lock(metadata_of(data, metadata), names, refused))
        for name in names:
            with suppress(NotFound):
                _explain(name, configs_of(name), refused)
        raise


def _explain(name: str, configs: Mapping[str, ConfigEntry], refused: Invalid) -> None:
    if configs[PROTECTION].value == "true":
        raise Protected(name) from refused
    if configs[LOCK_MODE].value != "none":
        text = f"history of topic {name!r} may be locked: `stratalog tier status {name}` shows until when"
        raise Invalid(f"{refused.message}; {text}") from refused


async def _explain_lock(addresses: Sequence[str], names: Sequence[str], refused: Invalid) -> None:
    async with metadata_session(addresses) as client:
        for name in names:
            topic = client.view.find(Topic, topic_key(name))
            if topic is None:
                continue
            try:
                require_unlocked(topic, client.view, SystemClock().wall_ms())
            except ObjectsLocked as locked:
                raise locked from refused
