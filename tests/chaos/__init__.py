"""Real processes under real faults: a cluster, unmodified clients, nemeses drawn from a seed, histories and their checker."""
