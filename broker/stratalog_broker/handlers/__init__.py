"""One module per Kafka API; this table is what is served, and what ApiVersions answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stratalog_broker.handlers.info import HandlerInfo

_ALL: tuple[HandlerInfo, ...] = ()

HANDLERS: Final[Mapping[int, HandlerInfo]] = {info.key: info for info in _ALL}
