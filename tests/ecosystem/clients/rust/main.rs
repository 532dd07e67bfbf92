// The same steps as the Go clients' contract with the rdkafka crate. Prints one line per step: its name, a tab, its outcome.

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::message::{Header, Headers, Message, OwnedHeaders};
use rdkafka::producer::{BaseRecord, Producer, ProducerContext, ThreadedProducer};
use rdkafka::{ClientContext, Offset, TopicPartitionList};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PARTITIONS: usize = 4;
const RECORDS_OF_CODEC: usize = 200;
const CODECS: [&str; 5] = ["none", "gzip", "snappy", "lz4", "zstd"];
const ALL: usize = CODECS.len() * RECORDS_OF_CODEC;
const TIMEOUT: Duration = Duration::from_secs(60);

type Outcome = Result<String, KafkaError>;

#[derive(Clone, PartialEq)]
struct Record {
    partition: i32,
    key: String,
    value: String,
    codec: String,
}

fn records(codec: &str) -> Vec<Record> {
    (0..RECORDS_OF_CODEC)
        .map(|number| {
            let text = format!("{codec} {number} ");
            let (partition, value) = ((number % PARTITIONS) as i32, text.repeat(20));
            Record { partition, key: text, value, codec: codec.into() }
        })
        .collect()
}

fn in_order(found: &[Record]) -> String {
    let mut expected: HashMap<i32, VecDeque<Record>> = HashMap::new();
    for each in CODECS.iter().flat_map(|codec| records(codec)) {
        expected.entry(each.partition).or_default().push_back(each);
    }
    for each in found {
        if expected.get_mut(&each.partition).and_then(VecDeque::pop_front).as_ref() != Some(each) {
            return format!("{} records, out of order at {:?}", found.len(), each.key);
        }
    }
    format!("{} records in order", found.len())
}

/// Remembers the first error of a delivery.
#[derive(Default, Clone)]
struct Deliveries(Arc<Mutex<Option<KafkaError>>>);

impl ClientContext for Deliveries {
    fn log(&self, _: rdkafka::config::RDKafkaLogLevel, _: &str, _: &str) {}
    fn error(&self, _: KafkaError, _: &str) {}
}

impl ProducerContext for Deliveries {
    type DeliveryOpaque = ();
    fn delivery(&self, result: &rdkafka::producer::DeliveryResult<'_>, _: ()) {
        if let Err((error, _)) = result {
            self.0.lock().unwrap().get_or_insert(error.clone());
        }
    }
}

struct Cluster {
    bootstrap: String,
    prefix: String,
    admin: AdminClient<DefaultClientContext>,
    runtime: tokio::runtime::Runtime,
}

struct Writer {
    producer: ThreadedProducer<Deliveries>,
    deliveries: Deliveries,
}

impl Writer {
    fn send(&self, topic: &str, records: &[Record]) -> KafkaResult<()> {
        for each in records {
            let headers = OwnedHeaders::new().insert(Header { key: "codec", value: Some(&each.codec) });
            let record = BaseRecord::to(topic).partition(each.partition).key(&each.key).payload(&each.value);
            self.producer.send(record.headers(headers)).map_err(|(error, _)| error)?;
        }
        self.producer.flush(TIMEOUT)?;
        self.deliveries.0.lock().unwrap().take().map_or(Ok(()), Err)
    }
}

