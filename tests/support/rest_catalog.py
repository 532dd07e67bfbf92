"""A REST catalog of Iceberg over another catalog: the requests that create, load and commit a table, as specified."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException, NamespaceAlreadyExistsError, NoSuchTableError
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest, Table


@contextmanager
def rest_catalog(catalog: Catalog) -> Iterator[str]:
    """Serve ``catalog``; yields the URI."""

    class Handler(_Handler):
        served = catalog

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: Catalog

    def do_GET(self) -> None:
        self._answer(self._read)

    def do_POST(self) -> None:
        self._answer(self._write)

    def _answer(self, work: Any) -> None:
        try:
            status, content = 200, work()
        except NoSuchTableError as missing:
            status, content = 404, _error(404, missing)
        except (CommitFailedException, NamespaceAlreadyExistsError) as conflict:
            status, content = 409, _error(409, conflict)
        body = msgspec.json.encode(content)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _read(self) -> Any:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts == ["v1", "config"]:
            return {"defaults": {}, "overrides": {}}
        return _loaded(self.served.load_table((parts[2], parts[4])))

    def _write(self) -> Any:
        given = self.rfile.read(int(self.headers["Content-Length"]))
        parts = self.path.strip("/").split("/")
        if len(parts) == 2:
            wanted = msgspec.json.decode(given)
            self.served.create_namespace(tuple(wanted["namespace"]))
            return {"namespace": wanted["namespace"], "properties": {}}
        if len(parts) == 4:
            return self._create(parts[2], msgspec.json.decode(given))
        table = self.served.load_table((parts[2], parts[4]))
        commit = CommitTableRequest.model_validate_json(given)
        self.served.commit_table(table, commit.requirements, commit.updates)
        return _loaded(self.served.load_table((parts[2], parts[4])))

    def _create(self, namespace: str, wanted: dict[str, Any]) -> Any:
        spec = PartitionSpec.model_validate(wanted["partition-spec"])
        schema = Schema.model_validate(wanted["schema"])
        created = self.served.create_table(
            (namespace, wanted["name"]), schema, wanted.get("location"), spec, properties=wanted["properties"]
        )
        return _loaded(created)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def _loaded(table: Table) -> Any:
    metadata = msgspec.json.decode(table.metadata.model_dump_json())
    return {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}


def _error(code: int, error: Exception) -> Any:
    return {"error": {"message": str(error), "type": type(error).__name__, "code": code}}
