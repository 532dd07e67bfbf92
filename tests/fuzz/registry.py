"""Fuzz targets by name."""

from __future__ import annotations

from typing import Final

from fuzz.target import Target
from fuzz.targets import batches, bookies, brokers, metadata, ports, settings, tiering

PURE: Final[dict[str, Target]] = {
    target.name: target for module in (batches, bookies, brokers, metadata, settings, tiering) for target in module.TARGETS
}
"""Decoders: bytes in, a value or one of our errors out."""

PORTS: Final[dict[str, Target]] = {target.name: target for target in ports.TARGETS}
"""Real servers in this process, behind real sockets."""

TARGETS: Final[dict[str, Target]] = {**PURE, **PORTS}

MODULES: Final = {
    target.name: module.__name__
    for module in (batches, bookies, brokers, metadata, ports, settings, tiering)
    for target in module.TARGETS
}
"""Where a target is defined."""
