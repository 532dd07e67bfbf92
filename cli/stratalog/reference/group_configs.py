"""The reference page of configs of groups and of client metrics, from the tables that the broker checks them by."""

from __future__ import annotations

from collections.abc import Mapping

from stratalog_broker.configs.client_metrics_configs import CLIENT_FIELDS, CLIENT_METRICS_KEYS
from stratalog_broker.configs.group_configs import GROUP_CONFIG_KEYS
from stratalog_metadata.topic_rules.config_keys import ConfigKey

_HEAD = """# Configs of groups and client metrics

```sh
kafka-configs.sh --bootstrap-server 127.0.0.1:9092 --alter --entity-type groups --entity-name readers \\
  --add-config consumer.session.timeout.ms=50000
```

Group configs apply to members that use the consumer protocol (KIP-848). Members that use the classic protocol choose their own
time-outs. `[broker] group_consumer_session_timeout_ms` and `group_consumer_heartbeat_interval_ms` set the defaults.
Generated from the code by `make reference`.

"""
_TABLE = "| name | default | values | what |\n| --- | --- | --- | --- |\n"
_CLIENT_METRICS = f"""
## Client metrics

```sh
kafka-client-metrics.sh --bootstrap-server 127.0.0.1:9092 --alter --name all --metrics '*' --interval 60000
```

Clients with `enable.metrics.push=true` (KIP-714; the default of Java's producers and consumers and of librdkafka) push to a
broker the metrics of all subscriptions that match them. The broker's `/metrics` page shows them as
`stratalog_client_last_value`. A FIELD of `match` is {", ".join(f"`{name}`" for name in CLIENT_FIELDS)}.

"""


def group_configs_page() -> str:
    """The page's text."""
    return f"{_HEAD}{_table(GROUP_CONFIG_KEYS)}{_CLIENT_METRICS}{_table(CLIENT_METRICS_KEYS)}"


def _table(keys: Mapping[str, ConfigKey]) -> str:
    return _TABLE + "".join(
        f"| `{key.name}` | {key.default} | {_values(key)} | {key.documentation} |\n" for key in keys.values()
    )


def _values(key: ConfigKey) -> str:
    return "a list" if key.minimum is None else f"{key.minimum} … {key.maximum}"
