"""Fixtures of several suites: real stores on free ports, started once and stopped at the end, and settings of properties.

A server's binary is found by environment (``STRATALOG_MINIO``, ``STRATALOG_VERSITYGW``), else on the ``PATH``; where there is
none, the tests that need it are skipped. Emulators of other clouds are used only where ``STRATALOG_AZURITE`` or
``STRATALOG_FAKE_GCS`` is set, as ``make contract-azure`` and ``make contract-gcs`` do. All take the credentials that this file
puts into the environment.
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import gc
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any, Final

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from xdist.scheduler import LoadFileScheduling

from stratalog_core.files import open_files as files

# Speed is no part of a property: a slow machine must not fail one. CI draws the same examples each time.
hypothesis_settings.register_profile(
    "stratalog",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
hypothesis_settings.load_profile("stratalog")


_FRESH_SEED = "STRATALOG_FRESH_SEED"


def _seed_of_commit() -> int:
    """A number that is the same in all test runs of a commit, so that a failure repeats; random outside a Git repository."""
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    head = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return int(head.stdout[:7], 16) if head.returncode == 0 else SystemRandom().randrange(2**31)


QUICK_START: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Spark's jobs in tests last seconds: most of their processor time would go into optimizing code that is not run again."""
_SPARK_CLASSES: Final = Path(__file__).parents[1] / ".venv" / ".spark.jsa"
"""What ``spark_classes.py`` writes while the first tests of ``make test`` run; without it Spark only starts more slowly."""
_PORTS: Final = (20000, 31999)
_STDERR: Final = pytest.StashKey[int]()
_GC_THRESHOLDS: Final = (20_000, 20, 20)
"""Collect less often than by default: most tests leave little garbage, and tests about garbage call ``gc.collect``."""
_HANG_S: Final = 120.0
"""A test process ends this long after the limit of a test that does not end."""


def pytest_configure(config: pytest.Config) -> None:
    """Put the fresh seed into the environment, which all worker processes of this test run inherit, unless it is given."""
    if not os.environ.get(_FRESH_SEED):
        os.environ[_FRESH_SEED] = str(_seed_of_commit())
    config.stash[_STDERR] = os.dup(2)  # During tests, pytest captures what descriptor 2 gets.
    classes = f" -Xlog:disable -XX:SharedArchiveFile={_SPARK_CLASSES}" if _SPARK_CLASSES.exists() else ""
    os.environ.setdefault("SPARK_SUBMIT_OPTS", QUICK_START + classes)
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", QUICK_START)
    os.environ["STRATALOG_LOCAL_PORTS"] = _ports_of_this_worker()


