"""One module per Kafka API; this table is what is served, and what ApiVersions answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stratalog_broker.handlers import (
    api_versions,
    fetch,
    init_producer_id,
    list_offsets,
    metadata,
    offset_for_leader_epoch,
    produce,
)
from stratalog_broker.handlers.info import HandlerInfo

_MODULES: Final = (
    api_versions,
    fetch,
    init_producer_id,
    list_offsets,
    metadata,
    offset_for_leader_epoch,
    produce,
)

HANDLERS: Final[Mapping[int, HandlerInfo]] = {module.API.key: module.API for module in _MODULES}
assert len(HANDLERS) == len(_MODULES), "no two modules serve the same API"
