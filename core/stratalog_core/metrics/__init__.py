"""Metrics: groups of counters, gauges and histograms, and the registry that a process passes to its components. Pure: no I/O.

There is no global registry. A component counts by plain arithmetic on objects that it holds; other work happens at a scrape.
"""
