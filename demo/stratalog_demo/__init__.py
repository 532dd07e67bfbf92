"""The main job on real flights: produce, survive a broker's death, go cold, verify, replay, count with Spark, detect one flipped byte."""
