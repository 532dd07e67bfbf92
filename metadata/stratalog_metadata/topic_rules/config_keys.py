"""Kinds, bounds and validation of configs with Kafka's names. The tables are in ``topic_configs.py``, ``broker_configs.py``.

An error names the config, the limit and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from stratalog_core.errors import Invalid


class ConfigKind(IntEnum):
    """Numbers are DescribeConfigs' ``config_type`` (KIP-569)."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    SHORT = 4
    LONG = 5
    DOUBLE = 6
    LIST = 7


class ConfigSource(IntEnum):
    """Numbers are DescribeConfigs' ``config_source`` (KIP-226)."""

    TOPIC = 1
    DYNAMIC_DEFAULT = 3
    """Set for the whole cluster while it runs."""
    STATIC_BROKER = 4
    DEFAULT = 5
    CLIENT_METRICS = 7
    GROUP = 8


INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """One config. ``choices`` are the values of a STRING or an INT, or the elements of a LIST.

    ``is_fixed``: only the default is served; ``reason`` says why. ``broker_name`` is Kafka's name for the cluster-wide
    default of a topic config; empty: the same name. ``is_per_topic``: it has no cluster-wide default.
    """

    name: str
    kind: ConfigKind
    default: str
    documentation: str
    minimum: int | None = None
    maximum: int | None = None
    choices: tuple[str, ...] | None = None
    reason: str = ""
    is_fixed: bool = False
    broker_name: str = ""
    is_per_topic: bool = False

    @property
    def default_name(self) -> str:
        """The name under which the cluster-wide default is set and described."""
        return self.broker_name or self.name

    def check(self, text: str) -> None:
        """Raise ``Invalid`` if ``text`` is not a valid value of this config."""
        if self.is_fixed:
            self._check_fixed(text)
        elif self.kind in (ConfigKind.INT, ConfigKind.LONG, ConfigKind.DOUBLE):
            self._check_number(text)
        elif self.choices is not None:
            self._check_choices(text)

    def _check_fixed(self, text: str) -> None:
        if (text.lower() if self.kind is ConfigKind.BOOLEAN else text) != self.default:
            raise Invalid(f"{self.name} is {text}; only {self.default} is supported: {self.reason}")

    def _check_choices(self, text: str) -> None:
        assert self.choices is not None
        parts = elements(text) if self.kind is ConfigKind.LIST else [text.lower() if self.kind is ConfigKind.BOOLEAN else text]
        if not all(part in self.choices for part in parts):
            raise Invalid(f"{self.name} is {text}; choose {' or '.join(self.choices)}")

    def _check_number(self, text: str) -> None:
        try:
            value = float(text) if self.kind is ConfigKind.DOUBLE else int(text)
        except ValueError:
            raise Invalid(f"{self.name} is {text}; it must be of type {self.kind.name.lower()}") from None
        if self.choices is not None and str(value) not in self.choices:
            raise Invalid(f"{self.name} is {text}; choose {' or '.join(self.choices)}")
        highest = self.maximum if self.maximum is not None else INT_MAX if self.kind is ConfigKind.INT else LONG_MAX
        if self.minimum is not None and not value >= self.minimum:
            raise Invalid(f"{self.name} is {text}; minimum is {self.minimum}")
        if value > highest:
            raise Invalid(f"{self.name} is {text}; maximum is {highest}")


def elements(text: str) -> list[str]:
    """Return the elements of a LIST value."""
    return [part.strip() for part in text.split(",") if part.strip()]


def key_table(keys: Iterable[ConfigKey]) -> Mapping[str, ConfigKey]:
    """Return the keys by name, sorted. Raises ``Invalid`` if a default is not valid."""
    table = {key.name: key for key in sorted(keys, key=lambda key: key.name)}
    for key in table.values():
        key.check(key.default)
    return table


def find_key(table: Mapping[str, ConfigKey], name: str, what: str) -> ConfigKey:
    """Return the key called ``name``. Raises ``Invalid`` with the nearest known name if it is unknown."""
    key = table.get(name)
    if key is None:
        near = difflib.get_close_matches(name, table, 1)
        raise Invalid(f"unknown {what} config {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return key
