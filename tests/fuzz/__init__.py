"""Hostile bytes for every port, every stored format and every object. See README.md."""
