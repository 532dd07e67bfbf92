"""The cluster's client metrics subscriptions, parsed once after each change, and what they ask of a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from stratalog_broker.configs.client_metrics_configs import (
    ALL_METRICS,
    CLIENT_METRICS_KEYS,
    INTERVAL_MS,
    MATCH,
    METRICS,
    ClientPattern,
)
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.client.named_configs import named_configs
from stratalog_metadata.records import CLIENT_METRICS_CONFIGS, dynamic_config_key
from stratalog_metadata.state.changes import Change
from stratalog_metadata.topic_rules.config_keys import elements

_PREFIX: Final = dynamic_config_key(CLIENT_METRICS_CONFIGS)
INTERVAL_MS_DEFAULT: Final = int(CLIENT_METRICS_KEYS[INTERVAL_MS].default)


class Asked(NamedTuple):
    """The prefixes of the names of the metrics that a client is to push (``*``: all; none: nothing), and the interval."""

    metrics: tuple[str, ...] = ()
    interval_ms: int = INTERVAL_MS_DEFAULT


class _Subscription:
    def __init__(self, configs: Mapping[str, str]) -> None:
        self.metrics = elements(configs.get(METRICS, ""))
        self.interval_ms = int(configs.get(INTERVAL_MS, INTERVAL_MS_DEFAULT))
        self._patterns = [ClientPattern(element) for element in elements(configs.get(MATCH, ""))]

    def applies_to(self, client: Mapping[str, str]) -> bool:
        return all(pattern.matches(client) for pattern in self._patterns)


class Subscriptions:
    """Follows the view until ``close``. ``version`` rises with each change of a subscription."""

    def __init__(self, view: MetadataView) -> None:
        self._view = view
        self.version = 0
        self._parsed: tuple[int, list[_Subscription]] = (-1, [])
        self._unsubscribe = view.subscribe(self._on_changes)

    def asked_of(self, client: Mapping[str, str]) -> Asked:
        """Return what a client is to push: the metrics of all subscriptions that apply to it, at the shortest interval."""
        applying = [one for one in self._subscriptions() if one.applies_to(client)]
        if not applying:
            return Asked()
        metrics = dict.fromkeys(metric for one in applying for metric in one.metrics)
        interval_ms = min(INTERVAL_MS_DEFAULT, *(one.interval_ms for one in applying))
        return Asked((ALL_METRICS,) if ALL_METRICS in metrics else tuple(sorted(metrics)), interval_ms)

    def _subscriptions(self) -> list[_Subscription]:
        if self._parsed[0] != self.version:
            configs = (configs for _, configs in named_configs(self._view, CLIENT_METRICS_CONFIGS))
            self._parsed = self.version, [_Subscription(each) for each in configs]
        return self._parsed[1]

    def _on_changes(self, changes: Sequence[Change]) -> None:
        if any(change.key.startswith(_PREFIX) for change in changes):
            self.version += 1

    def close(self) -> None:
        """Stop following the view."""
        self._unsubscribe()
