"""Latency histogram with bounded relative error, after HdrHistogram: linear within each power of two.

Values are whole microseconds. A value's bucket is at most 1/128 wider than the value, so every percentile is exact to less than
1 %; the maximum is exact. Histograms of several processes add up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

_LINEAR_MAX = 256
_HALF = _LINEAR_MAX // 2
_BITS = _LINEAR_MAX.bit_length() - 1


class Histogram:
    """Counts by bucket; records in constant time and memory that depends on the spread of values only."""

    def __init__(self, buckets: Iterable[tuple[int, int]] = (), maximum_us: int = 0) -> None:
        self._counts: Counter[int] = Counter(dict(buckets))
        self._maximum_us = maximum_us

    @property
    def count(self) -> int:
        return self._counts.total()

    @property
    def maximum_us(self) -> int:
        return self._maximum_us

    def record(self, value_us: float, times: int = 1) -> None:
        """Count one value; a negative one (clocks of two processes may differ by a tick) counts as zero."""
        value = max(0, int(value_us))
        self._counts[bucket_of(value)] += times
        self._maximum_us = max(self._maximum_us, value)

    def record_all(self, values_us: Sequence[int]) -> None:
        """Count many values at once."""
        if values_us:
            self._counts.update([bucket_of(max(0, value)) for value in values_us])
            self._maximum_us = max(self._maximum_us, *values_us)

    def record_evenly(self, lowest_us: float, step_us: float, times: int) -> None:
        """Count ``times`` values from ``lowest_us`` on, ``step_us`` apart, each in its own bucket."""
        done = 0
        while done < times:
            value = max(0, int(lowest_us + done * step_us))
            bucket = bucket_of(value)
            # The first value above this bucket.
            beyond = math.ceil((highest_of(bucket) + 1 - lowest_us) / step_us) if step_us > 0 else times
            until = min(times, max(done + 1, beyond))
            self._counts[bucket] += until - done
            done = until
        if times > 0:
            self._maximum_us = max(self._maximum_us, int(lowest_us + (times - 1) * step_us))

    def add(self, other: Histogram) -> None:
        """Add the counts of ``other``."""
        self._counts.update(other._counts)
        self._maximum_us = max(self._maximum_us, other._maximum_us)

    def percentile_us(self, percent: float) -> int:
        """The highest value of the bucket in which the ``percent`` smallest of all values end; 0 if nothing was counted."""
        wanted = math.ceil(self.count * percent / 100)
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= wanted:
                return min(highest_of(bucket), self._maximum_us)
        return self._maximum_us

    def buckets(self) -> list[tuple[int, int]]:
        """(bucket, count), ascending; what the constructor takes."""
        return sorted(self._counts.items())

    def summary_ms(self) -> dict[str, float]:
        """p50, p99, p99.9 and the maximum, in milliseconds."""
        named = {"p50_ms": 50.0, "p99_ms": 99.0, "p999_ms": 99.9}
        return {name: self.percentile_us(percent) / 1000 for name, percent in named.items()} | {
            "max_ms": self._maximum_us / 1000
        }


def bucket_of(value: int) -> int:
    """Number of the bucket of ``value`` (0 …): below 256 each value has its own."""
    if value < _LINEAR_MAX:
        return value
    shift = value.bit_length() - _BITS
    return _LINEAR_MAX + (shift - 1) * _HALF + (value >> shift) - _HALF


def highest_of(bucket: int) -> int:
    """The highest value in a bucket."""
    if bucket < _LINEAR_MAX:
        return bucket
    shift, offset = divmod(bucket - _LINEAR_MAX, _HALF)
    return ((offset + _HALF + 1) << (shift + 1)) - 1
