"""Describes and changes configs: of topics, of groups, of client metrics, of this broker, and the cluster-wide defaults."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from stratalog_broker.admin.config_rows import ConfigRow, broker_config_rows, default_config_rows, topic_config_rows
from stratalog_broker.admin.errors import InvalidConfig
from stratalog_broker.admin.named_configs import OF_CLIENT_METRICS, OF_GROUPS, NamedConfigs
from stratalog_broker.admin.topic_defaults import configure_defaults
from stratalog_broker.admin.topic_names import check_topic_name
from stratalog_broker.admin.topics import EditConfigs, TopicCommands
from stratalog_broker.configs.group_configs import group_config_defaults
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_core.errors import Invalid, NotFound
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.records import Broker, Topic, topic_key
from stratalog_metadata.topic_rules.config_keys import ConfigKey, ConfigKind, elements, find_key
from stratalog_metadata.topic_rules.topic_configs import topic_config_key, topic_config_name

TIMEOUT_S: Final = 10.0


class ResourceKind(IntEnum):
    """Numbers are those of Kafka's ``ConfigResource.Type``."""

    TOPIC = 2
    BROKER = 4
    CLIENT_METRICS = 16
    GROUP = 32


_NAMED: Final[Mapping[int, NamedConfigs]] = {ResourceKind.CLIENT_METRICS: OF_CLIENT_METRICS, ResourceKind.GROUP: OF_GROUPS}


class ConfigOperation(IntEnum):
    """Numbers are IncrementalAlterConfigs' (KIP-339)."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class ConfigResource(NamedTuple):
    """A resource that has configs. A BROKER with an empty name means the cluster-wide defaults of topic configs."""

    kind: int
    name: str

    def stored_name(self, name: str) -> str:
        """Return the name under which a config is stored: defaults may be given under Kafka's broker names."""
        return topic_config_name(name) if self.kind == ResourceKind.BROKER else name

    def list_key(self, name: str) -> ConfigKey:
        """Return the key of a LIST. Raises ``InvalidConfig`` if there is none of this name, or if it is no list."""
        named = _NAMED.get(self.kind)
        try:
            key = topic_config_key(name) if named is None else find_key(named.keys, name, named.what)
        except Invalid as unknown:
            raise InvalidConfig(unknown.message) from unknown
        if key.kind is not ConfigKind.LIST:
            raise InvalidConfig(f"config {name} is not a list: set it instead")
        return key

    def not_served(self) -> Invalid:
        """Return the error for a kind that has no configs here."""
        known = ", ".join(f"{kind.value} ({kind.name.lower()})" for kind in ResourceKind)
        return Invalid(f"configs of resource type {self.kind} are not supported; choose one of {known}")


class ConfigEdit(NamedTuple):
    """One change of one config. APPEND and SUBTRACT change the elements of a list; DELETE needs no value."""

    name: str
    operation: int
    value: str | None


