"""Spark data source and jobs that read a bucket's cold history without brokers."""
