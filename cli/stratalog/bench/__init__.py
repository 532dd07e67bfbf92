"""Load and measurement against any cluster that speaks Kafka's protocol; behind ``stratalog bench`` and ``make bench``.

Loads (:mod:`.loads`) are data. Each is carried out by a process of its own (:mod:`.worker`), because one Python process cannot
saturate a cluster; :mod:`.crew` starts them, begins them at one moment and collects what they counted; :mod:`.runs` composes
loads into measurements. Nothing here knows that the server is Stratalog.
"""
