// kafkajs brings only gzip: codecs from other packages are registered for snappy, lz4 and zstd.

const { CompressionCodecs, CompressionTypes, Kafka, logLevel } = require("kafkajs");
const lz4 = require("lz4-napi");
const zstd = require("@mongodb-js/zstd");
const { run } = require("./contract.js");

CompressionCodecs[CompressionTypes.Snappy] = require("kafkajs-snappy");
CompressionCodecs[CompressionTypes.LZ4] = () => ({
  compress: (encoder) => lz4.compressFrame(encoder.buffer),
  decompress: (buffer) => lz4.decompressFrame(buffer),
});
CompressionCodecs[CompressionTypes.ZSTD] = () => ({
  compress: (encoder) => zstd.compress(encoder.buffer),
  decompress: (buffer) => zstd.decompress(buffer),
});
const codecs = { none: 0, gzip: 1, snappy: 2, lz4: 3, zstd: 4 };

const [bootstrap, prefix] = process.argv.slice(2);
const kafka = new Kafka({ brokers: bootstrap.split(","), logLevel: logLevel.NOTHING, retry: { retries: 10, maxRetryTime: 2000 } });
const admin = kafka.admin();

function producer(codec, transactionalId) {
  const made = kafka.producer({ idempotent: true, maxInFlightRequests: 1, transactionalId, allowAutoTopicCreation: false });
  const { send } = made;
  return { ...made, send: (record) => send({ ...record, acks: -1, compression: codecs[codec] }) };
}

function consumer(groupId) {
  const made = kafka.consumer({ groupId, heartbeatInterval: 500, maxWaitTimeInMs: 200 });
  const { subscribe } = made;
  return { ...made, subscribe: (topics) => subscribe({ ...topics, fromBeginning: true }) };
}

function assigned(member) {
  let count = 0;
  member.on(member.events.GROUP_JOIN, ({ payload }) => (count = Object.values(payload.memberAssignment).flat().length));
  return () => count;
}

const client = {
  connect: () => admin.connect(),
  disconnect: () => admin.disconnect(),
  async create(topic, numPartitions, replicationFactor) {
    const made = await admin.createTopics({ topics: [{ topic, numPartitions, replicationFactor }] });
    if (!made) throw new Error("TOPIC_ALREADY_EXISTS");
    return "done";
  },
  async describe(topic) {
    const [{ partitions }] = (await admin.fetchTopicMetadata({ topics: [topic] })).topics;
    return `${partitions.length} partitions, ${partitions[0].replicas.length} replicas`;
  },
  async remove(topic) {
    await admin.deleteTopics({ topics: [topic] });
    return "done";
  },
  producer,
  consumer,
  assigned,
  options: { autoCommit: false },
  async sendPositions(transaction, _, consumerGroupId, topic, positions) {
    await transaction.sendOffsets({ consumerGroupId, topics: [{ topic, partitions: positions }] });
  },
  name: (error) => error.type ?? error.cause?.type ?? error.message,
};

run(client, prefix);
