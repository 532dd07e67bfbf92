// Calls each method of Kafka's Admin client against a cluster with brokers 1 and 2, and prints one line per call: its name, a tab, and
// what came of it in words that are the same for every cluster that behaves the same. Run it as source: java AdminCalls.java BOOTSTRAP
// SUFFIX. Methods that are not called are printed at the end.

import java.lang.reflect.Method;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.stream.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.*;
import org.apache.kafka.common.acl.*;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.*;
import org.apache.kafka.common.resource.*;
import org.apache.kafka.common.serialization.*;

@SuppressWarnings({"removal", "deprecation"})
public class AdminCalls {
    static final Set<String> called = new TreeSet<>();
    static final Set<String> others = Set.of("close", "create");
    static final Set<ConfigEntry.ConfigSource> OWN = Set.of(ConfigEntry.ConfigSource.DYNAMIC_TOPIC_CONFIG,
        ConfigEntry.ConfigSource.DYNAMIC_GROUP_CONFIG, ConfigEntry.ConfigSource.DYNAMIC_CLIENT_METRICS_CONFIG);
    static Admin admin;
    static Map<String, Object> properties;

    interface Call {
        Object run() throws Exception;
    }

    static void call(String name, Call call) {
        called.add(name.split(" ")[0]);
        String outcome;
        try {
            outcome = String.valueOf(call.run());
        } catch (Throwable failure) {
            Throwable cause = failure;
            while (cause instanceof ExecutionException || cause instanceof CompletionException) cause = cause.getCause();
            outcome = cause.getClass().getSimpleName();
        }
        System.out.println(name + "\t" + (outcome.equals("null") ? "done" : outcome));
    }

    static <T> T get(KafkaFuture<T> future) throws Exception {
        return future.get(120, TimeUnit.SECONDS);
    }

    static String sorted(Collection<?> values) {
        return values.stream().map(String::valueOf).sorted().collect(Collectors.joining(", "));
    }

    public static void main(String[] arguments) throws Exception {
        String suffix = arguments[1];
        properties = new HashMap<>(Map.of("bootstrap.servers", arguments[0], "enable.metrics.push", true, "request.timeout.ms", 60000, "default.api.timeout.ms", 120000));
        admin = Admin.create(properties);
        topics("admin-" + suffix);
        cluster("admin-" + suffix);
        owners("admin-" + suffix);
        groups("admin-" + suffix, "group-" + suffix);
        configs("admin-" + suffix, "group-" + suffix);
        acls();
        call("deleteTopics", () -> get(admin.deleteTopics(List.of("admin-" + suffix)).all()));
        call("deleteTopics, unknown", () -> get(admin.deleteTopics(List.of("unknown-" + suffix)).all()));
        instance();
        Set<String> methods = Arrays.stream(Admin.class.getMethods()).map(Method::getName).collect(Collectors.toCollection(TreeSet::new));
        methods.removeAll(called.stream().map(name -> name.replace(",", "")).toList());
        methods.removeAll(others);
        System.out.println("not called\t" + String.join(" ", methods));
        admin.close(Duration.ofSeconds(5));
    }

