// The same steps as the Go clients' contract, for the two clients with KafkaJS's interface.
// Prints one line per step: its name, a tab, its outcome.

const PARTITIONS = 4;
const COPIES = 2;
const RECORDS_OF_CODEC = 200;
const TIMEOUT_MS = 60_000;
const CODECS = ["none", "gzip", "snappy", "lz4", "zstd"];
const ALL = CODECS.length * RECORDS_OF_CODEC;

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function records(codec) {
  return Array.from({ length: RECORDS_OF_CODEC }, (_, number) => {
    const text = `${codec} ${number} `;
    return { partition: number % PARTITIONS, key: text, value: text.repeat(20), headers: { codec } };
  });
}

const flat = (each) => JSON.stringify([each.partition, String(each.key), String(each.value), String(each.headers.codec)]);

function inOrder(found) {
  const expected = Array.from({ length: PARTITIONS }, () => []);
  for (const each of CODECS.flatMap(records)) expected[each.partition].push(flat(each));
  for (const each of found) {
    if (expected[each.partition].shift() !== flat(each)) return `${found.length} records, out of order at "${each.key}"`;
  }
  return `${found.length} records in order`;
}

async function until(condition, what) {
  for (const deadline = Date.now() + TIMEOUT_MS; Date.now() < deadline; await sleep(100)) if (condition()) return;
  throw new Error(`${what} within ${TIMEOUT_MS} ms`);
}

// A member of a group that keeps what it reads, up to a limit: then it waits with the next record.
class Member {
  constructor(client, group, limit = Infinity) {
    this.consumer = client.consumer(group);
    this.found = [];
    this.limit = limit;
    this.closed = false;
    this.options = client.options;
    this.assigned = client.assigned(this.consumer);
  }

  async join(topic, each = async () => {}) {
    await this.consumer.connect();
    await this.consumer.subscribe({ topics: [topic] });
    const eachMessage = async ({ partition, message }) => {
      while (this.found.length >= this.limit && !this.closed) await sleep(20);
      if (this.closed) throw new Error("closed");
      const record = { ...message, partition };
      this.found.push(record);
      await each(record);
    };
    await this.consumer.run({ ...this.options, eachMessage });
    return this;
  }

  positions(topic) {
    const behind = new Map(this.found.map((each) => [each.partition, String(BigInt(each.offset) + 1n)]));
    return [...behind].map(([partition, offset]) => ({ topic, partition, offset }));
  }

  async leave() {
    this.closed = true;
    await this.consumer.disconnect();
  }
}

async function withMember(member, action) {
  try {
    return await action(member);
  } finally {
    await member.leave();
  }
}

async function readAll(client, group, topic, count) {
  return withMember(await new Member(client, group).join(topic), async ({ found }) => {
    await until(() => found.length >= count, `no ${count} records`);
    await sleep(1000);
    return found;
  });
}

async function withProducer(producer, action) {
  await producer.connect();
  try {
    return await action(producer);
  } finally {
    await producer.disconnect();
  }
}

async function rebalance(client, group, topic) {
  return withMember(await new Member(client, group).join(topic), async (first) => {
    await until(() => first.assigned() === PARTITIONS, "not all partitions");
    await withMember(await new Member(client, group).join(topic), async (second) => {
      await until(() => first.assigned() === 2 && second.assigned() === 2, "not two partitions each");
    });
    await until(() => first.assigned() === PARTITIONS, "not all partitions again");
    return "4 partitions, 2 and 2, 4";
  });
}

async function resume(client, group, topic) {
  const found = [];
  for (const limit of [Math.floor(ALL / 3), Infinity]) {
    await withMember(await new Member(client, group, limit).join(topic), async (member) => {
      await until(() => member.found.length >= Math.min(limit, ALL - found.length), "not enough records");
      await member.consumer.commitOffsets(member.positions(topic));
      found.push(...member.found);
    });
  }
  return inOrder(found);
}

