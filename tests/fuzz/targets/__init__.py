"""Fuzz targets: one module per kind of border. ``fuzz.registry`` has them by name."""
