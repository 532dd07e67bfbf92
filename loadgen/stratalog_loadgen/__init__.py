"""Generates load and measures any cluster that speaks Kafka's protocol; behind ``stratalog bench`` and ``make bench``.

Loads (:mod:`.processes.loads`) are data. Each is carried out by a process of its own (:mod:`.processes.worker`), because one
Python process cannot saturate a cluster; :mod:`.processes.crew` starts them, begins them at one moment and collects their
counts; :mod:`.runs` composes loads into measurements. Nothing here knows that the server is Stratalog.
"""
