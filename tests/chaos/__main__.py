"""``python -m chaos --seconds 300``: exits with 1 if the history has an anomaly or the cluster did not recover."""

from __future__ import annotations

import argparse
import logging
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from chaos.display import Display
from chaos.run import ChaosRun, Options


def main() -> int:
    """Run once and show progress."""
    arguments = _arguments()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    seed = arguments.seed if arguments.seed is not None else random.randrange(1_000_000)
    results = arguments.results or Path(tempfile.mkdtemp(prefix="stratalog-chaos-")) / "results"
    print(f"seed {seed}, {arguments.seconds:.0f} s, results in {results}", flush=True)
    display = Display()
    results.mkdir(parents=True)
    # Warnings of the client libraries are expected, but may be of interest afterwards.
    logging.basicConfig(filename=results / "clients.log", level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    only = tuple(arguments.only.split(",")) if arguments.only else ()
    run = ChaosRun(Options(seconds=arguments.seconds, seed=seed, results=results.absolute(), only=only), display.say)
    with display.showing(run):
        result = run.run()
    display.summary(result)
    if not result.is_clean:
        print(f"repeat with: make chaos SECONDS={arguments.seconds:.0f} SEED={seed}")
    return 0 if result.is_clean else 1


def _interrupted(number: int, _: object) -> NoReturn:
    """End the run and its processes, even if a shell made this process ignore Ctrl-C."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="duration of the faults and of the pauses between them")
    parser.add_argument("--seed", type=int, help="seed of the faults (default: random)")
    parser.add_argument("--only", default="", help="only faults whose kind has one of these words, such as stop,drain,roll")
    parser.add_argument("--results", type=Path, help="directory to create for the results (default: a temporary one)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
