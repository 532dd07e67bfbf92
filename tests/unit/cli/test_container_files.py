"""Dockerfiles and docker-compose.yml, checked without a container engine."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from stratalog.app import stratalog
from stratalog.roles.node import NodeSettings
from stratalog_bookies.config import BookieSettings
from stratalog_broker.config import BrokerSettings
from stratalog_core.config import load
from stratalog_metadata.config import MetadataSettings
from stratalog_tiering.config import TieringSettings

ROOT = Path(__file__).parents[3]
COMPOSE = ROOT / "docker-compose.yml"
ROLES = {"metadata": "metadata", "bookies": "bookie", "broker": "broker", "tiering": "tiering"}
DOCKERFILES = sorted(ROOT.glob("*/Dockerfile"))
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


def _build_stage(dockerfile: Path) -> str:
    return dockerfile.read_text().split("\n\n")[0].split("\n", 1)[1]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_every_source_that_is_copied_exists(dockerfile: Path) -> None:
    for name, rest in _instructions(dockerfile):
        if name == "COPY" and "--from=" not in rest:
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_every_image_is_pinned_and_runs_without_privileges(dockerfile: Path) -> None:
    instructions = _instructions(dockerfile)
    bases = [rest.split()[0] for name, rest in instructions if name == "FROM"]
    assert all(re.search(r":\d", base) for base in bases), bases
    users = [rest for name, rest in instructions if name == "USER"]
    assert users, "the last stage names a user"
    assert "root" not in users


@pytest.mark.parametrize(("folder", "role"), ROLES.items())
def test_the_entry_point_is_the_role(folder: str, role: str) -> None:
    (entry_point,) = [rest for name, rest in _instructions(ROOT / folder / "Dockerfile") if name == "ENTRYPOINT"]
    program, command = json.loads(entry_point)
    assert program == "/opt/stratalog/bin/stratalog"
    assert command == role
    assert command in stratalog.list_commands(click.Context(stratalog))


def test_roles_are_built_alike_so_that_their_layers_are_shared() -> None:
    assert len({_build_stage(ROOT / folder / "Dockerfile") for folder in ROLES}) == 1


def test_compose_starts_what_the_architecture_names() -> None:
    counts = {
        role: sum(name.startswith(f"{role}-") for name in _services()) for role in ("metadata", "bookie", "broker", "tiering")
    }
    assert counts == {"metadata": 3, "bookie": 3, "broker": 2, "tiering": 1}
    assert _services()["spark"]["profiles"] == ["spark"]


@pytest.mark.parametrize(("name", "service"), _services().items())
def test_a_service_is_built_here_or_pinned(name: str, service: dict[str, Any]) -> None:
    if "build" in service:
        assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    else:
        assert re.search(r":[\w.-]*\d", service["image"])
    assert set(service.get("depends_on", ())) <= set(_services())


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


def test_the_bucket_bootstrap_is_a_shell_script_with_valid_documents() -> None:
    subprocess.run(["sh", "-n", str(ROOT / "minio" / "bootstrap.sh")], check=True)
    policy = json.loads((ROOT / "minio" / "policy.json").read_text())
    assert all("stratalog" in resource for statement in policy["Statement"] for resource in statement["Resource"])
    lifecycle = json.loads((ROOT / "minio" / "lifecycle.json").read_text())
    assert not any("AbortIncompleteMultipartUpload" in rule for rule in lifecycle["Rules"]), "MinIO refuses or drops it"


def test_minio_is_the_version_that_the_tests_run_against() -> None:
    (version,) = re.findall(r"MINIO_VERSION := (\S+)", (ROOT / "Makefile").read_text())
    assert f"github.com/minio/minio@{version}" in (ROOT / "minio" / "Dockerfile").read_text()
