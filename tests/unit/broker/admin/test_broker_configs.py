"""A broker's settings under Kafka's names: its listeners, and the addresses that clients get."""

from __future__ import annotations

from stratalog_broker.admin.broker_configs import broker_configs
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_metadata.topic_rules.config_keys import ConfigSource


def _values(settings: BrokerSettings, name: str) -> tuple[tuple[str, ConfigSource], ...]:
    (found,) = [config.values for config in broker_configs(settings) if config.name == name]
    return found


def test_advertised_listeners_are_those_that_clients_get() -> None:
    settings = BrokerSettings(
        broker_id=1, listen=("0.0.0.0:9092", "INSIDE=10.0.0.1:9093"), advertised=("kafka.example.org:443",)
    )

    assert _values(settings, "listeners")[0] == ("PLAINTEXT://0.0.0.0:9092,INSIDE://10.0.0.1:9093", ConfigSource.STATIC_BROKER)
    assert _values(settings, "advertised.listeners")[0] == (
        "PLAINTEXT://kafka.example.org:443,INSIDE://10.0.0.1:9093",
        ConfigSource.STATIC_BROKER,
    )


def test_a_broker_advertises_its_listeners_unless_told_otherwise() -> None:
    settings = BrokerSettings(broker_id=1, listen=("broker-1:9092",))

    assert _values(settings, "advertised.listeners") == (("PLAINTEXT://broker-1:9092", ConfigSource.STATIC_BROKER),)


def test_a_broker_without_settings_advertises_the_built_in_listener() -> None:
    settings = BrokerSettings(broker_id=1)

    (value, source), *_ = _values(settings, "advertised.listeners")
    assert (value, source) == (_values(settings, "listeners")[0][0], ConfigSource.DEFAULT)


def test_settings_that_kafka_does_not_have_are_named_after_this_product() -> None:
    names = {config.name for config in broker_configs(BrokerSettings(broker_id=1))}

    assert "stratalog.memory.bytes" in names
    assert "stratalog.advertised" not in names