def _ports_of_this_worker() -> str:
    """Return a range of its own for each process of pytest-xdist, because a server's port is chosen before it is used."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first, last = _PORTS
    count = (last - first + 1) // workers
    begin = first + count * int(worker.removeprefix("gw"))
    return f"{begin}-{begin + count - 1}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _end_if_it_hangs(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    _end_if_it_hangs(item)


def pytest_runtest_logfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


def _end_if_it_hangs(item: pytest.Item) -> None:
    """End the process, with the stacks of all threads, if its test ignores the limit.

    pytest-timeout raises an exception in the main thread: uvloop logs and drops it, a clean-up may wait after it without limit,
    and native code does not see it.
    """
    marker, config = item.get_closest_marker("timeout"), item.config
    limit_s = float(marker.args[0] if marker is not None else config.getoption("timeout") or config.getini("timeout"))
    faulthandler.dump_traceback_later(limit_s + _HANG_S, exit=True, file=config.stash[_STDERR])


ALONE: Final = ("chaos",)
"""Folders whose tests use all cores or end processes at times that they measure."""
CLUSTERS: Final = ("integration", "valid_requests")
"""Folders whose tests start clusters and Java: three at once, each with ports of its own. Those that measure are ``alone``."""
COMPUTES: Final = ("simulation",)
"""Folders whose tests take processor time only: their clocks are simulated, so that they may run beside any other test."""


LONGEST_FIRST: Final = (
    "integration/test_guides.py",
    "integration/test_backfill.py",
    "integration/test_kafka_tools.py",
    "integration/test_bench.py",
    "integration/test_main_job.py",
    "integration/test_spark_writes.py",
    "integration/test_exactly_once_spark.py",
    "integration/test_spark_at_size.py",
    "integration/test_cost_on_minio.py",
    "integration/test_bench_cold.py",
    "integration/test_metadata_restored.py",
    "integration/test_restore.py",
    "integration/test_compact_history.py",
    "integration/test_attach.py",
    "integration/test_consumer_protocol.py",
    "integration/test_locked_history.py",
    "integration/test_containers.py",
    "valid_requests/test_valid_requests.py",
    "integration/test_crashes.py",
    "integration/test_all_in_one.py",
    "integration/test_kafka_streams.py",
    "integration/test_scan_with_brokers.py",
    "integration/test_spark_kafka_connector.py",
    "pipeline/spark/test_spark.py",
    "contract/test_object_store.py",
    "contract/test_s3_broken_answers.py",
    "partitions/test_takeover.py",
    "node/test_quorum.py",
    "pipeline/spark/test_job_command.py",
    "handlers/test_fetch_from_replicas.py",
    "cli/test_cli_command.py",
    "contract/test_versions_and_locks.py",
    "worker/test_locked_history.py",
    "client/test_ledger_client.py",
    "reads/test_compacted_topics.py",
    "groups/test_consumer_protocol_clients.py",
    "worker/test_requests_of_a_long_history.py",
    "pipeline/test_bucket.py",
    "worker/test_deleted_topics.py",
    "transactions/test_transactional_clients.py",
    "cli/test_cli_records.py",
    "simulation/test_simulation.py",
    "maintenance/test_history_over_time.py",
    "copies/test_altered_objects.py",
)
"""Files that take a quarter of a minute and more: a worker that took one last would still run it when the others have ended."""
APART: Final = ("integration/test_guides.py",)
"""Files whose tests share nothing, so that each may go to another worker."""


def _rank(file: str) -> int:
    return next((rank for rank, each in enumerate(LONGEST_FIRST) if file.endswith(each)), len(LONGEST_FIRST))


class _ByFile(LoadFileScheduling):  # type: ignore[misc]
    """Sends a whole file to one worker, for its fixtures, except files that are ``APART``."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return nodeid if file.endswith(APART) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return _ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _rank(item.path.as_posix()))
    for item in items:
        if item.path.parent.name in ALONE:
            item.add_marker(pytest.mark.alone)
        elif item.path.parent.name in CLUSTERS and item.get_closest_marker("alone") is None:
            item.add_marker(pytest.mark.clusters)
        if item.path.parent.name == "integration":
            # Our code runs in other processes: sockets here are those of clients, and kafka-python leaves some open.
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))
        if "/unit/broker/" in item.path.as_posix():
            # librdkafka reconnects while a cluster ends: the loop may close between accepting a socket and serving it.
            unserved = "ignore:unclosed transport <_SelectorSocketTransport:ResourceWarning"
            item.add_marker(pytest.mark.filterwarnings(unserved))
        if item.path.parent.name in COMPUTES:
            item.add_marker(pytest.mark.computes)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of whose tests ``-m`` selects none: to import all of them takes half a minute."""
    if collection_path.suffix != ".py":
        return None
    folder, text = collection_path.parent.name, collection_path.read_text()
    selected = {
        "alone": folder in ALONE or "mark.alone" in text,
        "clusters": folder in CLUSTERS,
        "computes": folder in COMPUTES or "mark.computes" in text,
        "not alone and not clusters and not computes": folder not in (*ALONE, *CLUSTERS, *COMPUTES),
    }
    return None if selected.get(config.option.markexpr, True) else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt modules and collected tests from garbage collection, which took a quarter of the tests' processor time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        gc.enable()


def pytest_report_header() -> str:
    return f"fresh seeds of the simulator and the mutants: {_FRESH_SEED}={os.environ[_FRESH_SEED]} draws the same"


@pytest.fixture(scope="session")
def fresh_seed() -> int:
    """Another one for each commit, printed first; ``STRATALOG_FRESH_SEED`` overrides it."""
    return int(os.environ[_FRESH_SEED])


@pytest.fixture(autouse=True, scope="session")
def patient_submits() -> Iterator[None]:
    """A file goes over to threads once the kernel was slow to begin; here what was slow may be the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_SUBMIT_S_MAX", 60.0)
        yield


FAKE_GCS: Final = "STRATALOG_FAKE_GCS"
"""The variable that holds the path of fake-gcs-server."""
AZURITE: Final = "STRATALOG_AZURITE"
"""The variable that holds the path of Azurite's blob service."""
SERVER_STARTS_S: Final = 120.0
"""Limit for the start and the end of a server: Azurite took more than 30 s on a machine that did other work."""
AZURE_ACCOUNT: Final = "stratalogtest"
AZURE_KEY: Final = base64.b64encode(b"a key for tests only").decode()
ACCESS_KEY = "stratalog-test"
SECRET_KEY = "stratalog-test-secret"
KMS_KEY = "stratalog-test-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """A running server; ``make_bucket`` gives a fresh bucket's store URL."""

    name: str
    endpoint: str

    def make_bucket(self, bucket: str) -> str:
        """Create a bucket; returns its URL for ``open_store``."""
        import boto3
        from botocore.config import Config

        with contextlib.closing(
            boto3.client(
                "s3", endpoint_url=self.endpoint, region_name="us-east-1", config=Config(retries={"total_max_attempts": 5})
            )
        ) as client:
            client.create_bucket(Bucket=bucket)
        return f"s3://{bucket}?endpoint={self.endpoint}&region=us-east-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureServer:
    """A running Azurite; ``make_bucket`` gives a fresh container's store URL."""

    endpoint: str

    def make_bucket(self, container: str) -> str:
        """Create a container; returns its URL for ``open_store``."""
        import urllib3

        from stratalog_tiering.store.azure_requests import VERSION, signed_headers

        url = f"{self.endpoint}/{container}?restype=container"
        headers = signed_headers("PUT", url, {"x-ms-version": VERSION}, AZURE_ACCOUNT, base64.b64decode(AZURE_KEY))
        with urllib3.PoolManager() as pool:
            answer = pool.request("PUT", url, headers=headers)
        assert answer.status == 201, answer.data
        return f"az://{container}?endpoint={self.endpoint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsServer:
    """A running emulator of Google Cloud Storage; ``make_bucket`` gives a fresh bucket's store URL."""

    endpoint: str

    def make_bucket(self, bucket: str, **settings: Any) -> str:
        """Create a bucket with the settings of the JSON interface; returns its URL for ``open_store``."""
        import urllib3

        with urllib3.PoolManager() as pool:
            answer = pool.request("POST", f"{self.endpoint}/storage/v1/b?project=test", json={"name": bucket, **settings})
        assert answer.status == 200, answer.data
        return f"gs://{bucket}?endpoint={self.endpoint}"


