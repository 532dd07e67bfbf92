"""The cluster's topics as consumer groups see them, from this broker's view of the metadata."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from stratalog_broker.configs.linear_pattern import LinearPattern
from stratalog_broker.coordination.groups.core.consumer.model import TopicInfo
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Topic, topic_key
from stratalog_metadata.state.changes import Change

PATTERN_BYTES_MAX: Final = 64 * 1024 * 1024
"""Memory for patterns and the names that match them; another pattern costs a look at every topic's name."""
_NAME_BYTES: Final = 64
"""Of a set, per name; measured."""


class ClusterTopics:
    """Follows the view. The topics that match a pattern are kept up to date, so that they are searched for once: of the
    patterns asked for last, within ``PATTERN_BYTES_MAX``.
    """

    def __init__(self, view: MetadataView) -> None:
        self._view = view
        self._version = 0
        self._matching: OrderedDict[str, tuple[LinearPattern, set[str]]] = OrderedDict()
        self._pattern_bytes = 0
        self._unsubscribe = view.subscribe(self._on_changes)

    def close(self) -> None:
        self._unsubscribe()

    @property
    def pattern_bytes(self) -> int:
        """Memory that the remembered patterns and their names use at most."""
        return self._pattern_bytes

    @property
    def version(self) -> int:
        return self._version

    def find(self, name: str) -> TopicInfo | None:
        topic = self._view.find(Topic, topic_key(name))
        return None if topic is None else TopicInfo(topic.name, topic.topic_id, topic.partition_count)

    def matching(self, pattern: str) -> frozenset[str]:
        known = self._matching.get(pattern)
        if known is None:
            compiled = LinearPattern(pattern)
            names = {topic.name for topic in self._view.all(Topic) if compiled.matches(topic.name)}
            known = self._matching[pattern] = compiled, names
            self._pattern_bytes += _bytes_of(compiled, names)
            self._trim()
        else:
            self._matching.move_to_end(pattern)
        return frozenset(known[1])

    def _on_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            before = change.before.record if change.before is not None else None
            after = change.after.record if change.after is not None else None
            if isinstance(before, Topic):
                self._version += 1
                self._forget(before.name)
            if isinstance(after, Topic):
                self._version += 1
                self._remember(after.name)
        self._trim()

    def _trim(self) -> None:
        while self._pattern_bytes > PATTERN_BYTES_MAX:
            _, (compiled, names) = self._matching.popitem(last=False)
            self._pattern_bytes -= _bytes_of(compiled, names)

    def _forget(self, name: str) -> None:
        for _, names in self._matching.values():
            if name in names:
                names.remove(name)
                self._pattern_bytes -= _NAME_BYTES

    def _remember(self, name: str) -> None:
        for compiled, names in self._matching.values():
            if name not in names and compiled.matches(name):
                names.add(name)
                self._pattern_bytes += _NAME_BYTES


def _bytes_of(compiled: LinearPattern, names: set[str]) -> int:
    return compiled.bytes_max + _NAME_BYTES * len(names)
