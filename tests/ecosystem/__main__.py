"""Runs the suites on both clusters, keeps the record and writes the page: ``python -m ecosystem [--only NAME,NAME]``.

Ends with 1 if a step has another outcome than on Apache Kafka that no reason explains, or if a suite does not run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Final

from ecosystem.clusters import KAFKA, OWN, cluster
from ecosystem.record import PAGE, differences, keep, page, recorded
from ecosystem.suites import SUITES, Outcomes

_PRODUCT: Final = ("core", "metadata", "bookies", "tiering", "broker", "cli")


def _commit() -> str:
    """Return the last commit that changed the product, which a rebase of commits of tests leaves as it is."""
    command = ["git", "log", "-1", "--format=%h", "--abbrev=12", "--", *_PRODUCT]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _run(names: list[str], directory: Path) -> dict[str, dict[str, Outcomes]]:
    """Return by suite and cluster the outcomes of the suites that ran on both."""
    found: dict[str, dict[str, Outcomes]] = defaultdict(dict)
    for which, brokers in product((KAFKA, OWN), sorted({SUITES[name].brokers for name in names}, reverse=True)):
        with cluster(which, directory / str(brokers), brokers) as bootstrap:
            for name in names:
                if SUITES[name].brokers == brokers and (outcomes := _outcomes(name, which, bootstrap, directory)):
                    found[name][which] = outcomes
    return {name: outcomes for name, outcomes in found.items() if len(outcomes) == 2}


def _outcomes(name: str, which: str, bootstrap: str, directory: Path) -> Outcomes:
    """Run a suite; return its outcomes, none if it cannot run."""
    scratch = directory / f"{which}-{name}"
    scratch.mkdir()
    begin, outcomes = time.monotonic(), Outcomes()
    try:
        outcomes = SUITES[name].run(bootstrap, f"eco-{name}", scratch)
    except Exception:  # One suite that cannot run must not keep the others from running.
        traceback.print_exc()
    print(f"{name} on {which}: {time.monotonic() - begin:.0f} s", flush=True)
    return outcomes


def main() -> int:
    """Run what the command line names; return the exit code."""
    parser = argparse.ArgumentParser(prog="ecosystem", description=__doc__)
    parser.add_argument("--only", default=",".join(SUITES), help="names of suites, with commas")
    names = parser.parse_args().only.split(",")
    with tempfile.TemporaryDirectory(prefix="ecosystem-") as directory:
        found = _run(names, Path(directory))
    for name, outcomes in found.items():
        keep(name, _commit(), outcomes)
    PAGE.write_text(page())
    status = 0
    for name in names:
        if name not in found:
            print(f"{name}: did not run")
            status = 1
            continue
        for step, (kafka, own) in differences(name).items():
            reason = SUITES[name].reasons.get(step)
            status = status if reason else 1
            print(f"{name}: {step}: Kafka: {kafka}; Stratalog: {own}; {reason or 'no reason is given'}")
        print(f"{name}: {len(recorded()[name][OWN])} steps")
    return status


if __name__ == "__main__":
    sys.exit(main())
