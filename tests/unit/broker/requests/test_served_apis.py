"""Handlers get the services that they declare; an unknown service keeps the broker from starting."""

from __future__ import annotations

from typing import Any

import pytest

from stratalog_broker.requests.handler_info import HandlerInfo, needs_of
from stratalog_broker.requests.served_apis import ServedApis


class Service:
    pass


async def function(context: Any, request: Any, *, service: Service) -> Any:
    return context, request, service


class Handler:
    def __init__(self, *, service: Service) -> None:
        self._service = service

    def __call__(self, context: Any, body: Any) -> Any:
        return context, body, self._service


async def test_functions_and_classes_get_the_services_that_they_declare() -> None:
    service = Service()
    assert needs_of(function) == needs_of(Handler) == {"service": Service}
    declared = [
        HandlerInfo(key=1, min_version=0, max_version=0, handle=function, access=None),
        HandlerInfo(key=2, min_version=0, max_version=0, handle_raw=Handler, access=None),
    ]
    by_key = ServedApis(declared, {Service: service}).by_key
    handle, handle_raw = by_key[1].handle, by_key[2].handle_raw
    assert handle is not None
    assert handle_raw is not None
    assert await handle("context", "request") == ("context", "request", service)
    assert handle_raw("context", "body") == ("context", "body", service)


def test_an_unknown_service_is_refused_at_start() -> None:
    with pytest.raises(LookupError):
        ServedApis([HandlerInfo(key=1, min_version=0, max_version=0, handle=function, access=None)], {})
