// The same steps as the Go clients' contract with Java's client and the consumer protocol (KIP-848), and topics that have a
// codec of their own. Prints one line per step: its name, a tab, its outcome.

import java.io.DataInputStream;
import java.net.Socket;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Collection;
import java.util.Deque;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.ExecutionException;
import java.util.function.BooleanSupplier;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.protocol.ApiKeys;
import org.apache.kafka.common.record.internal.CompressionType;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.common.requests.AbstractResponse;
import org.apache.kafka.common.requests.FetchRequest;
import org.apache.kafka.common.requests.FetchResponse;
import org.apache.kafka.common.requests.RequestHeader;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

public class JavaClient {
    static final int PARTITIONS = 4, RECORDS_OF_CODEC = 200, TIMEOUT_MS = 60_000;
    static final short COPIES = 2, FETCH_VERSION = 12;
    static final List<String> CODECS = List.of("none", "gzip", "snappy", "lz4", "zstd");
    static final int ALL = CODECS.size() * RECORDS_OF_CODEC;

    static String bootstrap, prefix;
    static Admin admin;

    interface Step {
        String run() throws Exception;
    }

    record Row(int partition, String key, String value, String codec) {}

    static List<Row> rows(String codec) {
        List<Row> rows = new ArrayList<>();
        for (int number = 0; number < RECORDS_OF_CODEC; number++) {
            String text = codec + " " + number + " ";
            rows.add(new Row(number % PARTITIONS, text, text.repeat(20), codec));
        }
        return rows;
    }

    static List<Row> allRows() {
        return CODECS.stream().flatMap(codec -> rows(codec).stream()).toList();
    }

    static String inOrder(List<Row> found, List<Row> written) {
        Map<Integer, Deque<Row>> expected = new TreeMap<>();
        written.forEach(row -> expected.computeIfAbsent(row.partition, each -> new ArrayDeque<>()).add(row));
        for (Row row : found) {
            if (!row.equals(expected.getOrDefault(row.partition, new ArrayDeque<>()).poll())) {
                return found.size() + " records, out of order at \"" + row.key + "\"";
            }
        }
        return found.size() + " records in order";
    }

    static Properties properties(Object... pairs) {
        Properties properties = new Properties();
        properties.put("bootstrap.servers", bootstrap);
        for (int at = 0; at < pairs.length; at += 2) properties.put(pairs[at], pairs[at + 1]);
        return properties;
    }

    static KafkaProducer<String, String> producer(String codec, String transactionalId) {
        Properties properties = properties("compression.type", codec, "linger.ms", "20", "max.request.size", "4000000");
        if (transactionalId != null) properties.put("transactional.id", transactionalId);
        return new KafkaProducer<>(properties, new StringSerializer(), new StringSerializer());
    }

    static KafkaConsumer<String, String> consumer(String group) {
        Properties properties = properties("group.id", group, "group.protocol", "consumer", "auto.offset.reset", "earliest",
            "enable.auto.commit", "false", "isolation.level", "read_committed", "max.poll.records", "100");
        return new KafkaConsumer<>(properties, new StringDeserializer(), new StringDeserializer());
    }

    static void send(KafkaProducer<String, String> producer, String topic, List<Row> rows) throws Exception {
        List<java.util.concurrent.Future<?>> sent = new ArrayList<>();
        for (Row row : rows) {
            ProducerRecord<String, String> record = new ProducerRecord<>(topic, row.partition, row.key, row.value);
            record.headers().add("codec", row.codec.getBytes(StandardCharsets.UTF_8));
            sent.add(producer.send(record));
        }
        producer.flush();
        for (var each : sent) each.get();
    }

    static String produce(String codec, String topic, List<Row> rows) throws Exception {
        try (KafkaProducer<String, String> producer = producer(codec, null)) {
            send(producer, topic, rows);
        }
        return "acknowledged";
    }

    static void poll(KafkaConsumer<String, String> consumer, List<Row> found) {
        for (ConsumerRecord<String, String> each : consumer.poll(Duration.ofMillis(100))) {
            String codec = new String(each.headers().lastHeader("codec").value(), StandardCharsets.UTF_8);
            found.add(new Row(each.partition(), each.key(), each.value(), codec));
        }
    }

    static void until(BooleanSupplier condition, Runnable turn, String complaint) {
        for (long deadline = System.currentTimeMillis() + TIMEOUT_MS; !condition.getAsBoolean(); turn.run()) {
            if (System.currentTimeMillis() > deadline) throw new IllegalStateException(complaint);
        }
    }

