"""Generates load and measures any cluster that speaks Kafka's protocol; behind ``stratalog bench`` and ``make bench``.

Loads (:mod:`.processes.loads`) are data. Each runs in its own process (:mod:`.processes.worker`), because one Python process
cannot saturate a cluster. :mod:`.processes.workers` starts the processes, signals their start, and collects their counts;
:mod:`.runs` composes loads into measurements. Nothing here knows that the server is Stratalog.
"""
