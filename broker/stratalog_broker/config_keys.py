"""Configuration under Kafka's names: kinds of values, bounds, and their validation, apart from which names there are.

``topic_configs.py`` and ``broker_configs.py`` hold the tables. A refusal names the field, the limit and the remedy.
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
    LONG = 5
    DOUBLE = 6
    LIST = 7


class ConfigSource(IntEnum):
    """Numbers are DescribeConfigs' ``config_source`` (KIP-226)."""

    TOPIC = 1
    STATIC_BROKER = 4
    DEFAULT = 5


INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """One name. ``choices`` bounds a STRING, or each element of a LIST; ``reason`` says why there are no others."""

    name: str
    kind: ConfigKind
    default: str
    documentation: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] | None = None
    reason: str = ""

    def check(self, text: str) -> None:
        """Raises ``Invalid`` if ``text`` is not a value of this key."""
        if self.kind in (ConfigKind.INT, ConfigKind.LONG, ConfigKind.DOUBLE):
            self._check_number(text)
            return
        parts = elements(text) if self.kind is ConfigKind.LIST else [text.lower() if self.kind is ConfigKind.BOOLEAN else text]
        for part in parts:
            if self.choices is not None and part not in self.choices:
                raise Invalid(
                    f"{self.name}={text}: choose {' or '.join(self.choices)}{'; ' if self.reason else ''}{self.reason}"
                )

    def _check_number(self, text: str) -> None:
        try:
            value = float(text) if self.kind is ConfigKind.DOUBLE else int(text)
        except ValueError:
            raise Invalid(f"{self.name}={text}: not a {self.kind.name.lower()}") from None
        highest = self.maximum if self.maximum is not None else INT_MAX if self.kind is ConfigKind.INT else LONG_MAX
        why = f"; {self.reason}" if self.reason else ""
        if self.minimum is not None and not value >= self.minimum:
            raise Invalid(f"{self.name}={text}: the least is {self.minimum}{why}")
        if not value <= highest:
            raise Invalid(f"{self.name}={text}: the most is {highest}{why}")


def elements(text: str) -> list[str]:
    """The elements of a LIST value."""
    return [part.strip() for part in text.split(",") if part.strip()]


def key_table(keys: Iterable[ConfigKey]) -> Mapping[str, ConfigKey]:
    """Keys by name, sorted; every default is valid."""
    table = {key.name: key for key in sorted(keys, key=lambda key: key.name)}
    for key in table.values():
        key.check(key.default)
    return table


def find_key(table: Mapping[str, ConfigKey], name: str, what: str) -> ConfigKey:
    """Raises ``Invalid`` that names the unknown name and the nearest known one."""
    key = table.get(name)
    if key is None:
        near = difflib.get_close_matches(name, table, 1)
        raise Invalid(f"unknown {what} config {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return key
