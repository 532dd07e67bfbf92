"""Configs of a client metrics subscription under Kafka's names (KIP-714): which clients push which metrics, and how often."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stratalog_broker.configs.linear_pattern import LinearPattern
from stratalog_core.errors import Invalid
from stratalog_metadata.topic_rules.config_keys import ConfigKey, ConfigKind, elements, find_key, key_table

METRICS: Final = "metrics"
INTERVAL_MS: Final = "interval.ms"
MATCH: Final = "match"
ALL_METRICS: Final = "*"
CLIENT_FIELDS: Final = (
    "client_instance_id", "client_id", "client_software_name", "client_software_version", "client_source_address",
    "client_source_port",
)  # fmt: skip
"""The properties of a client that patterns of ``match`` may name."""

CLIENT_METRICS_KEYS: Final[Mapping[str, ConfigKey]] = key_table(
    [
        ConfigKey(
            name=METRICS, kind=ConfigKind.LIST, default="",
            documentation="Prefixes of the names of the metrics that clients push; * means all metrics.",
        ),
        ConfigKey(
            name=INTERVAL_MS, kind=ConfigKind.INT, default="300000", minimum=100, maximum=3_600_000,
            documentation="How often clients push their metrics.",
        ),
        ConfigKey(
            name=MATCH, kind=ConfigKind.LIST, default="",
            documentation="Clients to which it applies: FIELD=PATTERN (RE2 syntax), all of which must match; empty: all.",
        ),
    ]
)  # fmt: skip


class ClientPattern:
    """One element of ``match``: a field of a client, and the regular expression for the whole of it."""

    def __init__(self, text: str) -> None:
        field, separator, pattern = text.partition("=")
        self.field = field.strip()
        if not separator or self.field not in CLIENT_FIELDS:
            raise Invalid(f"match has {text[:100]!r}; write FIELD=PATTERN with one of {', '.join(CLIENT_FIELDS)}")
        try:
            self._pattern = LinearPattern(pattern.strip())
        except Invalid as malformed:
            raise Invalid(f"match has {text[:100]!r}: {malformed.message}") from malformed

    def matches(self, client: Mapping[str, str]) -> bool:
        """Return whether the client's field matches; an unknown field does not."""
        value = client.get(self.field)
        return value is not None and self._pattern.matches(value)


def check_client_metrics_configs(configs: Mapping[str, str]) -> None:
    """Raise ``Invalid`` if a config of a subscription is unknown or its number is out of bounds."""
    for name, value in configs.items():
        find_key(CLIENT_METRICS_KEYS, name, "client metrics").check(value)


def check_match(configs: Mapping[str, str]) -> None:
    """Raise ``Invalid`` if ``match`` has a pattern that cannot be compiled."""
    for element in elements(configs.get(MATCH, "")):
        ClientPattern(element)
