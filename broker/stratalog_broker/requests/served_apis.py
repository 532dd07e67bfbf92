"""The handler table of one broker: the APIs that it serves, each bound to the services that its handler needs."""

from __future__ import annotations

from collections.abc import Iterable

from stratalog_broker.requests.handler_info import HandlerInfo, Services


class ServedApis:
    """APIs by key. A handler may name this class as one of its services."""

    def __init__(self, declared: Iterable[HandlerInfo], services: Services) -> None:
        offered: Services = {ServedApis: self, **services}
        self.by_key = {info.key: info.bound_to(offered) for info in declared}