    static List<Row> readAll(String group, String topic, int count) {
        List<Row> found = new ArrayList<>();
        try (KafkaConsumer<String, String> consumer = consumer(group)) {
            consumer.subscribe(List.of(topic));
            until(() -> found.size() >= count, () -> poll(consumer, found), "no " + count + " records");
            for (int turn = 0; turn < 10; turn++) poll(consumer, found);
        }
        return found;
    }

    static String create(String topic, Map<String, String> configs) throws Exception {
        admin.createTopics(List.of(new NewTopic(topic, PARTITIONS, COPIES).configs(configs))).all().get();
        return "done";
    }

    static TopicDescription description(String topic) throws Exception {
        return admin.describeTopics(List.of(topic)).allTopicNames().get().get(topic);
    }

    static String describe(String topic) throws Exception {
        TopicDescription found = description(topic);
        return found.partitions().size() + " partitions, " + found.partitions().get(0).replicas().size() + " replicas";
    }

    static String rebalance(String group, String topic) {
        List<Row> unused = new ArrayList<>();
        try (KafkaConsumer<String, String> first = consumer(group)) {
            first.subscribe(List.of(topic));
            until(() -> first.assignment().size() == PARTITIONS, () -> poll(first, unused), "not all partitions");
            try (KafkaConsumer<String, String> second = consumer(group)) {
                second.subscribe(List.of(topic));
                until(() -> first.assignment().size() == 2 && second.assignment().size() == 2, () -> {
                    poll(first, unused);
                    poll(second, unused);
                }, "not two partitions each");
            }
            until(() -> first.assignment().size() == PARTITIONS, () -> poll(first, unused), "not all partitions again");
        }
        return "4 partitions, 2 and 2, 4";
    }

    static String resume(String group, String topic) {
        List<Row> found = new ArrayList<>();
        for (int count : List.of(ALL / 3, ALL)) {
            try (KafkaConsumer<String, String> consumer = consumer(group)) {
                consumer.subscribe(List.of(topic));
                until(() -> found.size() >= count, () -> poll(consumer, found), "not enough records");
                consumer.commitSync();
            }
        }
        return inOrder(found, allRows());
    }

    static String transact() throws Exception {
        String topic = prefix + "-transactions";
        create(topic, Map.of());
        try (KafkaProducer<String, String> producer = producer("none", prefix + "-writer")) {
            producer.initTransactions();
            for (String name : List.of("first", "aborted", "second")) {
                producer.beginTransaction();
                send(producer, topic, rows(name));
                if (name.equals("aborted")) producer.abortTransaction();
                else producer.commitTransaction();
            }
        }
        List<Row> found = readAll(prefix + "-committed", topic, 2 * RECORDS_OF_CODEC);
        return found.size() + " records, " + found.stream().filter(row -> row.codec.equals("aborted")).count() + " of them aborted";
    }

    static Map<TopicPartition, OffsetAndMetadata> positions(KafkaConsumer<String, String> consumer) {
        Map<TopicPartition, OffsetAndMetadata> positions = new java.util.HashMap<>();
        consumer.assignment().forEach(each -> positions.put(each, new OffsetAndMetadata(consumer.position(each))));
        return positions;
    }

    static String transform(String topic) throws Exception {
        String target = prefix + "-target";
        create(target, Map.of());
        int copied = 0;
        for (int limit : List.of(ALL / 3, ALL)) {
            try (KafkaProducer<String, String> producer = producer("none", prefix + "-transformer");
                    KafkaConsumer<String, String> consumer = consumer(prefix + "-transformed")) {
                producer.initTransactions();
                consumer.subscribe(List.of(topic));
                while (copied < limit) {
                    List<Row> some = new ArrayList<>();
                    until(() -> !some.isEmpty(), () -> poll(consumer, some), "no records");
                    producer.beginTransaction();
                    send(producer, target, some);
                    producer.sendOffsetsToTransaction(positions(consumer), consumer.groupMetadata());
                    producer.commitTransaction();
                    copied += some.size();
                }
            }
        }
        return inOrder(readAll(prefix + "-check", target, ALL), allRows());
    }

    static String fenced(String topic) throws Exception {
        try (KafkaProducer<String, String> first = producer("none", prefix + "-fenced");
                KafkaProducer<String, String> second = producer("none", prefix + "-fenced")) {
            first.initTransactions();
            first.beginTransaction();
            send(first, topic, rows("none").subList(0, 1));
            second.initTransactions();
            first.commitTransaction();
            return "done";
        }
    }

