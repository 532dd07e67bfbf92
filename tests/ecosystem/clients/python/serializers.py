"""Writes values with confluent-kafka's serializers and reads them back: ``serializers.py BOOTSTRAP PREFIX REGISTRY``.

Prints one line per step: its name, a tab, its outcome. Runs in an environment with the extras of confluent-kafka.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from ecosystem.clients.python.flights import (
    AVRO_VERSIONS,
    COUNT,
    JSON_SCHEMA,
    MESSAGE,
    PROTO,
    expected,
    text_subject,
    topic,
    written,
)
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
from google.protobuf.message import Message

TIMEOUT_S: Final = 60.0
COPIES: Final = 2
Serialize = Callable[[Any, SerializationContext], bytes]
Deserialize = Callable[[bytes, SerializationContext], Any]


def message_class() -> type[Message]:
    """Make the class of the messages. Their file imports another one, and Protobuf's own of timestamps."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    field = descriptor_pb2.FieldDescriptorProto
    airports = descriptor_pb2.FileDescriptorProto(name="airports.proto", package="flights", syntax="proto3")
    airport = airports.message_type.add(name="Airport")
    airport.field.add(name="code", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    file = descriptor_pb2.FileDescriptorProto(name="flights.proto", package="flights", syntax="proto3")
    file.dependency.extend(["airports.proto", "google/protobuf/timestamp.proto"])
    file.message_type.add(name="Other")
    flight = file.message_type.add(name="Flight")
    flight.field.add(name="flight", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    flight.oneof_decl.add(name="_delay")
    flight.field.add(
        name="delay", number=2, type=field.TYPE_SINT32, label=field.LABEL_OPTIONAL, oneof_index=0, proto3_optional=True
    )
    types = {"origin": ".flights.Airport", "departed": ".google.protobuf.Timestamp"}
    for number, (name, kind) in enumerate(types.items(), 3):
        flight.field.add(name=name, number=number, type=field.TYPE_MESSAGE, type_name=kind, label=field.LABEL_OPTIONAL)
    flight.field.add(name="tags", number=5, type=field.TYPE_STRING, label=field.LABEL_REPEATED)
    for each in (airports, file):
        pool.AddSerializedFile(each.SerializeToString())
    found: type[Message] = message_factory.GetMessageClass(pool.FindMessageTypeByName(MESSAGE))
    return found


def to_message(kind: type[Message], row: Mapping[str, Any]) -> Message:
    # Its fields are known when the program runs.
    message: Any = kind()
    message.flight, message.origin.code = row["flight"], row["origin"]["code"]
    message.departed.FromDatetime(row["departed"])
    message.tags.extend(row["tags"])
    if row["delay"] is not None:
        message.delay = row["delay"]
    return cast("Message", message)


def to_row(message: Any) -> dict[str, Any]:
    return {
        "flight": message.flight,
        "delay": message.delay if message.HasField("delay") else None,
        "origin": {"code": message.origin.code},
        "departed": message.departed.ToDatetime(tzinfo=expected("avro", 0)["departed"].tzinfo),
        "tags": list(message.tags),
    }


def formats(registry: SchemaRegistryClient) -> dict[str, tuple[Callable[[int], bytes], Deserialize]]:
    """Return by format the value of a number and the deserializer."""
    first, second = (AvroSerializer(registry, schema) for schema in AVRO_VERSIONS)
    json_values = JSONSerializer(JSON_SCHEMA, registry)
    kind = message_class()
    messages = ProtobufSerializer(kind, registry, {"use.deprecated.format": False})
    read_message = ProtobufDeserializer(kind, {"use.deprecated.format": False}, registry)
    prefix = sys.argv[2]

    def avro(number: int) -> bytes:
        return serialized(first if number < COUNT // 2 else second, "avro", written("avro", number))

    def serialized(serialize: Serialize, value_format: str, value: Any) -> bytes:
        return serialize(value, SerializationContext(topic(prefix, value_format), MessageField.VALUE))

    return {
        "avro": (avro, AvroDeserializer(registry, AVRO_VERSIONS[1])),
        "protobuf": (
            lambda number: serialized(messages, "protobuf", to_message(kind, written("protobuf", number))),
            lambda content, context: to_row(read_message(content, context)),
        ),
        "json": (
            lambda number: serialized(json_values, "json", written("json", number)),
            JSONDeserializer(JSON_SCHEMA, schema_registry_client=registry),
        ),
    }


def produce(bootstrap: str, name: str, make: Callable[[int], bytes]) -> str:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    admin.create_topics([NewTopic(name, num_partitions=1, replication_factor=COPIES)])[name].result(TIMEOUT_S)
    producer = Producer({"bootstrap.servers": bootstrap, "compression.type": "zstd", "linger.ms": 20, "log_level": 0})
    failures: list[object] = []
    for number in range(COUNT):
        producer.produce(name, make(number), on_delivery=lambda failure, _: failures.extend([failure] if failure else []))
    left = producer.flush(TIMEOUT_S)
    return f"{COUNT} acknowledged" if not left and not failures else f"{left} left, {failures[:1]}"


def consume(bootstrap: str, name: str, value_format: str, deserialize: Deserialize) -> str:
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": f"{name}-readers", "auto.offset.reset": "earliest", "log_level": 0}
    )
    consumer.subscribe([name])
    context = SerializationContext(name, MessageField.VALUE)
    found: list[Any] = []
    while len(found) < COUNT:
        messages = consumer.consume(COUNT, TIMEOUT_S)
        assert messages, f"{len(found)} of {COUNT} values came within {TIMEOUT_S} s"
        assert all(message.error() is None for message in messages), messages[0].error()
        found += [deserialize(message.value() or b"", context) for message in messages]
    consumer.close()
    same = found == [expected(value_format, number) for number in range(COUNT)]
    return f"{len(found)} values{' as written' if same else f', first {found[0]}'}"


def main() -> None:
    bootstrap, prefix, url = sys.argv[1:]
    registry = SchemaRegistryClient({"url": url})
    for value_format, (make, deserialize) in formats(registry).items():
        name = topic(prefix, value_format)
        print(f"produce, {value_format}\t{produce(bootstrap, name, make)}", flush=True)
        print(f"schemas, {value_format}\tversions {registry.get_versions(f'{name}-value')}", flush=True)
        print(f"consume, {value_format}\t{consume(bootstrap, name, value_format, deserialize)}", flush=True)
    imported = SchemaReference("airports.proto", "airports.proto", 1)
    registry.register_schema(text_subject(prefix), Schema(PROTO, "PROTOBUF", [imported]))
    print(f"schemas, protobuf as text\tversions {registry.get_versions(text_subject(prefix))}")


main()
