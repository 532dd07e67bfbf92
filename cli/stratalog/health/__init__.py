"""The checks of ``stratalog doctor``."""
