"""Contains exactly one module per Kafka API. ``HANDLERS`` lists the APIs that are served and that ApiVersions returns.

Each module declares ``API``: the key, the versions served, and the handler with the services that it needs.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module
from typing import Final

from stratalog_broker.handlers.produce import READ_ONLY_API as READ_ONLY_PRODUCE
from stratalog_broker.requests.access import Resource
from stratalog_broker.requests.handler_info import HandlerInfo

_MODULES: Final = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]


def _is_read_only(info: HandlerInfo) -> bool:
    """Whether a server without transactions and without a metadata quorum, whose topics never change, serves the API."""
    access = info.access
    return not info.needs_quorum and (
        access is None or not (access.changes_log or access.resource is Resource.TRANSACTIONAL_ID)
    )


HANDLERS: Final[Mapping[int, HandlerInfo]] = {module.API.key: module.API for module in _MODULES}
"""The APIs by key. ``ServedApis`` binds their handlers to services."""
READ_ONLY_HANDLERS: Final[Mapping[int, HandlerInfo]] = {
    **{key: info for key, info in HANDLERS.items() if _is_read_only(info)},
    READ_ONLY_PRODUCE.key: READ_ONLY_PRODUCE,
}
"""The APIs of a server whose topics never change: those of consumers and their groups, and a Produce that refuses."""
assert len(HANDLERS) == len(_MODULES), "two modules serve the same API"
