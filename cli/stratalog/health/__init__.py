"""What ``stratalog doctor`` looks at."""
