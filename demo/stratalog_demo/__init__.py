"""The main job on real flights: produce while a broker is killed, offload, replay, count with Spark, detect tampering."""
