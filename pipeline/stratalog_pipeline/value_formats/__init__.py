"""Values in Avro, JSON and Protobuf as Arrow columns. No Spark."""
