"""Planted faults by the part of the product that they change; :mod:`.hunt` runs them."""
