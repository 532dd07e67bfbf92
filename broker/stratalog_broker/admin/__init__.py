"""Administration: topics, their configs and the cluster's defaults, and the limits on creating more."""
