"""The cluster-wide defaults of topic configs, as a view of the metadata has them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import TOPIC_DEFAULTS_KEY, DynamicConfig


def topic_defaults(view: MetadataView) -> Mapping[str, str]:
    """The configs that are set for all topics; empty if there are none."""
    stored = view.find(DynamicConfig, TOPIC_DEFAULTS_KEY)
    return MappingProxyType({}) if stored is None else stored.configs
