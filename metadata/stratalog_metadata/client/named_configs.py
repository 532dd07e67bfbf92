"""Configs of named resources, such as consumer groups, as a view of the metadata has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import DynamicConfig, dynamic_config_key

_NONE: Final[Mapping[str, str]] = MappingProxyType({})


def configs_of(view: MetadataView, prefix: str, name: str) -> Mapping[str, str]:
    """Return the configs that are set for the resource; empty if there are none. ``prefix`` is the kind's."""
    stored = view.find(DynamicConfig, dynamic_config_key(prefix + name))
    return _NONE if stored is None else stored.configs


def named_configs(view: MetadataView, prefix: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield name and configs of each resource of the kind, ordered by name."""
    for each in view.all(DynamicConfig):
        if each.resource.startswith(prefix):
            yield each.resource.removeprefix(prefix), each.configs
