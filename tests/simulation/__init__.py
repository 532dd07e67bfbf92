"""A whole Stratalog cluster in one process and one thread, driven by a seed.

The real shells and cores run on simulated ports: time, randomness, network, disks and object store. One seed twice gives the
same bytes. ``python -m simulation --help`` lists what can be run.
"""
