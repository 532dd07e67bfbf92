"""Jobs over a bucket. Each is a plain function that takes a Spark session; its logic is in functions that need no Spark."""
