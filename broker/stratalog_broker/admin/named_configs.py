"""Configs of named resources that have configs without having been created: consumer groups, client metrics subscriptions.

Each has one metadata record with the configs that were set, removed with the last of them. Their number is bounded, because
every node keeps all records in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from stratalog_broker.admin.config_rows import ConfigRow, ConfigSynonym
from stratalog_broker.admin.errors import InvalidConfig, LimitExceeded
from stratalog_broker.admin.topics import EditConfigs
from stratalog_broker.configs.client_metrics_configs import CLIENT_METRICS_KEYS, check_client_metrics_configs, check_match
from stratalog_broker.configs.group_configs import GROUP_CONFIG_KEYS, check_group_configs
from stratalog_core.errors import Invalid
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.guarded_updates import decide_again, propose_guarded
from stratalog_metadata.client.named_configs import configs_of, named_configs
from stratalog_metadata.records import CLIENT_METRICS_CONFIGS, GROUP_CONFIGS, DynamicConfig, dynamic_config_key
from stratalog_metadata.state.commands import ABSENT, Command, Delete, Put, VersionIs
from stratalog_metadata.topic_rules.config_keys import ConfigKey, ConfigSource

NAME_CHARACTERS_MAX: Final = 255
VALUE_CHARACTERS_MAX: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedConfigs:
    """One kind of resource. ``prefix`` precedes the name in the metadata; each of ``checks`` is refused by its own error."""

    what: str
    prefix: str
    keys: Mapping[str, ConfigKey]
    source: ConfigSource
    checks: tuple[tuple[Callable[[Mapping[str, str]], None], type[Invalid]], ...]
    resources_max: int

    def describe(self, view: MetadataView, name: str, defaults: Mapping[str, str]) -> list[ConfigRow]:
        """Return all configs of a resource, sorted by name. ``defaults`` replace the defaults of keys."""
        self._check_name(name)
        given = configs_of(view, self.prefix, name)
        return [self._row(key, given.get(key.name), defaults.get(key.name, key.default)) for key in self.keys.values()]

    def _row(self, key: ConfigKey, given: str | None, default_value: str) -> ConfigRow:
        own = () if given is None else (ConfigSynonym(name=key.name, value=given, source=self.source),)
        default = ConfigSynonym(name=key.default_name, value=default_value, source=ConfigSource.DEFAULT)
        return ConfigRow(name=key.name, synonyms=(*own, default), kind=key.kind, documentation=key.documentation)

    def names(self, view: MetadataView) -> Iterator[str]:
        """Yield the names of all resources that have configs."""
        return (name for name, _ in named_configs(view, self.prefix))

    async def configure(
        self, metadata: MetadataClient, name: str, edit: EditConfigs, timeout_s: float, *, validate_only: bool
    ) -> None:
        """Replace the configs of a resource by the result of ``edit``; none are left: remove the resource."""
        self._check_name(name)
        key = dynamic_config_key(self.prefix + name)

        async def attempt() -> None:
            await metadata.refresh(timeout_s)
            stored = metadata.view.get(key)
            before = dict(configs_of(metadata.view, self.prefix, name))
            after = dict(edit(dict(before)))
            self._check(after)
            if stored is None and after:
                self._check_number(metadata.view)
            if validate_only or after == before:
                return
            update = Put(record=DynamicConfig(resource=self.prefix + name, configs=after)) if after else Delete(key=key)
            requirement = VersionIs(key=key, version=ABSENT if stored is None else stored.version)
            await propose_guarded(metadata, Command(updates=(update,), requirements=(requirement,)), key, timeout_s)

        await decide_again(f"the configs of {self.what} {name!r}", attempt)

    def _check_name(self, name: str) -> None:
        if not 0 < len(name) <= NAME_CHARACTERS_MAX:
            raise Invalid(f"the name of a {self.what} has {len(name)} characters; choose 1 to {NAME_CHARACTERS_MAX}")

    def _check(self, configs: Mapping[str, str]) -> None:
        for name, value in configs.items():
            if len(value) > VALUE_CHARACTERS_MAX:
                raise InvalidConfig(f"{name[:60]} has {len(value)} characters; maximum is {VALUE_CHARACTERS_MAX}")
        for check, refusal in self.checks:
            try:
                check(configs)
            except Invalid as refused:
                raise refusal(refused.message) from refused

    def _check_number(self, view: MetadataView) -> None:
        if sum(1 for _ in self.names(view)) >= self.resources_max:
            raise LimitExceeded(f"{self.resources_max} {self.what}s have configs, which is the maximum: delete some")


OF_GROUPS: Final = NamedConfigs(
    what="group", prefix=GROUP_CONFIGS, keys=GROUP_CONFIG_KEYS, source=ConfigSource.GROUP,
    checks=((check_group_configs, InvalidConfig),), resources_max=10_000,
)  # fmt: skip
OF_CLIENT_METRICS: Final = NamedConfigs(
    what="client metrics subscription", prefix=CLIENT_METRICS_CONFIGS, keys=CLIENT_METRICS_KEYS,
    source=ConfigSource.CLIENT_METRICS,
    checks=((check_client_metrics_configs, Invalid), (check_match, InvalidConfig)), resources_max=100,
)  # fmt: skip
