"""The reference page of group configs, from the table that the broker checks them by."""

from __future__ import annotations

from stratalog_broker.configs.group_configs import GROUP_CONFIG_KEYS

_HEAD = """# Group configs

```sh
kafka-configs.sh --bootstrap-server 127.0.0.1:9092 --alter --entity-type groups --entity-name readers \\
  --add-config consumer.session.timeout.ms=50000
```

They apply to members that use the consumer protocol (KIP-848); those that use the classic protocol choose their own time-outs.
Generated from the code by `make reference`.

| name | default | values | what |
| --- | --- | --- | --- |
"""


def group_configs_page() -> str:
    """The page's text."""
    keys = GROUP_CONFIG_KEYS.values()
    return _HEAD + "".join(
        f"| `{key.name}` | {key.default} | {key.minimum} … {key.maximum} | {key.documentation} |\n" for key in keys
    )
