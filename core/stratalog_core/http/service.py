"""Starts and stops the HTTP endpoints of one process according to its settings."""

from __future__ import annotations

import logging

from stratalog_core.errors import Conflict
from stratalog_core.http.endpoints import Endpoints, Ready
from stratalog_core.http.loop_lag import EventLoopMetrics, LoopLag
from stratalog_core.http.server import HttpServer
from stratalog_core.http.settings import AUTO, DEFAULT_PORTS, OFF, HttpSettings
from stratalog_core.metrics.registry import Registry
from stratalog_core.ports import Clock

_log = logging.getLogger(__name__)


class HttpService:
    """Serves from ``start`` to ``close``, or never, if ``[http] listen`` is ``off``."""

    def __init__(self, settings: HttpSettings, role: str, registry: Registry, ready: Ready, clock: Clock) -> None:
        self._settings = settings
        self._role = role
        self._registry = registry
        self._endpoints = Endpoints(registry, ready, clock)
        self._server = HttpServer(self._endpoints.answer)
        self._lag: LoopLag | None = None

    @property
    def address(self) -> str:
        """``host:port`` of the endpoints; empty if they are not served."""
        return self._server.address

    async def start(self) -> None:
        """Start to serve. Raises ``Conflict`` if an explicitly configured address is in use, ``Invalid`` or ``OSError``."""
        if self._settings.listen == OFF:
            return
        try:
            await self._server.start(self._address())
        except Conflict as taken:
            if self._settings.listen != AUTO:
                raise
            _log.warning("no HTTP endpoints: %s; name an address in [http] listen", taken.message)
            return
        self._lag = LoopLag(self._registry.add(EventLoopMetrics()))
        _log.info("metrics and health at http://%s (/metrics, /healthz, /readyz)", self.address)

    async def close(self) -> None:
        if self._lag is not None:
            self._lag.close()
        await self._server.close()
        await self._endpoints.close()

    def _address(self) -> str:
        if self._settings.listen != AUTO:
            return self._settings.listen
        return f"127.0.0.1:{DEFAULT_PORTS.get(self._role, 0)}"