class ConfigCommands:
    """Commands on configs. Holds no state.

    Raises the errors of ``admin/errors.py``, ``Invalid`` and ``NotFound`` for resources that are not served or do not exist,
    and failures of the quorum.
    """

    def __init__(
        self, settings: BrokerSettings, topic_commands: TopicCommands, metadata: MetadataClient, store_url: str = ""
    ) -> None:
        """``store_url``: where clients find the object store; empty: it is not described."""
        self._settings = settings
        self._store_url = store_url
        self._topic_commands = topic_commands
        self._metadata = metadata

    def describe(self, resource: ConfigResource) -> list[ConfigRow]:
        """Return the configs of a topic or of this broker, or the defaults that were set, sorted by name."""
        view = self._metadata.view
        if resource.kind == ResourceKind.TOPIC:
            check_topic_name(resource.name)
            topic = view.find(Topic, topic_key(resource.name))
            if topic is None:
                raise NotFound(f"topic {resource.name!r} does not exist")
            return topic_config_rows(topic, topic_defaults(view))
        if (named := _NAMED.get(resource.kind)) is not None:
            defaults = group_config_defaults(self._settings) if resource.kind == ResourceKind.GROUP else {}
            return named.describe(view, resource.name, defaults)
        if resource.kind != ResourceKind.BROKER:
            raise resource.not_served()
        if not resource.name:
            return default_config_rows(self._settings, topic_defaults(view))
        if resource.name != str(self._settings.broker_id):
            raise Invalid(f"this is broker {self._settings.broker_id}: ask broker {resource.name[:20]} itself")
        return broker_config_rows(self._settings, topic_defaults(view), self._store_url)

    def resources(self, kinds: Collection[int]) -> Iterator[ConfigResource]:
        """Yield the resources that have configs, by kind; all kinds if ``kinds`` is empty. Raises ``Invalid``."""
        for kind in kinds:
            if kind not in set(ResourceKind):
                raise ConfigResource(kind, "").not_served()
        for kind in ResourceKind:
            if not kinds or kind in kinds:
                yield from (ConfigResource(kind, name) for name in self._names(kind))

    def _names(self, kind: ResourceKind) -> Iterable[str]:
        view = self._metadata.view
        if kind is ResourceKind.TOPIC:
            return (topic.name for topic in view.all(Topic))
        if kind is ResourceKind.BROKER:
            return (str(broker.broker_id) for broker in view.all(Broker))
        return _NAMED[kind].names(view)

    async def replace(
        self, resource: ConfigResource, configs: Sequence[tuple[str, str | None]], *, validate_only: bool
    ) -> None:
        """Replace all configs of ``resource``. A config without a value is reset to its default, like one that is omitted."""

        def edit(_: Mapping[str, str]) -> Mapping[str, str]:
            return {resource.stored_name(name): value for name, value in configs if value is not None}

        await self._change(resource, [name for name, _ in configs], edit, validate_only=validate_only)

    async def edit(self, resource: ConfigResource, edits: Sequence[ConfigEdit], *, validate_only: bool) -> None:
        """Apply ``edits`` to the configs of ``resource``, all of them or none.

        One broker has no configs of its own, so deleting some changes nothing: Kafka's tools remove throttles that way.
        """
        deletes_only = all(each.operation == ConfigOperation.DELETE for each in edits)
        if resource.kind == ResourceKind.BROKER and resource.name and deletes_only:
            return

        def edit(configs: dict[str, str]) -> Mapping[str, str]:
            for each in edits:
                _apply(configs, resource, each)
            return configs

        await self._change(resource, [each.name for each in edits], edit, validate_only=validate_only)

    async def _change(self, resource: ConfigResource, names: Sequence[str], edit: EditConfigs, *, validate_only: bool) -> None:
        if len(set(map(resource.stored_name, names))) != len(names):
            raise Invalid("a config is listed twice")
        if resource.kind == ResourceKind.TOPIC:
            await self._topic_commands.configure(resource.name, edit, TIMEOUT_S, validate_only=validate_only)
        elif (named := _NAMED.get(resource.kind)) is not None:
            await named.configure(self._metadata, resource.name, edit, TIMEOUT_S, validate_only=validate_only)
        elif resource.kind != ResourceKind.BROKER:
            raise resource.not_served()
        elif resource.name:
            raise Invalid(
                f"settings of broker {resource.name[:20]} are fixed when it starts;"
                " alter the cluster's defaults (an empty name) instead"
            )
        else:
            await configure_defaults(self._metadata, edit, TIMEOUT_S, validate_only=validate_only)


def _apply(configs: dict[str, str], resource: ConfigResource, edit: ConfigEdit) -> None:
    name = resource.stored_name(edit.name)
    if edit.operation == ConfigOperation.DELETE:
        configs.pop(name, None)
        return
    if edit.value is None:
        raise InvalidConfig(f"config {name} has no value")
    if edit.operation == ConfigOperation.SET:
        configs[name] = edit.value
    elif edit.operation in _LIST_EDITS:
        key = resource.list_key(name)
        parts = _LIST_EDITS[edit.operation](elements(configs.get(name, key.default)), elements(edit.value))
        configs[name] = ",".join(parts)
    else:
        raise Invalid(f"config operation {edit.operation} of {name}: 0 to 3 are known")


def _appended(present: list[str], given: list[str]) -> list[str]:
    return [*present, *(part for part in given if part not in present)]


def _subtracted(present: list[str], given: list[str]) -> list[str]:
    return [part for part in present if part not in given]


_ListEdit = Callable[[list[str], list[str]], list[str]]
_LIST_EDITS: Final[Mapping[int, _ListEdit]] = {ConfigOperation.APPEND: _appended, ConfigOperation.SUBTRACT: _subtracted}