def _binary(variable: str, name: str) -> str:
    found = os.environ.get(variable) or shutil.which(name)
    if not found or not os.access(found, os.X_OK):
        pytest.skip(f"no {name}: set {variable} to its binary (make tools builds it)")
    return found


def _free_port() -> int:
    """Return a port that no other process takes before the server has it: one of this worker's range."""
    from stratalog.local.ports import free_ports

    (port,) = free_ports(1)
    return port


@contextlib.contextmanager
def _running(name: str, port: int, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[S3Server]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent
        )
        try:
            _wait_until_listening(process, port, log)
            yield S3Server(name=name, endpoint=f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait(SERVER_STARTS_S)


def _wait_until_listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + SERVER_STARTS_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}: {log.read_text()[-2000:]}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server does not listen on {port}: {log.read_text()[-2000:]}")


@pytest.fixture(scope="session")
def s3_credentials() -> Iterator[None]:
    """Credentials of the test servers in the environment, where every S3 client looks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


@pytest.fixture(scope="session")
def minio_server(s3_credentials: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real MinIO on one directory."""
    binary, port, directory = _binary("STRATALOG_MINIO", "minio"), _free_port(), tmp_path_factory.mktemp("minio")
    environment = {
        "MINIO_ROOT_USER": ACCESS_KEY,
        "MINIO_ROOT_PASSWORD": SECRET_KEY,
        "MINIO_BROWSER": "off",
        # A key for server-side encryption.
        "MINIO_KMS_SECRET_KEY": f"{KMS_KEY}:{base64.b64encode(bytes(32)).decode()}",
    }
    command = [binary, "server", "--quiet", "--address", f"127.0.0.1:{port}", str(directory / "data")]
    with _running("minio", port, command, environment, directory / "log") as server:
        yield server


@pytest.fixture(scope="session")
def versitygw_server(s3_credentials: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real versitygw over a directory: the second implementation."""
    binary, port, directory = _binary("STRATALOG_VERSITYGW", "versitygw"), _free_port(), tmp_path_factory.mktemp("versitygw")
    for name in ("data", "versions"):
        (directory / name).mkdir()
    environment = {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
    backend = ["posix", "--versioning-dir", str(directory / "versions"), str(directory / "data")]
    command = [binary, "--port", f"127.0.0.1:{port}", *backend]
    with _running("versitygw", port, command, environment, directory / "log") as server:
        yield server


@pytest.fixture(scope="session")
def moto_server(s3_credentials: None) -> Iterator[S3Server]:
    """moto in threads of this process: no real server, good for a smoke run of the API only."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Server(name="moto", endpoint=f"http://{host}:{port}")
    finally:
        server.stop()


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """A real fake-gcs-server, an emulator of Google Cloud Storage, in memory."""
    command = [os.environ[FAKE_GCS], "-scheme", "http", "-host", "127.0.0.1"]
    port, directory = _free_port(), tmp_path_factory.mktemp("gcs")
    command += ["-port", str(port), "-backend", "memory", "-log-level", "error"]
    command += ["-public-host", "127.0.0.1"]  # any port: requests through a proxy name the proxy's
    with _running("gcs", port, command, {}, directory / "log") as server:
        yield GcsServer(endpoint=server.endpoint)


@pytest.fixture(scope="session")
def azure_credentials() -> Iterator[None]:
    """The key of Azurite's account in the environment, and nothing else of Azure."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AZURE_")]:
            patch.delenv(name)
        patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY)
        yield


@pytest.fixture(scope="session")
def azurite_server(azure_credentials: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    """A real Azurite, the emulator of Azure Blob Storage, on one directory."""
    port, directory = _free_port(), tmp_path_factory.mktemp("azurite")
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(directory / "data"), "--silent"]
    environment = {"AZURITE_ACCOUNTS": f"{AZURE_ACCOUNT}:{AZURE_KEY}"}
    command = [os.environ[AZURITE], *options, "--disableTelemetry"]
    with _running("azurite", port, command, environment, directory / "log") as server:
        yield AzureServer(endpoint=f"{server.endpoint}/{AZURE_ACCOUNT}")
