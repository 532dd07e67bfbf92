"""Which configs of a topic are in force: its own, over the defaults that somebody set for the whole cluster.

Both are stored under the topic's names and only where they were set; what neither names has the component's built-in default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stratalog_metadata.api import MetadataView
from stratalog_metadata.records import DynamicConfig, Topic

TOPIC_DEFAULTS_KEY: Final = DynamicConfig(resource="").key()
_NONE: Final[Mapping[str, str]] = {}


def topic_defaults(view: MetadataView) -> Mapping[str, str]:
    """Cluster-wide defaults of topic configs."""
    stored = view.find(DynamicConfig, TOPIC_DEFAULTS_KEY)
    return _NONE if stored is None else stored.configs


def configs_in_force(topic: Topic, defaults: Mapping[str, str]) -> Mapping[str, str]:
    """Configs that are set, by the topic or by a default.

    Internal topics follow no default, because their coordinators rely on their durability.
    """
    return {**defaults, **topic.configs} if defaults and not topic.internal else topic.configs
