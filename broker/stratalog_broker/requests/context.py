"""The context of one request: its client, its API version, and the means to respond."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

from stratalog_broker.protocol.entities import ResponseFactory, response_factory
from stratalog_broker.requests.principal import Principal
from stratalog_core.ports import Buffer

_log = logging.getLogger(__name__)


UNKNOWN_SOFTWARE: Final = ("unknown", "unknown")


class Connection(Protocol):
    """The connection on which a request arrived."""

    @property
    def client_host(self) -> str: ...

    @property
    def client_port(self) -> int: ...

    client_software: tuple[str, str]
    """Name and version of the client's library, as its ApiVersions request gives them."""

    @property
    def listener(self) -> str: ...

    @property
    def principal(self) -> Principal | None: ...

    def respond(self, context: RequestContext, parts: Sequence[Buffer]) -> None:
        """Send a whole response (length and header included) after those of earlier requests; empty for acks=0."""
        ...

    def charge(self, more_bytes: int) -> bool:
        """Charge more bytes for a request that is held; False if there is no room for them."""
        ...

    def released(self, request_bytes: int) -> None:
        """Discharge ``request_bytes`` of a request that are no longer held."""
        ...

    def close(self, reason: str) -> None: ...


class RequestContext:
    """One request. ``new`` builds the structs of its response in its version (see :class:`ResponseFactory`).

    Its bytes count against the broker's bound until it is answered and ``release`` has been called once per ``hold``.
    """

    __slots__ = (
        "_connection",
        "_holds",
        "api_key",
        "api_version",
        "arrived_at_s",
        "client_id",
        "correlation_id",
        "request_bytes",
        "response",
        "throttle_ms",
    )

    def __init__(
        self,
        connection: Connection,
        *,
        api_key: int,
        api_version: int,
        correlation_id: int,
        client_id: str,
        request_bytes: int,
        arrived_at_s: float = 0.0,
    ) -> None:
        self.arrived_at_s = arrived_at_s
        self.api_key = api_key
        self.api_version = api_version
        self.correlation_id = correlation_id
        self.client_id = client_id
        self.request_bytes = request_bytes
        self.response: Sequence[Buffer] | None = None
        """The response, from when the request is answered until all earlier responses are sent."""
        self.throttle_ms = 0
        """For how long the client's connection is not read after this request; set at admission."""
        self._connection = connection
        self._holds = 1

    @property
    def client_host(self) -> str:
        """The client's address, without the port."""
        return self._connection.client_host

    @property
    def client_software(self) -> tuple[str, str]:
        """Name and version of the client's library (KIP-511); ``unknown`` until its ApiVersions request."""
        return self._connection.client_software

    @client_software.setter
    def client_software(self, software: tuple[str, str]) -> None:
        self._connection.client_software = software

    def client_fields(self) -> dict[str, str]:
        """Return the client's properties under the names of client metrics subscriptions (KIP-714)."""
        name, version = self.client_software
        return {
            "client_id": self.client_id, "client_software_name": name, "client_software_version": version,
            "client_source_address": self.client_host, "client_source_port": str(self._connection.client_port),
        }  # fmt: skip

    @property
    def listener(self) -> str:
        """Name of the listener that received the request; responses give the brokers' addresses for that listener."""
        return self._connection.listener

    @property
    def principal(self) -> Principal | None:
        """The identity of the client; None if it has to authenticate first."""
        return self._connection.principal

    def new(self, kind: str, /, **values: Any) -> Any:
        """Build a response struct: ``new("MetadataResponse", brokers=…)``. Fields unknown to the version are dropped."""
        if self.throttle_ms:
            values["throttle_time"] = timedelta(milliseconds=self.throttle_ms)
        return response_factory(self.api_key, self.api_version)(kind, **values)

    @property
    def reply(self) -> ResponseFactory:
        return response_factory(self.api_key, self.api_version)

    def respond(self, parts: Sequence[Buffer]) -> None:
        """Send the whole response, length and header included; empty if none is due. For raw handlers; call it once."""
        assert self.response is None, "a request is answered once"
        self.response = parts
        self._connection.respond(self, parts)
        self.release()

    def charge(self, more_bytes: int) -> bool:
        """Count ``more_bytes`` as bytes of this request; False if the broker has no room for them."""
        if not self._connection.charge(more_bytes):
            return False
        self.request_bytes += more_bytes
        return True

    def hold(self) -> None:
        """Add a holder of the request's bytes."""
        self._holds += 1

    def release(self) -> None:
        """Remove a holder of the request's bytes."""
        self._holds -= 1
        if self._holds == 0:
            self._connection.released(self.request_bytes)

    def fail(self) -> None:
        """Log the exception being handled, which is a bug in the broker, and close the connection."""
        _log.exception("API %d version %d failed", self.api_key, self.api_version)
        self.close_connection("a request could not be handled")
        self.release()

    def close_connection(self, reason: str) -> None:
        """Close the client's connection without a response."""
        self._connection.close(reason)
