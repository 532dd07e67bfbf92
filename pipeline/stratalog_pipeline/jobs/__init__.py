"""Jobs over a bucket. Each is a plain function over Spark, with its logic in functions that need no Spark."""
