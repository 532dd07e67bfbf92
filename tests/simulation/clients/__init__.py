"""Clients and operators of the simulated clusters: producers, consumers, group commits, topic administration."""
