"""Dockerfiles and docker-compose.yml, checked without a container engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from stratalog.app import stratalog
from stratalog.roles.node import NodeSettings
from stratalog_bookies.config import BookieSettings
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_core.config import load
from stratalog_metadata.node.config import MetadataSettings
from stratalog_tiering.config import TieringSettings

ROOT = Path(__file__).parents[3]
COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILES = [ROOT / "Dockerfile", ROOT / "minio" / "Dockerfile"]
SETTINGS = {
    "node": NodeSettings,
    "metadata": MetadataSettings,
    "bookie": BookieSettings,
    "broker": BrokerSettings,
    "tiering": TieringSettings,
}


def _instructions(dockerfile: Path) -> list[tuple[str, str]]:
    lines = (line.strip() for line in dockerfile.read_text().splitlines())
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines if line and not line.startswith("#")]


def _services() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return services


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_every_source_that_is_copied_exists(dockerfile: Path) -> None:
    for name, rest in _instructions(dockerfile):
        if name == "COPY" and "--from=" not in rest:
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_every_image_is_pinned_and_runs_without_privileges(dockerfile: Path) -> None:
    instructions = _instructions(dockerfile)
    stages = {rest.split()[2] for name, rest in instructions if name == "FROM" and " AS " in rest}
    bases = [rest.split()[0] for name, rest in instructions if name == "FROM" and rest.split()[0] not in stages]
    assert all(re.search(r":\d+\.\d", base) for base in bases), bases
    users = [rest for name, rest in instructions if name == "USER"]
    assert users, "the last stage names a user"
    assert "root" not in users


def test_every_command_of_a_service_exists() -> None:
    for service in _services().values():
        for command in (service.get("command"), (service.get("healthcheck") or {}).get("test", [])[2:]):
            if command and service["image"] == "stratalog:local":
                assert command[0] in stratalog.list_commands(click.Context(stratalog))


def test_compose_starts_what_the_architecture_names() -> None:
    counts = {
        role: sum(name.startswith(f"{role}-") for name in _services()) for role in ("metadata", "bookie", "broker", "tiering")
    }
    assert counts == {"metadata": 3, "bookie": 3, "broker": 2, "tiering": 1}
    assert _services()["spark"]["profiles"] == ["spark"]


@pytest.mark.parametrize(("name", "service"), _services().items())
def test_a_service_is_built_here(name: str, service: dict[str, Any]) -> None:
    assert service["image"].endswith(":local"), f"{name} would be pulled from a registry that may stop serving it"
    assert "build" in service
    assert set(service.get("depends_on", ())) <= set(_services())


def test_everything_that_serves_has_a_health_check_and_time_to_stop() -> None:
    for name, service in _services().items():
        if service.get("restart") == "unless-stopped":
            assert service["healthcheck"]["test"], name
            assert int(service["stop_grace_period"].removesuffix("s")) > NodeSettings().stop_timeout_s, name


@pytest.mark.parametrize(("name", "service"), _services().items())
def test_its_environment_is_what_the_settings_know(name: str, service: dict[str, Any]) -> None:
    environment = service.get("environment", {})
    for section, cls in SETTINGS.items():
        mine = {key: value for key, value in environment.items() if key.startswith(f"STRATALOG_{section.upper()}_")}
        if mine:
            load(cls, section=section, environ=mine)


def test_secrets_have_no_defaults() -> None:
    for service in _services().values():
        for name, value in service.get("environment", {}).items():
            if "SECRET" in name or "PASSWORD" in name:
                assert re.fullmatch(r"\$\{\w+:\?[^}]+\}", value), name


def test_the_example_has_every_secret_that_is_asked_for() -> None:
    wanted = set(re.findall(r"\$\{(\w+):\?", COMPOSE.read_text()))
    example = dict(line.split("=", 1) for line in (ROOT / ".env.example").read_text().splitlines() if "=" in line)
    assert all(len(example[name]) >= 8 for name in wanted)


def test_minio_is_the_version_that_the_tests_run_against() -> None:
    (version,) = re.findall(r"MINIO_VERSION := (\S+)", (ROOT / "Makefile").read_text())
    assert f"github.com/minio/minio@{version}" in (ROOT / "minio" / "Dockerfile").read_text()
