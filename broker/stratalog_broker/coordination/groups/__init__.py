"""Consumer groups: a coordinator without I/O (``coordinator.py`` and below) and its shell over ``__consumer_offsets``."""
