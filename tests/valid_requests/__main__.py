"""``make requests``: requests that make sense, seed after seed for so many seconds; SEED=7 for one of them."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from valid_requests.session import BrokeDown, run_seed

BATCHES = 20


def main() -> int:
    arguments = parse_arguments()
    deadline_s = time.monotonic() + arguments.seconds
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    while True:
        try:
            with TemporaryDirectory(prefix="stratalog-requests-") as directory:
                requests = asyncio.run(run_seed(Path(directory), seed, BATCHES, deadline_s))
        except BrokeDown as broken:
            print(broken)
            return 1
        print(f"seed {seed}: {requests} requests")
        if arguments.seed is not None or time.monotonic() >= deadline_s:
            return 0
        seed += 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m valid_requests", description="ask a broker everything that makes sense")
    parser.add_argument("--seconds", type=int, default=300, help="how long new seeds are begun")
    parser.add_argument("--seed", type=int, help="this one only")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
