"""The main job on real flights: produce through a broker's death, go cold, replay, count with Spark, detect tampering."""
