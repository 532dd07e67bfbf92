"""kcat, driven with its command line: it writes and reads with each compression, in a group, and in transactions."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ecosystem.programs import tool
from ecosystem.topics import create

_TIMEOUT_S: Final = 60.0
_CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
_LINES: Final = 200


def run(bootstrap: str, prefix: str, directory: Path) -> dict[str, str]:
    """Return the outcomes by step."""
    program, topic = tool("kcat", "apt-get install kcat"), f"{prefix}-records"
    create(bootstrap, topic, partitions=1)
    outcomes: dict[str, str] = {}
    written: list[str] = []
    for codec in _CODECS:
        lines = [f"{codec} {number}" for number in range(_LINES)]
        _kcat(program, "-P", "-b", bootstrap, "-t", topic, "-z", codec, "-X", "enable.idempotence=true", lines=lines)
        written += lines
        outcomes[f"produce, {codec}"] = "acknowledged"
    read = ("-b", bootstrap, "-q", "-e")
    found = _kcat(program, "-C", *read, "-t", topic, "-o", "beginning")
    outcomes["consume"] = f"{len(found)} records{' in order' if found == written else ''}"
    group = ("-G", f"{prefix}-group", "-X", "auto.offset.reset=earliest", "-c")
    found = _kcat(program, *read, *group, "300", topic)
    found += _kcat(program, *read, *group, str(len(written) - 300), topic)
    outcomes["commit and resume"] = f"{len(found)} records{' in order' if found == written else ''}"
    listed = _kcat(program, "-L", "-b", bootstrap, "-t", topic)
    outcomes["describe it"] = next((line.split('" ')[1] for line in listed if f'topic "{topic}"' in line), "not listed")
    offset = _kcat(program, "-Q", "-b", bootstrap, "-t", f"{topic}:0:-1")
    outcomes["ask for the end"] = offset[0].replace(topic, "topic")
    return outcomes


def _kcat(program: str, *arguments: str, lines: Sequence[str] = ()) -> list[str]:
    done = subprocess.run(
        [program, *arguments],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    return done.stdout.splitlines()
