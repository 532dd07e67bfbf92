"""The program of docs/tutorial/spark.md, cell by cell: ``python spark_tutorial.py STORE BROKERS``."""

# %%
import os
import sys

from pyspark.sql import SparkSession

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = SparkSession.builder.config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
store, brokers = sys.argv[1:]

# %%
orders = spark.read.format("stratalog").option("store", store).option("kafka.bootstrap.servers", brokers)
records = orders.option("subscribe", "orders").load()
records.groupBy("partition").count().show()

# %%
from stratalog_pipeline import views

shape = {"value_format": "json", "value_schema": "id INT, euros DOUBLE"}
views(spark, store, pattern="orders", options={"kafka.bootstrap.servers": brokers}, values={"orders": shape})
by_customer = """
    SELECT CAST(key AS STRING) AS customer, count(*) AS orders, sum(value.euros) AS euros
    FROM orders GROUP BY customer ORDER BY customer
"""
spark.sql(by_customer).show()

# %%
segments = orders.option("subscribe", "orders").option("table", "segments").load()
segments.select("partition", "base_offset", "end_offset", "record_count", "stored_bytes").show()

# %%
stream = spark.readStream.format("stratalog").option("store", store).option("kafka.bootstrap.servers", brokers)
large = (
    stream.option("subscribe", "orders")
    .option("startingOffsets", "earliest")
    .load()
    .where("get_json_object(CAST(value AS STRING), '$.euros') >= 90")
)
query = (
    large.select("key", "value")
    .writeStream.format("stratalog")
    .option("kafka.bootstrap.servers", brokers)
    .option("topic", "large-orders")
    .option("checkpointLocation", "data/large-orders")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()

# %%
sent = spark.read.format("stratalog").option("kafka.bootstrap.servers", brokers).option("subscribe", "large-orders").load()
assert sent.count() == 100
spark.stop()
