"""Copies of a bucket's objects: damaged ones are repaired from a second copy or from the hot copy."""
