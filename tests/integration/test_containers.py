"""docker-compose.yml, checked by Compose's own loader and run as processes with exactly the environment of its services."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from stratalog_core.errors import NotFound
from stratalog_core.http.settings import DEFAULT_PORTS

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?::([-?])([^}]*))?\})")


def dot_env() -> dict[str, str]:
    lines = (ROOT / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    """Return ``value`` with ``${NAME:-default}`` and ``${NAME:?message}`` replaced recursively. Raises ``NotFound``."""

    def replace(found: re.Match[str]) -> str:
        dollar, name, kind, text = found.groups()
        if dollar:
            return "$"
        if not variables.get(name) and kind == "?":
            raise NotFound(text)
        return variables.get(name) or (text or "")

    if isinstance(value, dict):
        return {key: interpolated(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [interpolated(each, variables) for each in value]
    return _VARIABLE.sub(replace, value) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def project(compose_loader: str) -> dict[str, Any]:
    """The file as Compose's loader validates and normalises it; variables are not replaced yet."""
    checked = subprocess.run(
        [compose_loader, "-no-interpolation", "-format", "json", str(COMPOSE_FILE)], cwd=ROOT, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr.decode()
    loaded: dict[str, Any] = json.loads(checked.stdout)
    return loaded


def test_missing_secrets_name_the_remedy(project: dict[str, Any]) -> None:
    for name in ("MINIO_ROOT_PASSWORD", "AWS_SECRET_ACCESS_KEY"):
        with pytest.raises(NotFound, match=re.escape("cp .env.example .env")):
            interpolated(project, {**dot_env(), name: ""})


def test_prometheus_reaches_every_role_where_the_guide_says(project: dict[str, Any]) -> None:
    guide = (ROOT / "docs" / "how-to" / "monitor.md").read_text()
    (block,) = re.findall(r"```yaml\n(scrape_configs.*?)```", guide, re.DOTALL)
    targets = yaml.safe_load(block)["scrape_configs"][0]["static_configs"][0]["targets"]
    environments = {name: service.get("environment") or {} for name, service in project["services"].items()}
    listens = {name: each["STRATALOG_HTTP_LISTEN"] for name, each in environments.items() if "STRATALOG_HTTP_LISTEN" in each}
    assert sorted(listens.values()) == sorted(targets)
    assert all(address.startswith(f"{name}:") for name, address in listens.items())
    assert {name.split("-")[0]: int(listens[name].split(":")[1]) for name in listens} == {
        role: port for role, port in DEFAULT_PORTS.items() if role != "stratalog"
    }


class Composition:
    """The services, running in their own namespaces."""

    def __init__(self, supervisor: subprocess.Popen[str]) -> None:
        self._supervisor = supervisor

    def run(self, service: str, *command: str) -> str:
        """Run ``docker compose run --rm SERVICE COMMAND…``; return the stdout of a command that must succeed."""
        return self._ask(service, list(command))

    def on_host(self, *command: str) -> str:
        """Run a command on the machine whose ports the services publish."""
        return self._ask("", list(command))

    def _ask(self, service: str, command: list[str]) -> str:
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.write(json.dumps({"service": service, "command": command}) + "\n")
        self._supervisor.stdin.flush()
        answer = json.loads(self.line())
        assert answer["code"] == 0, answer
        return str(answer["stdout"])

    def line(self) -> str:
        assert self._supervisor.stdout is not None
        return self._supervisor.stdout.readline()


@pytest.fixture(scope="module")
def composition(project: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composition]:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--user", "--net", "true"], check=False).returncode:
        pytest.skip("this machine lets no process make namespaces")
    directory = tmp_path_factory.mktemp("composition")
    config = directory / "project.json"
    config.write_text(json.dumps(interpolated(project, dot_env())))
    script = str(Path(__file__).with_name("compose_network.py"))
    namespaces = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    command = [*namespaces, sys.executable, script, "supervise", str(config), str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as supervisor:
        running = Composition(supervisor)
        try:
            assert running.line() == "ready\n", f"see {directory}"
            yield running
        finally:
            assert supervisor.stdin is not None
            supervisor.stdin.close()
            killed = running.line()
        assert json.loads(killed) == {"killed": []}, "every service stops within its grace period"


def test_commands_clients_and_spark_use_the_composed_cluster(composition: Composition) -> None:
    composition.run("stratalog", "topic", "create", "events", "--partitions", "2")
    bootstrap = ["--bootstrap", "localhost:9092,localhost:9093"]
    records = "".join(f"k{number}:v{number}\n" for number in range(100))
    pipe = f"printf '{records}' | {sys.executable} -m stratalog produce events --key-separator : {' '.join(bootstrap)}"
    composition.on_host("sh", "-c", pipe)
    read = composition.run("stratalog", "consume", "events", "--count", "100", "--group", "readers")
    assert sorted(read.split()) == sorted(f"v{number}" for number in range(100))
    composition.run("stratalog", "tier", "offload", "events", "--wait", "--delete-hot")
    assert "events" in composition.run("stratalog", "tier", "verify", "events")
    rows = re.findall(r"\|\s*(\d+)\|\s*(\d+)\|\s*(\d+)\|\s*(\d+)\|", composition.run("spark", "count_records.py", "events"))
    assert [int(partition) for partition, *_ in rows] == [0, 1]
    assert sum(int(count) for _, count, *_ in rows) == 100


def test_clients_on_the_host_are_told_the_published_addresses(composition: Composition) -> None:
    script = (
        "import sys; from confluent_kafka.admin import AdminClient;"
        "m = AdminClient({'bootstrap.servers': sys.argv[1]}).list_topics(timeout=60);"
        "print(sorted(f'{b.host}:{b.port}' for b in m.brokers.values()))"
    )
    told = composition.on_host(sys.executable, "-c", script, "localhost:9092")
    assert told.strip() == "['localhost:9092', 'localhost:9093']"
