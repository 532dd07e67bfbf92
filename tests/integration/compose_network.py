"""Runs the services of docker-compose.yml as processes, in an environment like that of Compose, its network and volumes.

One user and network namespace stands for the network: every service has its own loopback address, to which its name resolves.
Every process gets its own root directory, made of bind mounts, with the image's files, the service's volumes, and exactly the
environment of image and service. Entry points, commands, health checks and dependencies are Compose's own (the file as
Compose's own loader checks and normalises it). Not covered: how the images are built, their users, and the engine's port
mapping.

``python compose_network.py supervise CONFIG.json DIRECTORY`` (within ``unshare --user --map-root-user --net --mount``) starts
the services, prints ``ready``, then takes one JSON line for each command, and stops everything at the end of its input.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
_MOUNTED: Final = ("bin", "dev", "etc", "lib", "lib64", "proc", "root", "sbin", "sys", "tmp", "usr", "home")
_BASE_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START_TIMEOUT_S: Final = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The settings of a Dockerfile's stage for running its containers."""

    entry_point: list[str]
    environment: dict[str, str]
    directory: str


def read_image(dockerfile: Path, target: str | None) -> Image:
    """Return the stage ``target`` (default: the last one), including the settings that it inherits from its base stages."""
    entry_point: dict[str, list[str]] = {}
    environment: dict[str, dict[str, str]] = {}
    directory: dict[str, str] = {}
    stage = ""
    for line in dockerfile.read_text().splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            words = rest.split()
            below, stage = words[0], words[2] if len(words) == 3 else "last"
            entry_point[stage] = entry_point.get(below, [])
            environment[stage] = dict(environment.get(below, {"PATH": _BASE_PATH}))
            directory[stage] = directory.get(below, "/")
        elif name == "ENTRYPOINT":
            entry_point[stage] = json.loads(rest)
        elif name == "ENV":
            for key, value in (pair.split("=", 1) for pair in rest.split()):
                environment[stage][key] = value.replace(f"${key}", environment[stage].get(key, ""))
        elif name == "WORKDIR":
            directory[stage] = rest
    chosen = target or stage
    return Image(entry_point=entry_point[chosen], environment=environment[chosen], directory=directory[chosen])


class Network:
    """All services of one project; start order, health and exit as Compose defines them."""

    def __init__(self, project: dict[str, Any], directory: Path) -> None:
        self._services: dict[str, dict[str, Any]] = project["services"]
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._healthy: set[str] = set()
        self._last_checks: dict[str, dict[str, Any]] = {}

    def prepare(self) -> None:
        """Bring up the loopback interface and write a name for every service."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: up, running
        lines = [f"127.0.1.{number} {name}" for number, name in enumerate(self._services, 1)]
        (self._directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")

    def up(self) -> None:
        """Start everything without a profile; return when each service is healthy or has completed."""
        wanted = [name for name, service in self._services.items() if not service.get("profiles")]
        deadline = time.monotonic() + _START_TIMEOUT_S
        while waiting := [name for name in wanted if not self._is_done(name)]:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"not healthy: {', '.join(waiting)}; see {self._directory}; last checks: {self._last_checks}"
                )
            for name in waiting:
                if name not in self._processes and self._may_start(name):
                    self._start(name)
                elif name in self._processes:
                    self._look_at(name)
            time.sleep(0.3)

    def _may_start(self, name: str) -> bool:
        return all(self._is_done(needed) for needed in self._services[name].get("depends_on", {}))

    def _is_done(self, name: str) -> bool:
        completes = any(
            service.get("depends_on", {}).get(name, {}).get("condition") == "service_completed_successfully"
            for service in self._services.values()
        )
        process = self._processes.get(name)
        return process is not None and (process.poll() == 0 if completes else name in self._healthy)

    def _start(self, name: str) -> None:
        with (self._directory / f"{name}.log").open("wb") as log:
            command = self._services[name].get("command") or []
            self._processes[name] = subprocess.Popen(self.inside(name, command), stdout=log, stderr=log)

    def _look_at(self, name: str) -> None:
        code = self._processes[name].poll()
        if code:
            raise ChildProcessError(f"{name} ended with {code}; see {self._directory}/{name}.log")
        if "healthcheck" not in self._services[name]:
            return
        test = self._services[name]["healthcheck"]["test"]
        self._last_checks[name] = self.run(self.inside(name, test[1:], entry_point=[]))
        if self._last_checks[name]["code"] == 0:
            self._healthy.add(name)

    def inside(self, name: str, command: list[str], *, entry_point: list[str] | None = None) -> list[str]:
        """Return the command line that runs ``command`` as in the service's container."""
        service = self._services[name]
        build = service["build"]
        image = read_image(Path(build["context"]) / build["dockerfile"], build.get("target"))
        volumes = {
            volume["target"]: str(self._directory / "volumes" / volume["source"]) for volume in service.get("volumes", ())
        }
        for directory in volumes.values():
            Path(directory).mkdir(parents=True, exist_ok=True)
        spec = {
            "name": name,
            "root": str(self._directory / "root"),
            "hosts": str(self._directory / "hosts"),
            "volumes": volumes,
            "directory": image.directory,
            "environment": {**image.environment, **(service.get("environment") or {})},
            "command": [*(image.entry_point if entry_point is None else entry_point), *command],
        }
        return ["unshare", "--mount", "--uts", sys.executable, __file__, "contain", json.dumps(spec)]

    def run(self, command: list[str]) -> dict[str, Any]:
        """Run a command to its end; return exit code and output."""
        done = subprocess.run(command, capture_output=True, timeout=240, check=False, stdin=subprocess.DEVNULL)
        return {"code": done.returncode, "stdout": done.stdout.decode(), "stderr": done.stderr.decode()}

    def down(self) -> list[str]:
        """Stop everything with SIGTERM, dependents first; return the services that exceeded their grace period."""
        killed = []
        for name in reversed(self._processes):
            process = self._processes[name]
            process.terminate()
            try:
                grace_s = int(re.sub(r"\D", "", self._services[name].get("stop_grace_period", "10s")))
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                killed.append(name)
        return killed


