"""Configs of consumer groups under Kafka's names (KIP-848), for members that use the consumer protocol.

Bounds are Apache Kafka's defaults of ``group.consumer.{min,max}.*``. Configs of share and streams groups are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stratalog_broker.configs.settings import BrokerSettings
from stratalog_core.errors import Invalid
from stratalog_metadata.topic_rules.config_keys import ConfigKey, ConfigKind, find_key, key_table

SESSION_TIMEOUT_MS: Final = "consumer.session.timeout.ms"
HEARTBEAT_INTERVAL_MS: Final = "consumer.heartbeat.interval.ms"
ASSIGNMENT_INTERVAL_MS: Final = "consumer.assignment.interval.ms"

GROUP_CONFIG_KEYS: Final[Mapping[str, ConfigKey]] = key_table(
    [
        ConfigKey(
            name=SESSION_TIMEOUT_MS, kind=ConfigKind.INT, default="45000", minimum=45_000, maximum=60_000,
            broker_name="group.consumer.session.timeout.ms",
            documentation="A member that does not send a heartbeat for this time is removed from the group.",
        ),
        ConfigKey(
            name=HEARTBEAT_INTERVAL_MS, kind=ConfigKind.INT, default="5000", minimum=5_000, maximum=15_000,
            broker_name="group.consumer.heartbeat.interval.ms",
            documentation="How often members send heartbeats.",
        ),
        ConfigKey(
            name=ASSIGNMENT_INTERVAL_MS, kind=ConfigKind.INT, default="1000", minimum=0, maximum=15_000,
            broker_name="group.consumer.assignment.interval.ms",
            documentation="Minimum time between two assignments of partitions to the members.",
        ),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfigs:
    """The configs in force of one group."""

    session_timeout_ms: int
    heartbeat_interval_ms: int
    assignment_interval_ms: int

    @classmethod
    def of(cls, configs: Mapping[str, str]) -> GroupConfigs:
        """Return the configs in force, given those that are set for the group."""
        keys = GROUP_CONFIG_KEYS
        return cls(
            session_timeout_ms=int(configs.get(SESSION_TIMEOUT_MS, keys[SESSION_TIMEOUT_MS].default)),
            heartbeat_interval_ms=int(configs.get(HEARTBEAT_INTERVAL_MS, keys[HEARTBEAT_INTERVAL_MS].default)),
            assignment_interval_ms=int(configs.get(ASSIGNMENT_INTERVAL_MS, keys[ASSIGNMENT_INTERVAL_MS].default)),
        )


def group_config_defaults(settings: BrokerSettings) -> dict[str, str]:
    """Return the configs of groups for which none are set, by name."""
    return {
        SESSION_TIMEOUT_MS: str(settings.group_consumer_session_timeout_ms),
        HEARTBEAT_INTERVAL_MS: str(settings.group_consumer_heartbeat_interval_ms),
        ASSIGNMENT_INTERVAL_MS: str(settings.group_consumer_assignment_interval_ms),
    }


def check_group_configs(configs: Mapping[str, str]) -> None:
    """Raise ``Invalid`` if a config of a group is unknown or has no valid value."""
    for name, value in configs.items():
        find_key(GROUP_CONFIG_KEYS, name, "group").check(value)
    given = GroupConfigs.of(configs)
    if given.session_timeout_ms <= given.heartbeat_interval_ms:
        raise Invalid(
            f"{SESSION_TIMEOUT_MS} is {given.session_timeout_ms}; it must exceed {HEARTBEAT_INTERVAL_MS}, which is"
            f" {given.heartbeat_interval_ms}"
        )
