"""The reference page of topic configs, from the table that the broker checks them by."""

from __future__ import annotations

from collections.abc import Iterator

from stratalog_metadata.topic_rules.config_keys import ConfigKey, ConfigKind
from stratalog_metadata.topic_rules.topic_configs import TOPIC_CONFIG_KEYS, TOPIC_CONFIGS_NOT_SERVED, default_text

_HEAD = """# Topic configs

```sh
stratalog topic config events --set retention.ms=604800000
```

The value of a config is the first of these that is set:

1. the topic's own value,
2. the cluster's default: `stratalog broker defaults`, or Kafka's `kafka-configs --entity-type brokers --entity-default`.
   Internal topics ignore it;
3. the built-in default.

Generated from the code by `make reference`.

| name | name of the cluster's default | type | built-in default | values | what |
| --- | --- | --- | --- | --- | --- |"""

_NOT_SERVED = """
## Refused

Setting one of these configs of Kafka fails with INVALID_CONFIG:

| name | why |
| --- | --- |"""


def topic_configs_page() -> str:
    """The page's text."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    yield from map(_row, TOPIC_CONFIG_KEYS.values())
    yield _NOT_SERVED
    yield from (f"| `{name}` | {reason} |" for name, reason in TOPIC_CONFIGS_NOT_SERVED.items())


def _row(key: ConfigKey) -> str:
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