def supervise(project: dict[str, Any], directory: Path) -> None:
    """Run the services and execute commands from standard input; see the module's header."""
    network = Network(project, directory)
    network.prepare()
    try:
        network.up()
        print("ready", flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            command = network.inside(asked["service"], asked["command"]) if asked["service"] else asked["command"]
            print(json.dumps(network.run(command)), flush=True)
    finally:
        killed = network.down()
    print(json.dumps({"killed": killed}), flush=True)


def contain(spec: dict[str, Any]) -> None:
    """Give this process the root directory and the environment of a container, then exec the command."""
    socket.sethostname(spec["name"])
    root = Path(spec["root"])
    root.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "root", str(root))
    for name in _MOUNTED:
        source = Path("/", name)
        if source.is_symlink():
            (root / name).symlink_to(source.readlink())
        elif source.is_dir():
            (root / name).mkdir()
            _mount("--rbind", str(source), str(root / name))
    _mount("--bind", spec["hosts"], str(root / "etc/hosts"))
    _bind_in_place(root, ROOT)
    _install(root)
    for target, source in spec["volumes"].items():
        place = root / target.lstrip("/")
        place.mkdir(parents=True)
        _mount("--bind", source, str(place))
    os.chroot(root)
    Path(spec["directory"]).mkdir(parents=True, exist_ok=True)
    os.chdir(spec["directory"])
    program = os.environ["STRATALOG_MINIO"] if spec["command"][0] == "minio" else spec["command"][0]
    os.execvpe(program, spec["command"], spec["environment"])


def _bind_in_place(root: Path, source: Path) -> None:
    """Bind ``source`` under its own path, unless a mount has it already."""
    place = root / str(source).lstrip("/")
    if not place.exists():
        place.mkdir(parents=True)
        _mount("--rbind", str(source), str(place))


def _install(root: Path) -> None:
    """Install this checkout's virtual environment as /opt/stratalog, like the image."""
    image = root / "opt/stratalog"
    image.mkdir(parents=True)
    for entry in Path(sys.prefix).iterdir():
        (image / entry.name).symlink_to(entry)
    (image / "examples").symlink_to(ROOT / "docs/examples")


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    if sys.argv[1] == "contain":
        contain(json.loads(sys.argv[2]))
    else:
        supervise(json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
