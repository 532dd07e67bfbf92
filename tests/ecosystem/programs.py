"""Builds the client programs in a cache outside the tree, from the sources here and pinned libraries from the registries.

Lock files stay in the cache. A toolchain that is not installed is an error that names it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from stratalog_loadgen.java_tools import class_path

SOURCES: Final = Path(__file__).parent / "clients"
GO_MODULES: Final = {
    "github.com/twmb/franz-go": "v1.22.2",
    "github.com/twmb/franz-go/pkg/kadm": "v1.19.0",
    "github.com/IBM/sarama": "v1.61.1",
    "github.com/segmentio/kafka-go": "v0.4.51",
}
NODE_PACKAGES: Final = {
    "kafkajs": {"kafkajs": "2.2.4", "kafkajs-snappy": "1.1.0", "lz4-napi": "2.10.0", "@mongodb-js/zstd": "1.2.2"},
    "confluent": {"@confluentinc/kafka-javascript": "1.10.1"},
}
CRATES: Final = {"rdkafka": ("0.39.0", ["zstd"]), "tokio": ("1.48.0", ["rt-multi-thread", "time"])}
CONFLUENT_PYTHON_VERSION: Final = "2.16.1"
_CONFLUENT_EXTRAS: Final = "schemaregistry,avro,json,protobuf"
KAFKA_PYTHON_VERSION: Final = "3.0.12"
_NOT_IN_KAFKA_PYTHON: Final = {
    "__init__.py": "",
    "service.py": "class SpawnedService: ...\nclass ExternalService:\n    def __init__(self, host, port): ...\n",
}
"""Modules that the tests import and its source distribution lacks. Without the first, Python finds its own package ``test``;
the second starts processes, of which there are none if the brokers run already."""
APICURIO_VERSION: Final = "3.0.9"
"""The newest line that runs with Java 17."""
_MANIFEST: Final = """[package]
name = "ecosystem"
version = "0.0.0"
edition = "2021"

[[bin]]
name = "ecosystem"
path = "main.rs"

[dependencies]
"""
_BUILD_TIMEOUT_S: Final = 1800


class Missing(Exception):
    """A toolchain is not installed, or a build failed; says which."""


def go_program(name: str) -> list[str]:
    """The command of a Go client."""
    go = tool("go", "install Go")
    root, is_new = _folder("go", json.dumps(GO_MODULES), SOURCES / "go")
    if is_new:
        _run([go, "mod", "init", "ecosystem"], root)
        _run([go, "get", *(f"{module}@{version}" for module, version in GO_MODULES.items())], root)
        _complete(root)
    binary = root / "bin" / name
    _run([go, "build", "-o", str(binary), f"./{name}"], root)
    return [str(binary)]


def node_program(name: str) -> list[str]:
    """The command of a JavaScript client.

    Confluent's client is built from the sources in its package, against the system's headers of Node.js and zstd: the binary
    that it would download is in no registry.
    """
    npm, node = tool("npm", "install Node.js with npm"), tool("node", "install Node.js")
    prefix = Path(node).resolve().parents[1]
    root, is_new = _folder("node", json.dumps(NODE_PACKAGES[name]), SOURCES / "node")
    if is_new:
        if name == "confluent":
            _require(prefix / "include" / "node" / "node_api.h", "install Node.js's headers")
            _require(Path("/usr/include/zstd.h"), "apt-get install libzstd-dev")
        (root / "package.json").write_text('{"private": true}')
        packages = [f"{package}@{version}" for package, version in NODE_PACKAGES[name].items()]
        # Two jobs of make would build the client before the library that it links to.
        build = {"npm_config_nodedir": str(prefix), "CKJS_LINKING": "dynamic", "JOBS": "1", "MAKEFLAGS": ""}
        _run([npm, "install", "--no-package-lock", "--no-audit", "--no-fund", *packages], root, build)
        _complete(root)
    return [node, str(root / f"{name}.js")]


def _require(file: Path, remedy: str) -> None:
    if not file.exists():
        raise Missing(f"no {file}: {remedy}")


def rust_program() -> list[str]:
    """The command of the Rust client."""
    cargo = tool("cargo", "install Rust")
    root, is_new = _folder("rust", json.dumps(CRATES), SOURCES / "rust")
    if is_new:
        (root / "Cargo.toml").write_text(_MANIFEST + "".join(map(_dependency, CRATES)))
        _complete(root)
    _run([cargo, "build", "--quiet"], root)
    return [str(root / "target" / "debug" / "ecosystem")]


def java_program() -> list[str]:
    """The command of Java's client, which Java compiles at its start."""
    options = ["-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=off"]
    java = tool("java", "install Java 17 or newer")
    return [java, *options, "-cp", class_path(), str(SOURCES / "java" / "JavaClient.java")]


