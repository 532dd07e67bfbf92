// Reads partition 0 of a topic from its beginning with a consumer in a rack, and prints the offset and the value of each record. Run it as
// source: java ReplicaReads.java BOOTSTRAP TOPIC RACK FIRST ALL. After FIRST records it waits for a line of input, after ALL it ends.
// A position that is out of range is an error.

import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;

public class ReplicaReads {
    public static void main(String[] arguments) throws Exception {
        int first = Integer.parseInt(arguments[3]), all = Integer.parseInt(arguments[4]), read = 0;
        Map<String, Object> properties = new HashMap<>(Map.of("bootstrap.servers", arguments[0], "client.rack", arguments[2],
            "auto.offset.reset", "none", "enable.auto.commit", false));
        // A few records at a time, so that many fetches follow each other.
        properties.putAll(Map.of("max.poll.records", 10, "max.partition.fetch.bytes", 4000));
        try (var consumer = new KafkaConsumer<>(properties, new StringDeserializer(), new StringDeserializer())) {
            TopicPartition partition = new TopicPartition(arguments[1], 0);
            consumer.assign(List.of(partition));
            consumer.seek(partition, 0);
            while (read < all) {
                for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(500))) {
                    System.out.println(record.offset() + "\t" + record.value());
                    if (++read == first) System.in.read();
                }
            }
        }
    }
}
