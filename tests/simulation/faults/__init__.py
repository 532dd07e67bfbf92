"""What goes wrong: nemeses that choose faults from the seed, and faults of single links."""
