"""Composition roots: the only place where components are built from configuration, environment, clock, disks and network."""