def confluent_python() -> str:
    """The Python of an environment that has confluent-kafka with its serializers."""
    root, is_new = _folder("python", CONFLUENT_PYTHON_VERSION, None)
    python = root / "environment" / "bin" / "python"
    if is_new:
        _run([sys.executable, "-m", "venv", "environment"], root)
        wanted = f"confluent-kafka[{_CONFLUENT_EXTRAS}]=={CONFLUENT_PYTHON_VERSION}"
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted], root)
        _complete(root)
    return str(python)


def _dependency(crate: str) -> str:
    version, features = CRATES[crate]
    return f"{crate} = {{ version = '={version}', features = {features} }}\n"


def kafka_python_tests() -> Path:
    """The unpacked source distribution of kafka-python, with its tests."""
    root, is_new = _folder("kafka-python", KAFKA_PYTHON_VERSION, None)
    if is_new:
        wanted = f"kafka-python=={KAFKA_PYTHON_VERSION}"
        options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--dest", "."]
        _run([sys.executable, "-m", "pip", "download", *options, wanted], root)
        _unpack(root)
        tests = next(root.glob("*/test"))
        for name, content in _NOT_IN_KAFKA_PYTHON.items():
            (tests / name).write_text(content)
        _complete(root)
    return next(each for each in root.iterdir() if each.is_dir())


def apicurio() -> Path:
    """The jar of Apicurio Registry, from Maven."""
    root, is_new = _folder("apicurio", APICURIO_VERSION, None)
    if is_new:
        artifact = f"io.apicurio:apicurio-registry-app:{APICURIO_VERSION}:tar.gz:all"
        goal = ["dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={root}"]
        _run([tool("mvn", "apt-get install maven"), "-B", "-q", *goal], root)
        _unpack(root)
        _complete(root)
    return root / f"apicurio-registry-app-{APICURIO_VERSION}-runner.jar"


def _unpack(root: Path) -> None:
    with tarfile.open(next(root.glob("*.tar.gz"))) as archive:
        archive.extractall(root, filter="data")


def tool(name: str, remedy: str) -> str:
    """Return the path of a program. Raises ``Missing``."""
    path = shutil.which(name)
    if path is None:
        raise Missing(f"no {name}: {remedy}")
    return path


def cache(kind: str) -> Path:
    """Folder of built things of a kind."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stratalog" / "ecosystem" / kind


def _folder(kind: str, versions: str, sources: Path | None) -> tuple[Path, bool]:
    """Return the folder of these versions, with a copy of any sources, and whether the libraries are still to be installed."""
    root = cache(kind) / hashlib.sha256(versions.encode()).hexdigest()[:16]
    is_new = not (root / "complete").exists()
    if is_new:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
    if sources:
        shutil.copytree(sources, root, dirs_exist_ok=True)
    return root, is_new


def _complete(root: Path) -> None:
    (root / "complete").touch()


def _run(command: Sequence[str], directory: Path, environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        command, cwd=directory, env=dict(os.environ) | dict(environment or {}), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_BUILD_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise Missing(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
