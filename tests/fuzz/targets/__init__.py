"""What is fuzzed: one module per kind of border. ``fuzz.registry`` has them by name."""