async function transact(client, prefix) {
  const topic = `${prefix}-transactions`;
  await client.create(topic, PARTITIONS, COPIES);
  await withProducer(client.producer("none", `${prefix}-writer`), async (producer) => {
    for (const name of ["first", "aborted", "second"]) {
      const transaction = await producer.transaction();
      await transaction.send({ topic, messages: records(name) });
      await (name === "aborted" ? transaction.abort() : transaction.commit());
    }
  });
  const found = await readAll(client, `${prefix}-committed`, topic, 2 * RECORDS_OF_CODEC);
  return `${found.length} records, ${found.filter((each) => String(each.headers.codec) === "aborted").length} of them aborted`;
}

async function transform(client, prefix, topic) {
  const [target, group] = [`${prefix}-target`, `${prefix}-transformed`];
  await client.create(target, PARTITIONS, COPIES);
  let copied = 0;
  for (const limit of [Math.floor(ALL / 3), Infinity]) {
    await withProducer(client.producer("none", `${prefix}-transformer`), async (producer) => {
      await withMember(await new Member(client, group, limit).join(topic), async (member) => {
        for (let taken = 0; copied < Math.min(limit, ALL); ) {
          await until(() => member.found.length > taken, "no records");
          const some = member.found.slice(taken);
          const transaction = await producer.transaction();
          await transaction.send({ topic: target, messages: some.map(({ partition, key, value, headers }) => ({ partition, key, value, headers })) });
          await client.sendPositions(transaction, member.consumer, group, topic, member.positions(topic));
          await transaction.commit();
          taken += some.length;
          copied += some.length;
        }
      });
    });
  }
  return inOrder(await readAll(client, `${prefix}-check`, target, ALL));
}

async function fenced(client, prefix, topic) {
  return withProducer(client.producer("none", `${prefix}-fenced`), async (first) => {
    const transaction = await first.transaction();
    await transaction.send({ topic, messages: records("none").slice(0, 1) });
    return withProducer(client.producer("none", `${prefix}-fenced`), async (second) => {
      // KafkaJS takes its producer id with the first transaction, others when they connect.
      await (await second.transaction()).abort();
      await transaction.commit();
      return "done";
    });
  });
}

async function deleted(client, topic) {
  for (const deadline = Date.now() + TIMEOUT_MS / 4; Date.now() < deadline; await sleep(100)) await client.describe(topic);
  return "found";
}

exports.CODECS = CODECS;

exports.run = async (client, prefix) => {
  const step = async (name, action) => {
    let outcome;
    try {
      outcome = await action();
    } catch (error) {
      outcome = client.name(error);
    }
    process.stdout.write(`${name}\t${outcome}\n`);
  };
  const topic = `${prefix}-records`;
  const produce = (codec, messages) => withProducer(client.producer(codec), (producer) => producer.send({ topic, messages }));
  await client.connect();
  await step("create a topic", () => client.create(topic, PARTITIONS, COPIES));
  await step("create it again", () => client.create(topic, PARTITIONS, COPIES));
  await step("describe it", () => client.describe(topic));
  for (const codec of CODECS) {
    await step(`produce, ${codec}`, async () => {
      await produce(codec, records(codec));
      return "acknowledged";
    });
  }
  await step("consume", async () => inOrder(await readAll(client, `${prefix}-all`, topic, ALL)));
  await step("join and leave a group", () => rebalance(client, `${prefix}-pair`, topic));
  await step("commit and resume", () => resume(client, `${prefix}-resumed`, topic));
  await step("commit and abort transactions", () => transact(client, prefix));
  await step("consume, transform, produce", () => transform(client, prefix, topic));
  await step("commit when fenced", () => fenced(client, prefix, topic));
  await step("produce 2 MB", async () => {
    await produce("none", [{ partition: 0, key: "large", value: "l".repeat(2_000_000), headers: { codec: "none" } }]);
    return "acknowledged";
  });
  await step("delete the topic", () => client.remove(topic));
  await step("describe it then", () => deleted(client, topic));
  await client.disconnect();
  process.exit(0);
};
