"""Consumer groups: a sans-IO coordinator (``coordinator.py`` and below) and its shell over ``__consumer_offsets``."""
