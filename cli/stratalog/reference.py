"""The reference page of settings, topic configs and APIs: ``python -m stratalog.reference > docs/reference/settings.md``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from stratalog.roles.node import NodeSettings
from stratalog_bookies.client import LedgerClientSettings
from stratalog_bookies.config import BookieSettings
from stratalog_broker.config import BrokerSettings
from stratalog_broker.config_keys import ConfigKey, ConfigKind
from stratalog_broker.handlers import HANDLERS
from stratalog_broker.topic_configs import TOPIC_CONFIG_KEYS, TOPIC_CONFIGS_NOT_SERVED, default_text
from stratalog_metadata.node.config import MetadataSettings
from stratalog_tiering.cold.block_source import ColdReaderSettings
from stratalog_tiering.config import TieringSettings

SECTIONS: tuple[tuple[str, type[Any]], ...] = (
    ("node", NodeSettings),
    ("metadata", MetadataSettings),
    ("bookie", BookieSettings),
    ("ledgers", LedgerClientSettings),
    ("broker", BrokerSettings),
    ("cold", ColdReaderSettings),
    ("tiering", TieringSettings),
)

_HEAD = """# Reference

Made from the code by `python -m stratalog.reference`; a test compares.

## Settings

A process reads a TOML file (`--config FILE`), one table for each section below. `STRATALOG_<SECTION>_<NAME>` in the environment
goes before the file. An unknown name is refused. Units are at the end of a name.
"""

_TOPIC_CONFIGS = """## Topic configs

A topic's own value goes before the cluster's default (`stratalog broker defaults`, or Kafka's
`kafka-configs --entity-type brokers --entity-default`), which goes before the built-in default.
Internal topics follow no default of the cluster.

| name | name of the cluster's default | type | built-in default | values | what |
| --- | --- | --- | --- | --- | --- |"""

_NOT_SERVED = """
Kafka's other topic configs are refused:

| name | why |
| --- | --- |"""

_APIS = """
## Kafka APIs

What ApiVersions answers. An API that is not listed is not served.

| key | API | versions |
| --- | --- | --- |"""


def reference() -> str:
    """The whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    for section, settings in SECTIONS:
        yield f"### [{section}]\n"
        yield "| name | type | default | bounds | what |"
        yield "| --- | --- | --- | --- | --- |"
        yield from (_row(field) for field in dataclasses.fields(settings))
        yield ""
    yield _TOPIC_CONFIGS
    yield from map(_topic_config, TOPIC_CONFIG_KEYS.values())
    yield _NOT_SERVED
    yield from (f"| `{name}` | {reason} |" for name, reason in TOPIC_CONFIGS_NOT_SERVED.items())
    yield _APIS
    for key, info in sorted(HANDLERS.items()):
        yield f"| {key} | {_name(info)} | {info.min_version}–{info.max_version} |"


def _row(field: dataclasses.Field[Any]) -> str:
    default = "required" if field.default is dataclasses.MISSING else f"`{_shown(field.default)}`"
    return f"| `{field.name}` | {field.type} | {default} | {_bounds(field)} | {field.metadata['help']} |"


def _topic_config(key: ConfigKey) -> str:
    kind = key.kind.name.lower()
    return f"| `{key.name}` | `{key.default_name}` | {kind} | {default_text(key)} | {_values(key)} | {key.documentation} |"


def _values(key: ConfigKey) -> str:
    if key.is_fixed:
        return f"only this one: {key.reason}"
    if key.choices is not None:
        return ", ".join(key.choices)
    if key.kind is ConfigKind.STRING:
        return ""
    return f"{key.minimum} … {'' if key.maximum is None else key.maximum}".strip()


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(default)
    return str(default)


def _bounds(field: dataclasses.Field[Any]) -> str:
    if field.metadata["choices"]:
        return ", ".join(field.metadata["choices"])
    low, high = field.metadata["minimum"], field.metadata["maximum"]
    if low is None and high is None:
        return ""
    return f"{'' if low is None else low} … {'' if high is None else high}".strip()


def _name(info: Any) -> str:
    handle = info.handle or info.handle_raw
    return "".join(word.capitalize() for word in handle.__module__.rpartition(".")[2].split("_"))


if __name__ == "__main__":
    sys.stdout.write(reference())
