"""``make fuzz``: search by coverage for what breaks a target, and keep what was found.

Each target gets a process of its own, a corpus in a temporary directory, and bounds: seconds for one input, memory, size of an
input. Of what the run found, inputs that reach something new are kept in ``corpus/<target>``, small and few; inputs that break
the target are kept as ``broken-…`` and fail the run, and from then on the ordinary tests, until the product is mended.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from fuzz.registry import MODULES, PURE, TARGETS
from fuzz.target import Target

INPUT_S_MAX: Final = 20
RESIDENT_MIB_MAX: Final = 2048
KEPT_BYTES_MAX: Final = 4096
KEPT_FILES_MAX: Final = 40
_EXECUTIONS: Final = re.compile(r"stat::number_of_executed_units: (\d+)")


def main() -> int:
    arguments = parse_arguments()
    names = [arguments.target] if arguments.target else list(TARGETS)
    broken = [name for name in names if not fuzz(TARGETS[name], arguments.seconds)]
    if broken:
        print(f"broken: {', '.join(broken)}")
    return 1 if broken else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="fuzz ports, formats and objects")
    parser.add_argument("--target", choices=list(TARGETS), help="one of them; all if it is not given")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    return parser.parse_args()


def fuzz(target: Target, seconds: int) -> bool:
    """Whether the target held."""
    with TemporaryDirectory(prefix="stratalog-fuzz-") as directory:
        work, found = Path(directory) / "work", Path(directory) / "found"
        work.mkdir()
        found.mkdir()
        write_inputs(work, target.inputs())
        ended = run(target, [str(work), f"-max_total_time={seconds}", f"-artifact_prefix={found}/"])
        executions = _EXECUTIONS.search(ended.stderr)
        kept = keep(target, work)
        broken = [path.read_bytes() for path in sorted(found.iterdir()) if not path.name.startswith("slow-unit")]
        print(f"{target.name}: {executions[1] if executions else '?'} executions, {kept} inputs kept, {len(broken)} break it")
        for content in broken:
            put(target, "broken", content)
        if broken or ended.returncode:
            print("\n".join(ended.stderr.splitlines()[-40:]))
        return not broken and not ended.returncode


def run(target: Target, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "fuzz.coverage", MODULES[target.name], target.name, *arguments, f"-timeout={INPUT_S_MAX}",
        f"-rss_limit_mb={RESIDENT_MIB_MAX}", f"-max_len={target.input_bytes_max if target.name in PURE else 4096}",
        "-print_final_stats=1",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)


def write_inputs(directory: Path, inputs: Sequence[bytes]) -> None:
    for content in inputs:
        (directory / digest(content)).write_bytes(content)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def keep(target: Target, work: Path) -> int:
    """Put what reached something new into the corpus, the shortest first, as far as there is room; says how many that is.

    libFuzzer writes only such inputs, and replaces one by a shorter that reaches the same.
    """
    known = set(target.inputs())
    found = {content for path in work.iterdir() if len(content := path.read_bytes()) <= KEPT_BYTES_MAX} - known
    room = KEPT_FILES_MAX - len(list(target.corpus.glob("found-*")))
    chosen = sorted(found, key=lambda content: (len(content), content))[: max(room, 0)]
    for content in chosen:
        put(target, "found", content)
    return len(chosen)


def put(target: Target, kind: str, content: bytes) -> None:
    target.corpus.mkdir(parents=True, exist_ok=True)
    (target.corpus / f"{kind}-{digest(content)}").write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