impl Cluster {
    fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.bootstrap).set("log_level", "0");
        config
    }

    fn writer(&self, codec: &str, id: Option<&str>) -> KafkaResult<Writer> {
        let mut config = self.config();
        config.set("enable.idempotence", "true").set("compression.type", codec).set("message.max.bytes", "4000000");
        if let Some(id) = id {
            config.set("transactional.id", format!("{}-{id}", self.prefix));
        }
        let deliveries = Deliveries::default();
        let producer: ThreadedProducer<Deliveries> = config.create_with_context(deliveries.clone())?;
        if id.is_some() {
            producer.init_transactions(TIMEOUT)?;
        }
        Ok(Writer { producer, deliveries })
    }

    fn member(&self, group: &str, topic: &str) -> KafkaResult<BaseConsumer> {
        let mut config = self.config();
        config.set("group.id", format!("{}-{group}", self.prefix)).set("auto.offset.reset", "earliest");
        config.set("enable.auto.commit", "false").set("heartbeat.interval.ms", "500");
        let member: BaseConsumer = config.create()?;
        member.subscribe(&[topic])?;
        Ok(member)
    }

    fn create(&self, topic: &str) -> Outcome {
        let new = NewTopic::new(topic, PARTITIONS as i32, TopicReplication::Fixed(2));
        let answer = self.runtime.block_on(self.admin.create_topics(&[new], &AdminOptions::new()))?;
        done(&answer[0])
    }

    /// Asks as a consumer: the metadata requests of other clients create the topic.
    fn describe(&self, topic: &str) -> Outcome {
        let consumer: BaseConsumer = self.config().create()?;
        let found = consumer.fetch_metadata(Some(topic), TIMEOUT)?;
        if let Some(error) = found.topics()[0].error() {
            return Err(KafkaError::MetadataFetch(error.into()));
        }
        let partitions = found.topics()[0].partitions();
        Ok(format!("{} partitions, {} replicas", partitions.len(), partitions[0].replicas().len()))
    }

    fn delete(&self, topic: &str) -> Outcome {
        let answer = self.runtime.block_on(self.admin.delete_topics(&[topic], &AdminOptions::new()))?;
        done(&answer[0])
    }

    fn produce(&self, topic: &str, codec: &str, records: &[Record]) -> Outcome {
        self.writer(codec, None)?.send(topic, records)?;
        Ok("acknowledged".into())
    }

    fn read_all(&self, group: &str, topic: &str, count: usize) -> KafkaResult<Vec<Record>> {
        let member = self.member(group, topic)?;
        let mut found = poll(&member, count)?.0;
        found.extend(poll_once(&member, Duration::from_secs(1))?.map(|(record, _)| record));
        Ok(found)
    }

    fn rebalance(&self, topic: &str) -> Outcome {
        let first = self.member("pair", topic)?;
        until_assigned(&[&first], PARTITIONS)?;
        let second = self.member("pair", topic)?;
        until_assigned(&[&first, &second], PARTITIONS / 2)?;
        drop(second);
        until_assigned(&[&first], PARTITIONS)?;
        Ok("4 partitions, 2 and 2, 4".into())
    }

    fn resume(&self, topic: &str) -> Outcome {
        let mut all = Vec::new();
        for count in [ALL / 3, ALL - ALL / 3] {
            let member = self.member("resumed", topic)?;
            let (found, positions) = poll(&member, count)?;
            all.extend(found);
            member.commit(&positions, CommitMode::Sync)?;
        }
        Ok(in_order(&all))
    }

    fn transact(&self) -> Outcome {
        let topic = format!("{}-transactions", self.prefix);
        self.create(&topic)?;
        let writer = self.writer("none", Some("writer"))?;
        for name in ["first", "aborted", "second"] {
            writer.producer.begin_transaction()?;
            writer.send(&topic, &records(name))?;
            match name {
                "aborted" => writer.producer.abort_transaction(TIMEOUT)?,
                _ => writer.producer.commit_transaction(TIMEOUT)?,
            }
        }
        let found = self.read_all("committed", &topic, 2 * RECORDS_OF_CODEC)?;
        let aborted = found.iter().filter(|each| each.codec == "aborted").count();
        Ok(format!("{} records, {aborted} of them aborted", found.len()))
    }

    fn transform(&self, source: &str) -> Outcome {
        let target = format!("{}-target", self.prefix);
        self.create(&target)?;
        let mut copied = 0;
        for end in [ALL / 3, ALL] {
            let writer = self.writer("none", Some("transformer"))?;
            let member = self.member("transformed", source)?;
            while copied < end {
                let (found, positions) = poll(&member, usize::min(100, end - copied))?;
                if found.is_empty() {
                    break;
                }
                writer.producer.begin_transaction()?;
                writer.send(&target, &found)?;
                let metadata = member.group_metadata().expect("a member of a group");
                writer.producer.send_offsets_to_transaction(&positions, &metadata, TIMEOUT)?;
                writer.producer.commit_transaction(TIMEOUT)?;
                copied += found.len();
            }
        }
        Ok(in_order(&self.read_all("check", &target, ALL)?))
    }

    fn fenced(&self, topic: &str) -> Outcome {
        let first = self.writer("none", Some("fenced"))?;
        first.producer.begin_transaction()?;
        first.send(topic, &records("none")[..1])?;
        let _second = self.writer("none", Some("fenced"))?;
        first.producer.commit_transaction(TIMEOUT)?;
        Ok("done".into())
    }

    fn deleted(&self, topic: &str) -> Outcome {
        let deadline = Instant::now() + TIMEOUT / 4;
        while Instant::now() < deadline {
            self.describe(topic)?;
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok("found".into())
    }
}

