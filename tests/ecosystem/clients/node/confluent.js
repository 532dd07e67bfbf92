// @confluentinc/kafka-javascript, the successor of node-rdkafka, by its interface like KafkaJS's.

const { ErrorCodes, Kafka, logLevel } = require("@confluentinc/kafka-javascript").KafkaJS;
const { run } = require("./contract.js");

const [bootstrap, prefix] = process.argv.slice(2);
const kafka = new Kafka({ kafkaJS: { brokers: bootstrap.split(","), logLevel: logLevel.NOTHING } });
const admin = kafka.admin();

const names = Object.fromEntries(Object.entries(ErrorCodes).map(([name, code]) => [code, name.replace(/^ERR_/, "")]));

const client = {
  connect: () => admin.connect(),
  disconnect: () => admin.disconnect(),
  async create(topic, numPartitions, replicationFactor) {
    const made = await admin.createTopics({ topics: [{ topic, numPartitions, replicationFactor }] });
    if (!made) throw new Error("TOPIC_ALREADY_EXISTS");
    return "done";
  },
  async describe(topic) {
    const [{ partitions }] = await admin.fetchTopicMetadata({ topics: [topic] });
    return `${partitions.length} partitions, ${partitions[0].replicas.length} replicas`;
  },
  async remove(topic) {
    await admin.deleteTopics({ topics: [topic] });
    return "done";
  },
  producer: (compression, transactionalId) =>
    kafka.producer({
      kafkaJS: { idempotent: true, compression, ...(transactionalId && { transactionalId }) },
      "message.max.bytes": 4_000_000,
    }),
  consumer: (groupId) =>
    kafka.consumer({ kafkaJS: { groupId, fromBeginning: true, autoCommit: false }, "heartbeat.interval.ms": 500 }),
  options: {},
  assigned: (member) => () => member.assignment().length,
  async sendPositions(transaction, consumer, _, topic, positions) {
    await transaction.sendOffsets({ consumer, topics: [{ topic, partitions: positions }] });
  },
  name: (error) => names[error.code] ?? error.message,
};

run(client, prefix);