    static void topics(String topic) throws Exception {
        NewTopic wanted = new NewTopic(topic, Map.of(0, List.of(1, 2), 1, List.of(2, 1)));
        call("createTopics", () -> {
            CreateTopicsResult made = admin.createTopics(List.of(wanted.configs(Map.of("retention.ms", "3600000"))));
            get(made.all());
            return get(made.numPartitions(topic)) + " partitions, " + get(made.replicationFactor(topic)) + " copies, retention.ms "
                + get(made.config(topic)).get("retention.ms").value();
        });
        call("createTopics, exists", () -> get(admin.createTopics(List.of(wanted)).all()));
        call("createTopics, bad name", () -> get(admin.createTopics(List.of(new NewTopic("a b", 1, (short) 1))).all()));
        call("createTopics, no partitions", () -> get(admin.createTopics(List.of(new NewTopic(topic + "x", 0, (short) 1))).all()));
        call("createTopics, too many copies", () -> get(admin.createTopics(List.of(new NewTopic(topic + "x", 1, (short) 20))).all()));
        call("createTopics, unknown broker", () -> get(admin.createTopics(List.of(new NewTopic(topic + "x", Map.of(0, List.of(99))))).all()));
        call("createTopics, bad config", () -> get(admin.createTopics(
            List.of(new NewTopic(topic + "x", 1, (short) 1).configs(Map.of("retention.ms", "x")))).all()));
        call("listTopics", () -> get(admin.listTopics().names()).contains(topic));
        call("describeTopics", () -> {
            TopicDescription found = get(admin.describeTopics(List.of(topic), new DescribeTopicsOptions()
                .includeAuthorizedOperations(true)).allTopicNames()).get(topic);
            return found.partitions().stream().map(one -> one.partition() + " led by " + one.leader().id()
                + ", replicas " + one.replicas().stream().map(Node::idString).toList()).toList()
                + ", internal " + found.isInternal() + ", may " + sorted(found.authorizedOperations());
        });
        call("describeTopics, unknown", () -> get(admin.describeTopics(List.of("unknown")).allTopicNames()));
        call("createPartitions", () -> get(admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(3))).all()));
        call("createPartitions, fewer", () -> get(admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(1))).all()));
        try (Producer<byte[], byte[]> producer = new KafkaProducer<>(properties, new ByteArraySerializer(), new ByteArraySerializer())) {
            for (int number = 0; number < 5; number++) producer.send(new ProducerRecord<>(topic, 0, 1000L + number, null, new byte[10])).get();
        }
        TopicPartition first = new TopicPartition(topic, 0);
        Map<String, OffsetSpec> specs = new LinkedHashMap<>();
        specs.put("earliest", OffsetSpec.earliest());
        specs.put("latest", OffsetSpec.latest());
        specs.put("greatest timestamp", OffsetSpec.maxTimestamp());
        specs.put("timestamp", OffsetSpec.forTimestamp(1002));
        specs.put("later timestamp", OffsetSpec.forTimestamp(9999));
        specs.put("earliest local", OffsetSpec.earliestLocal());
        specs.put("latest tiered", OffsetSpec.latestTiered());
        specs.forEach((name, spec) -> call("listOffsets, " + name, () -> {
            var found = get(admin.listOffsets(Map.of(first, spec)).all()).get(first);
            return found.offset() + " at " + found.timestamp();
        }));
        call("deleteRecords", () -> get(admin.deleteRecords(Map.of(first, RecordsToDelete.beforeOffset(2))).lowWatermarks().get(first)).lowWatermark());
        call("deleteRecords, too many", () -> get(admin.deleteRecords(Map.of(first, RecordsToDelete.beforeOffset(99))).all()));
        call("describeProducers", () -> get(admin.describeProducers(List.of(first)).all()).get(first).activeProducers().size());
    }

    static void cluster(String topic) throws Exception {
        call("describeCluster", () -> {
            var found = admin.describeCluster(new DescribeClusterOptions().includeAuthorizedOperations(true));
            return sorted(get(found.nodes()).stream().map(Node::id).toList()) + ", id of " + get(found.clusterId()).length()
                + " characters, may " + sorted(get(found.authorizedOperations()));
        });
        call("describeFeatures", () -> get(admin.describeFeatures().featureMetadata()).finalizedFeatures().keySet().stream()
            .filter(name -> Set.of("transaction.version", "group.version").contains(name)).sorted().toList());
        call("updateFeatures, unknown", () -> get(admin.updateFeatures(
            Map.of("unknown.version", new FeatureUpdate((short) 1, FeatureUpdate.UpgradeType.UPGRADE)), new UpdateFeaturesOptions()).all()));
        call("updateFeatures, disable unknown", () -> get(admin.updateFeatures(
            Map.of("unknown.version", new FeatureUpdate((short) 0, FeatureUpdate.UpgradeType.SAFE_DOWNGRADE)),
            new UpdateFeaturesOptions().validateOnly(true)).all()));
        call("describeMetadataQuorum", () -> {
            QuorumInfo quorum = get(admin.describeMetadataQuorum().quorumInfo());
            boolean leads = quorum.voters().stream().anyMatch(voter -> voter.replicaId() == quorum.leaderId());
            long lag = quorum.voters().stream().mapToLong(voter -> quorum.highWatermark() - voter.logEndOffset()).max().getAsLong();
            return "the leader votes: " + leads + ", epoch " + (quorum.leaderEpoch() > 0) + ", small lag " + (lag < 1000)
                + ", every voter has a directory: " + quorum.voters().stream().allMatch(voter -> voter.replicaDirectoryId() != null);
        });
        call("addRaftVoter", () -> get(admin.addRaftVoter(9, Uuid.randomUuid(), Set.of(new RaftVoterEndpoint("CONTROLLER", "127.0.0.1", 1))).all()));
        call("removeRaftVoter", () -> get(admin.removeRaftVoter(9, Uuid.randomUuid()).all()));
        call("unregisterBroker, unknown", () -> get(admin.unregisterBroker(99).all()));
        TopicPartition first = new TopicPartition(topic, 0), second = new TopicPartition(topic, 1);
        call("describeLogDirs", () -> {
            var found = get(admin.describeLogDirs(List.of(1, 2)).allDescriptions());
            var sizes = found.values().stream().flatMap(dirs -> dirs.values().stream()).map(LogDirDescription::replicaInfos)
                .filter(replicas -> replicas.containsKey(first)).mapToLong(replicas -> replicas.get(first).size()).filter(size -> size > 0);
            return "brokers " + sorted(found.keySet()) + ", bytes of the topic " + (sizes.count() > 0);
        });
        call("describeReplicaLogDirs", () -> get(admin.describeReplicaLogDirs(List.of(new TopicPartitionReplica(topic, 0, 1))).all())
            .values().stream().map(one -> one.getCurrentReplicaLogDir() != null).toList());
        call("alterReplicaLogDirs", () -> get(admin.alterReplicaLogDirs(Map.of(new TopicPartitionReplica(topic, 0, 1), "/nowhere")).all()));
        call("describeTransactions, unknown", () -> get(admin.describeTransactions(List.of("unknown")).all()));
        var none = new ListTransactionsOptions().filterOnTransactionalIdPattern(topic + ".*");
        call("listTransactions", () -> get(admin.listTransactions(none).all()).size());
        call("fenceProducers", () -> get(admin.fenceProducers(List.of("fenced")).all()));
        call("forceTerminateTransaction", () -> get(admin.forceTerminateTransaction("fenced").result()));
        call("abortTransaction, unknown producer", () -> get(admin.abortTransaction(new AbortTransactionSpec(second, 12345, (short) 0, 0)).all()));
        call("listOffsets, after an abort", () -> get(admin.listOffsets(Map.of(second, OffsetSpec.latest())).all()).get(second).offset());
    }

    static void acls() {
        AclBinding binding = new AclBinding(new ResourcePattern(ResourceType.TOPIC, "any", PatternType.LITERAL),
            new AccessControlEntry("User:any", "*", AclOperation.READ, AclPermissionType.ALLOW));
        call("describeAcls", () -> get(admin.describeAcls(AclBindingFilter.ANY).values()));
        call("createAcls", () -> get(admin.createAcls(List.of(binding)).all()));
        call("deleteAcls", () -> get(admin.deleteAcls(List.of(binding.toFilter())).all()));
    }

    static void owners(String topic) throws Exception {
        TopicPartition first = new TopicPartition(topic, 0), unknown = new TopicPartition(topic, 99);
        call("electLeaders, preferred", () -> get(admin.electLeaders(ElectionType.PREFERRED, Set.of(first)).partitions())
            .get(first).map(failure -> failure.getClass().getSimpleName()).orElse("none"));
        call("electLeaders, unknown", () -> get(admin.electLeaders(ElectionType.PREFERRED, Set.of(unknown)).partitions())
            .get(unknown).map(failure -> failure.getClass().getSimpleName()).orElse("none"));
        call("electLeaders, unclean", () -> get(admin.electLeaders(ElectionType.UNCLEAN, Set.of(first)).partitions())
            .get(first).map(failure -> failure.getClass().getSimpleName()).orElse("none"));
        call("electLeaders, all", () -> get(admin.electLeaders(ElectionType.PREFERRED, null).partitions()).size() >= 0);
        call("alterPartitionReassignments", () -> {
            get(admin.alterPartitionReassignments(Map.of(first, Optional.of(new NewPartitionReassignment(List.of(2, 1))))).all());
            return "replicas " + until(() -> {
                var found = get(admin.describeTopics(List.of(topic)).allTopicNames()).get(topic).partitions().get(0);
                return found.replicas().stream().map(Node::id).toList();
            }, List.of(2, 1));
        });
        call("electLeaders, moved", () -> {
            get(admin.electLeaders(ElectionType.PREFERRED, Set.of(first)).partitions());
            return "led by " + until(() -> get(admin.describeTopics(List.of(topic)).allTopicNames()).get(topic).partitions().get(0).leader().id(), 2);
        });
        call("listPartitionReassignments", () -> get(admin.listPartitionReassignments().reassignments()));
        Map<String, Optional<NewPartitionReassignment>> bad = new LinkedHashMap<>();
        bad.put("cancel none", Optional.empty());
        bad.put("unknown broker", Optional.of(new NewPartitionReassignment(List.of(99))));
        bad.put("a broker twice", Optional.of(new NewPartitionReassignment(List.of(1, 1))));
        bad.forEach((name, wanted) -> call("alterPartitionReassignments, " + name, () -> get(admin.alterPartitionReassignments(Map.of(first, wanted)).all())));
        call("alterPartitionReassignments, unknown", () -> get(admin.alterPartitionReassignments(
            Map.of(unknown, Optional.of(new NewPartitionReassignment(List.of(1))))).all()));
        call("alterPartitionReassignments, no other number of copies", () -> get(admin.alterPartitionReassignments(
            Map.of(first, Optional.of(new NewPartitionReassignment(List.of(1)))),
            new AlterPartitionReassignmentsOptions().allowReplicationFactorChange(false)).all()));
    }

    static <T> T until(Callable<T> look, T wanted) throws Exception {
        long deadline = System.nanoTime() + Duration.ofSeconds(120).toNanos();
        T seen = look.call();
        while (!seen.equals(wanted) && System.nanoTime() < deadline) {
            Thread.sleep(50);
            seen = look.call();
        }
        return seen;
    }

    /** Returns the first list with so many elements, or the last one seen. */
    static <T> List<T> filled(Callable<List<T>> look, int size) throws Exception {
        long deadline = System.nanoTime() + Duration.ofSeconds(120).toNanos();
        List<T> seen = look.call();
        while (seen.size() < size && System.nanoTime() < deadline) {
            Thread.sleep(50);
            seen = look.call();
        }
        return seen;
    }

    static void groups(String topic, String group) throws Exception {
        TopicPartition first = new TopicPartition(topic, 0);
        Map<String, Object> settings = new HashMap<>(properties);
        settings.putAll(Map.of("group.id", group, "auto.offset.reset", "earliest", "group.instance.id", "instance-1"));
        try (Consumer<byte[], byte[]> consumer = new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            consumer.subscribe(List.of(topic));
            while (consumer.poll(Duration.ofMillis(200)).isEmpty()) { }
            consumer.commitSync();
            call("listGroups", () -> get(admin.listGroups().all()).stream().filter(one -> one.groupId().equals(group))
                .map(one -> one.type().get() + " " + one.protocol() + " " + one.groupState().get()).toList());
            call("listConsumerGroups", () -> get(admin.listConsumerGroups().all()).stream().filter(one -> one.groupId().equals(group)).count());
            call("describeConsumerGroups", () -> {
                var found = get(admin.describeConsumerGroups(List.of(group), new DescribeConsumerGroupsOptions()
                    .includeAuthorizedOperations(true)).all()).get(group);
                return found.groupState() + ", " + found.members().size() + " member, " + found.members().iterator().next().assignment()
                    .topicPartitions().size() + " partitions, " + found.partitionAssignor() + ", may " + sorted(found.authorizedOperations());
            });
            call("describeClassicGroups", () -> get(admin.describeClassicGroups(List.of(group)).all()).get(group).state());
            call("deleteConsumerGroups, not empty", () -> get(admin.deleteConsumerGroups(List.of(group)).all()));
            call("alterConsumerGroupOffsets, not empty", () -> get(admin.alterConsumerGroupOffsets(group, Map.of(first, new OffsetAndMetadata(1))).all()));
            call("deleteConsumerGroupOffsets, subscribed", () -> get(admin.deleteConsumerGroupOffsets(group, Set.of(first)).all()));
            call("removeMembersFromConsumerGroup", () -> get(admin.removeMembersFromConsumerGroup(group,
                new RemoveMembersFromConsumerGroupOptions(Set.of(new MemberToRemove("instance-1")))).all()));
        }
        call("listConsumerGroupOffsets", () -> get(admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata()).get(first).offset());
        call("alterConsumerGroupOffsets", () -> {
            get(admin.alterConsumerGroupOffsets(group, Map.of(first, new OffsetAndMetadata(3, "note"))).all());
            OffsetAndMetadata found = get(admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata()).get(first);
            return found.offset() + " " + found.metadata();
        });
        call("deleteConsumerGroupOffsets", () -> get(admin.deleteConsumerGroupOffsets(group, Set.of(first)).all()));
        call("deleteConsumerGroups", () -> get(admin.deleteConsumerGroups(List.of(group)).all()));
        call("deleteConsumerGroups, unknown", () -> get(admin.deleteConsumerGroups(List.of(group)).all()));
        call("describeConsumerGroups, unknown", () -> get(admin.describeConsumerGroups(List.of("unknown")).all()));
        call("describeClassicGroups, unknown", () -> get(admin.describeClassicGroups(List.of("unknown")).all()));
    }

    static void configs(String topic, String group) throws Exception {
        ConfigResource ofTopic = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        ConfigResource ofBroker = new ConfigResource(ConfigResource.Type.BROKER, "1");
        ConfigResource ofAll = new ConfigResource(ConfigResource.Type.BROKER, "");
        ConfigResource ofGroup = new ConfigResource(ConfigResource.Type.GROUP, group);
        ConfigResource ofMetrics = new ConfigResource(ConfigResource.Type.CLIENT_METRICS, group);
        alter(ofTopic, "set", set("segment.bytes", "2000000"));
        alter(ofTopic, "bad value", set("segment.bytes", "1"));
        alter(ofTopic, "unknown", set("no.such.config", "1"));
        alter(new ConfigResource(ConfigResource.Type.TOPIC, "unknown"), "unknown topic", set("segment.bytes", "2000000"));
        alter(ofAll, "defaults of all", set("log.roll.jitter.ms", "1234"));
        // The next request may go to another broker, which has to know of the change.
        for (String broker : List.of("1", "2")) {
            ConfigResource one = new ConfigResource(ConfigResource.Type.BROKER, broker);
            until(() -> String.valueOf(get(admin.describeConfigs(List.of(one)).all()).get(one).get("log.roll.jitter.ms").value()), "1234");
        }
        alter(ofAll, "delete defaults", delete("log.roll.jitter.ms"));
        alter(ofBroker, "delete a throttle", delete("leader.replication.throttled.rate"));
        alter(ofGroup, "group", set("consumer.session.timeout.ms", "50000"));
        alter(ofGroup, "group, too short", set("consumer.session.timeout.ms", "1"));
        alter(ofGroup, "group, unknown", set("no.such.config", "1"));
        alter(ofMetrics, "client metrics", set("interval.ms", "1000"), set("metrics", "org.apache.kafka.producer."),
            set("match", "client_software_name=nobody"));
        alter(ofMetrics, "client metrics, too often", set("interval.ms", "1"));
        alter(ofMetrics, "client metrics, bad match", set("match", "colour=blue"));
        alter(ofMetrics, "client metrics, unknown", set("no.such.config", "1"));
        Map<ConfigResource, Integer> given = Map.of(ofTopic, 2, ofGroup, 1, ofMetrics, 3);
        for (ConfigResource resource : List.of(ofTopic, ofGroup, ofMetrics)) {
            call("describeConfigs, " + resource.type(), () -> filled(() -> get(admin.describeConfigs(List.of(resource)).all()).get(resource).entries().stream()
                .filter(entry -> OWN.contains(entry.source()))
                .map(entry -> entry.name() + "=" + entry.value() + " of " + entry.source()).sorted().toList(), given.get(resource)));
        }
        call("describeConfigs, BROKER", () -> get(admin.describeConfigs(List.of(ofBroker)).all()).get(ofBroker).get("broker.id").value());
        call("describeConfigs, unknown topic", () -> get(admin.describeConfigs(List.of(new ConfigResource(ConfigResource.Type.TOPIC, "unknown"))).all()));
        call("listConfigResources", () -> filled(() -> get(admin.listConfigResources().all()).stream()
            .filter(one -> List.of(ofTopic, ofBroker, ofGroup, ofMetrics).contains(one)).map(one -> one.type()).sorted().toList(), 4));
        call("listClientMetricsResources", () -> until(() -> get(admin.listClientMetricsResources().all()).stream().anyMatch(one -> one.name().equals(group)), true));
        alter(ofGroup, "delete group's", delete("consumer.session.timeout.ms"));
        alter(ofMetrics, "delete client metrics", delete("interval.ms"), delete("metrics"), delete("match"));
    }

    static AlterConfigOp set(String name, String value) {
        return new AlterConfigOp(new ConfigEntry(name, value), AlterConfigOp.OpType.SET);
    }

    static AlterConfigOp delete(String name) {
        return new AlterConfigOp(new ConfigEntry(name, ""), AlterConfigOp.OpType.DELETE);
    }

    static void alter(ConfigResource resource, String what, AlterConfigOp... operations) {
        call("incrementalAlterConfigs, " + what, () -> get(admin.incrementalAlterConfigs(Map.of(resource, List.of(operations))).all()));
    }

    static void instance() {
        call("clientInstanceId", () -> admin.clientInstanceId(Duration.ofSeconds(120)) != null);
        call("metrics", () -> !admin.metrics().isEmpty());
        var metric = new org.apache.kafka.common.metrics.KafkaMetric(new Object(),
            new MetricName("own", "own", "", Map.of()), (org.apache.kafka.common.metrics.Gauge<Integer>) (config, now) -> 1,
            new org.apache.kafka.common.metrics.MetricConfig(), org.apache.kafka.common.utils.Time.SYSTEM);
        call("registerMetricForSubscription", () -> { admin.registerMetricForSubscription(metric); return "none"; });
        call("unregisterMetricFromSubscription", () -> { admin.unregisterMetricFromSubscription(metric); return "none"; });
    }
}
