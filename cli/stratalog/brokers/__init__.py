"""Behind ``stratalog broker``: listing, draining and undraining brokers, defaults of topic configs."""