    /** A topic whose compression.type is a codec has batches of that codec, whatever the producer sent. */
    static String recompress(String codec, String producerCodec) throws Exception {
        String topic = prefix + "-of-" + codec + "-from-" + producerCodec;
        create(topic, Map.of("compression.type", codec));
        List<Row> rows = rows(producerCodec);
        produce(producerCodec, topic, rows);
        String read = inOrder(readAll(topic, topic, rows.size()), rows);
        return read + ", stored as " + String.join(" and ", storedCodecs(topic));
    }

    static Collection<String> storedCodecs(String topic) throws Exception {
        TopicDescription found = description(topic);
        Collection<String> names = new TreeSet<>();
        for (var partition : found.partitions()) {
            TopicPartition at = new TopicPartition(topic, partition.partition());
            for (RecordBatch batch : fetch(partition.leader(), at)) names.add(CompressionType.forId(batch.compressionType().id).name);
        }
        return names;
    }

    static Iterable<? extends RecordBatch> fetch(Node leader, TopicPartition partition) throws Exception {
        var position = new FetchRequest.PartitionData(Uuid.ZERO_UUID, 0, 0, 1 << 20, Optional.empty());
        FetchRequest request = FetchRequest.Builder.forConsumer(FETCH_VERSION, 1_000, 1, Map.of(partition, position)).build(FETCH_VERSION);
        RequestHeader header = new RequestHeader(ApiKeys.FETCH, FETCH_VERSION, "codecs", 1);
        ByteBuffer content = request.serializeWithHeader(header);
        try (Socket socket = new Socket(leader.host(), leader.port())) {
            byte[] sent = new byte[4 + content.remaining()];
            ByteBuffer.wrap(sent).putInt(content.remaining()).put(content);
            socket.getOutputStream().write(sent);
            DataInputStream input = new DataInputStream(socket.getInputStream());
            byte[] answer = new byte[input.readInt()];
            input.readFully(answer);
            FetchResponse response = (FetchResponse) AbstractResponse.parseResponse(ByteBuffer.wrap(answer), header);
            return FetchResponse.recordsOrFail(response.data().responses().get(0).partitions().get(0)).batches();
        }
    }

    static String deleted(String topic) throws Exception {
        for (long deadline = System.currentTimeMillis() + TIMEOUT_MS / 4; System.currentTimeMillis() < deadline; Thread.sleep(100)) describe(topic);
        return "found";
    }

    static void step(String name, Step step) {
        String outcome;
        try {
            outcome = step.run();
        } catch (Throwable failure) {
            Throwable cause = failure instanceof ExecutionException ? failure.getCause() : failure;
            outcome = cause.getClass().getSimpleName();
            if (cause instanceof IllegalStateException) outcome += ": " + cause.getMessage();
        }
        System.out.println(name + "\t" + outcome);
    }

    public static void main(String[] arguments) {
        bootstrap = arguments[0];
        prefix = arguments[1];
        admin = Admin.create(properties());
        String topic = prefix + "-records";
        step("create a topic", () -> create(topic, Map.of()));
        step("create it again", () -> create(topic, Map.of()));
        step("describe it", () -> describe(topic));
        for (String codec : CODECS) step("produce, " + codec, () -> produce(codec, topic, rows(codec)));
        step("consume", () -> inOrder(readAll(prefix + "-all", topic, ALL), allRows()));
        step("join and leave a group", () -> rebalance(prefix + "-pair", topic));
        step("commit and resume", () -> resume(prefix + "-resumed", topic));
        step("commit and abort transactions", JavaClient::transact);
        step("consume, transform, produce", () -> transform(topic));
        step("commit when fenced", () -> fenced(topic));
        step("produce 2 MB", () -> produce("none", topic, List.of(new Row(0, "large", "l".repeat(2_000_000), "none"))));
        step("delete the topic", () -> {
            admin.deleteTopics(List.of(topic)).all().get();
            return "done";
        });
        step("describe it then", () -> deleted(topic));
        for (String codec : List.of("uncompressed", "gzip", "snappy", "lz4", "zstd", "producer")) {
            for (String from : List.of("none", "zstd")) step("produce " + from + " to a topic of " + codec, () -> recompress(codec, from));
        }
        admin.close();
    }
}
