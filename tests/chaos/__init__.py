"""Real processes under real faults: a cluster, unmodified clients, a nemesis driven by a seed, histories and their checker."""
