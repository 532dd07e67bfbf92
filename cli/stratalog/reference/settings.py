"""The reference page of settings, from the dataclass of each component."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

from stratalog.roles.node import NodeSettings
from stratalog_bookies.client import LedgerClientSettings
from stratalog_bookies.config import BookieSettings
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_core.http.settings import SECTION as HTTP_SECTION
from stratalog_core.http.settings import HttpSettings
from stratalog_metadata.node.config import MetadataSettings
from stratalog_tiering.cold.block_source import ColdReaderSettings
from stratalog_tiering.config import TieringSettings

_READERS: Final = {
    "node": "every process",
    "metadata": "metadata nodes",
    "bookie": "bookies",
    "ledgers": "brokers and tiering workers: how they write and read ledgers",
    "broker": "brokers, and servers of an archive",
    "cold": "brokers, and servers of an archive",
    "tiering": "tiering workers",
    HTTP_SECTION: "every process",
}
_TYPES: Final = {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "tuple[str, ...]": "list of text"}
SECTIONS: tuple[tuple[str, type[Any]], ...] = (
    ("node", NodeSettings),
    ("metadata", MetadataSettings),
    ("bookie", BookieSettings),
    ("ledgers", LedgerClientSettings),
    ("broker", BrokerSettings),
    ("cold", ColdReaderSettings),
    ("tiering", TieringSettings),
    (HTTP_SECTION, HttpSettings),
)

_HEAD = """# Settings

```sh
STRATALOG_BROKER_LISTEN=127.0.0.1:9092 stratalog broker --config broker.toml
```

Each process reads a TOML file (`--config FILE`) with one table per section below.

- An environment variable `STRATALOG_<SECTION>_<NAME>` takes precedence over the file, and a command line option over both.
- A list is an array in the file, and separated by commas in an environment variable.
- An unknown name is an error; the message suggests the nearest name.
- A name ends with its unit: `_ms`, `_s`, `_bytes`, `_bytes_per_s`.

Generated from the code by `make reference`.
"""


def settings_page() -> str:
    """The page's text."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    for section, settings in SECTIONS:
        yield f"## [{section}]\n"
        yield f"Read by {_READERS[section]}.\n"
        yield "| name | type | default | bounds | what |"
        yield "| --- | --- | --- | --- | --- |"
        yield from (_row(field) for field in dataclasses.fields(settings))
        yield ""


def _row(field: dataclasses.Field[Any]) -> str:
    default = "required" if field.default is dataclasses.MISSING else _shown(field.default)
    help_text = field.metadata["help"]
    return f"| `{field.name}` | {_TYPES[str(field.type)]} | {default} | {_bounds(field)} | {help_text} |"


def _shown(default: Any) -> str:
    """A default as a table shows it: in the form that TOML and the environment take, and nothing if it is empty."""
    if isinstance(default, bool):
        default = str(default).lower()
    elif isinstance(default, tuple):
        default = ",".join(default)
    return "" if default == "" else f"`{default}`"


def _bounds(field: dataclasses.Field[Any]) -> str:
    if field.metadata["choices"]:
        return ", ".join(field.metadata["choices"])
    low, high = field.metadata["minimum"], field.metadata["maximum"]
    if low is None and high is None:
        return ""
    return f"{'' if low is None else low} … {'' if high is None else high}".strip()