fn done(answer: &Result<String, (String, RDKafkaErrorCode)>) -> Outcome {
    match answer {
        Ok(_) => Ok("done".into()),
        Err((_, code)) => Err(KafkaError::AdminOp(*code)),
    }
}

fn poll_once(member: &BaseConsumer, wait: Duration) -> KafkaResult<Option<(Record, i64)>> {
    let Some(message) = member.poll(wait).transpose()? else { return Ok(None) };
    let text = |bytes: Option<&[u8]>| String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned();
    let codec = text(message.headers().and_then(|headers| headers.get(0).value));
    let record = Record { partition: message.partition(), key: text(message.key()), value: text(message.payload()), codec };
    Ok(Some((record, message.offset())))
}

/// Returns count records, or fewer after a time-out, and the positions behind them.
fn poll(member: &BaseConsumer, count: usize) -> KafkaResult<(Vec<Record>, TopicPartitionList)> {
    let (mut found, mut behind, deadline) = (Vec::new(), HashMap::new(), Instant::now() + TIMEOUT);
    while found.len() < count && Instant::now() < deadline {
        if let Some((record, offset)) = poll_once(member, Duration::from_millis(200))? {
            behind.insert(record.partition, offset + 1);
            found.push(record);
        }
    }
    let mut positions = TopicPartitionList::new();
    let topic = member.subscription()?.elements()[0].topic().to_owned();
    for (partition, offset) in behind {
        positions.add_partition_offset(&topic, partition, Offset::Offset(offset))?;
    }
    Ok((found, positions))
}

fn until_assigned(members: &[&BaseConsumer], count: usize) -> KafkaResult<()> {
    let deadline = Instant::now() + TIMEOUT;
    while Instant::now() < deadline {
        for member in members {
            poll_once(member, Duration::from_millis(20))?;
        }
        let counts = members.iter().map(|member| member.assignment().map(|found| found.count()));
        if counts.collect::<KafkaResult<Vec<_>>>()?.iter().all(|found| *found == count) {
            return Ok(());
        }
    }
    Err(KafkaError::Subscription(format!("no member got its {count} partitions")))
}

fn name(error: &KafkaError) -> String {
    match error {
        KafkaError::AdminOp(code) => format!("{code:?}"),
        _ => error.rdkafka_error_code().map_or_else(|| error.to_string(), |code| format!("{code:?}")),
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let (bootstrap, prefix) = (arguments[1].clone(), arguments[2].clone());
    let admin = ClientConfig::new().set("bootstrap.servers", &bootstrap).create().expect("an admin client");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let cluster = Cluster { bootstrap, prefix, admin, runtime };
    let step = |name_of_step: &str, action: &dyn Fn() -> Outcome| {
        println!("{name_of_step}\t{}", action().unwrap_or_else(|error| name(&error)));
    };
    let topic = format!("{}-records", cluster.prefix);
    step("create a topic", &|| cluster.create(&topic));
    step("create it again", &|| cluster.create(&topic));
    step("describe it", &|| cluster.describe(&topic));
    for codec in CODECS {
        step(&format!("produce, {codec}"), &|| cluster.produce(&topic, codec, &records(codec)));
    }
    step("consume", &|| Ok(in_order(&cluster.read_all("all", &topic, ALL)?)));
    step("join and leave a group", &|| cluster.rebalance(&topic));
    step("commit and resume", &|| cluster.resume(&topic));
    step("commit and abort transactions", &|| cluster.transact());
    step("consume, transform, produce", &|| cluster.transform(&topic));
    step("commit when fenced", &|| cluster.fenced(&topic));
    step("produce 2 MB", &|| {
        let large = Record { partition: 0, key: "large".into(), value: "l".repeat(2_000_000), codec: "none".into() };
        cluster.produce(&topic, "none", &[large])
    });
    step("delete the topic", &|| cluster.delete(&topic));
    step("describe it then", &|| cluster.deleted(&topic));
}
