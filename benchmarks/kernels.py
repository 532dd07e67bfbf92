"""How fast record batches become Arrow: `python -m benchmarks.kernels`.

Batches of 1 MB, their CRC checked, every codec, one core. Prints million records per second for all columns, and for
offsets alone. The best of several runs counts, because other work on the machine only ever slows a run down.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from stratalog_core.batches.compression import NAMES
from stratalog_core.batches.records import Record, build_batch
from stratalog_pipeline.arrow.decode import decode_run
from stratalog_pipeline.arrow.schema import COLUMNS

BATCH_BYTES = 1_000_000
BATCHES = 20
RUNS = 7


def value(size_bytes: int, source: random.Random) -> bytes:
    """A quarter noise, the rest text: it compresses about as JSON events do."""
    noise = source.randbytes(size_bytes // 4)
    return noise + b"abcdefgh" * ((size_bytes - len(noise)) // 8)


def one_batch(record_bytes: int, codec: int) -> bytes:
    source = random.Random(record_bytes)
    records = [
        Record(offset=offset, timestamp_ms=1_700_000_000_000 + offset, key=b"k%08d" % offset, value=value(record_bytes, source))
        for offset in range(BATCH_BYTES // record_bytes)
    ]
    return bytes(build_batch(records, compression=codec))


def million_records_per_second(run: bytes, columns: Sequence[str]) -> float:
    best = 0.0
    for _ in range(RUNS):
        start = time.perf_counter()
        rows = sum(batch.num_rows for batch in decode_run(run, topic="bench", partition=0, columns=columns))
        best = max(best, rows / (time.perf_counter() - start) / 1e6)
    return best


def main() -> None:
    print(f"{'record':>8} {'codec':>7} {'all columns':>12} {'offsets only':>13}   million records/s")
    for record_bytes in (1000, 100):
        for name, codec in NAMES.items():
            run = one_batch(record_bytes, codec) * BATCHES
            everything = million_records_per_second(run, COLUMNS)
            offsets = million_records_per_second(run, ("offset",))
            print(f"{record_bytes:>8} {name:>7} {everything:>12.2f} {offsets:>13.2f}")


if __name__ == "__main__":
    main()
