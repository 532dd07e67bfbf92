// IBM/sarama.
package main

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"ecosystem/contract"

	"github.com/IBM/sarama"
)

var codecs = map[string]sarama.CompressionCodec{
	"none": sarama.CompressionNone, "gzip": sarama.CompressionGZIP, "snappy": sarama.CompressionSnappy,
	"lz4": sarama.CompressionLZ4, "zstd": sarama.CompressionZSTD,
}

type client struct {
	bootstrap []string
	admin     sarama.ClusterAdmin
}

func main() {
	contract.Run(func(bootstrap string) contract.Client {
		addresses := strings.Split(bootstrap, ",")
		admin, err := sarama.NewClusterAdmin(addresses, settings())
		if err != nil {
			panic(err)
		}
		return &client{addresses, admin}
	})
}

func settings() *sarama.Config {
	config := sarama.NewConfig()
	config.Version = sarama.MaxVersion
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Producer.Return.Successes = true
	config.Producer.Partitioner = sarama.NewManualPartitioner
	config.Producer.MaxMessageBytes = 4_000_000
	config.Producer.Idempotent = true
	config.Net.MaxOpenRequests = 1
	config.Consumer.IsolationLevel = sarama.ReadCommitted
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.Offsets.AutoCommit.Enable = false
	config.Consumer.Group.Heartbeat.Interval = 500 * time.Millisecond
	return config
}

func (c *client) Create(topic string, partitions, copies int) error {
	detail := &sarama.TopicDetail{NumPartitions: int32(partitions), ReplicationFactor: int16(copies)}
	return c.admin.CreateTopic(topic, detail, false)
}

func (c *client) Describe(topic string) (int, int, error) {
	found, err := c.admin.DescribeTopics([]string{topic})
	if err != nil {
		return 0, 0, err
	}
	if found[0].Err != sarama.ErrNoError {
		return 0, 0, found[0].Err
	}
	return len(found[0].Partitions), len(found[0].Partitions[0].Replicas), nil
}

func (c *client) Delete(topic string) error { return c.admin.DeleteTopic(topic) }

func (c *client) Produce(topic, codec string, records []contract.Record) error {
	config := settings()
	config.Producer.Compression = codecs[codec]
	opened, err := sarama.NewSyncProducer(c.bootstrap, config)
	if err != nil {
		return err
	}
	defer opened.Close()
	return send(opened, topic, records)
}

func send(opened sarama.SyncProducer, topic string, records []contract.Record) error {
	made := make([]*sarama.ProducerMessage, len(records))
	for number, each := range records {
		made[number] = &sarama.ProducerMessage{
			Topic: topic, Partition: int32(each.Partition), Key: sarama.StringEncoder(each.Key), Value: sarama.StringEncoder(each.Value),
			Headers: []sarama.RecordHeader{{Key: []byte("codec"), Value: []byte(each.Header)}},
		}
	}
	return opened.SendMessages(made)
}

// A consumer is also the handler of its group's sessions.
type consumer struct {
	group    sarama.ConsumerGroup
	cancel   context.CancelFunc
	ended    chan struct{}
	arrived  chan *sarama.ConsumerMessage
	mutex    sync.Mutex
	session  sarama.ConsumerGroupSession
	topic    string
	assigned int
}

func (c *client) Consumer(group, topic string) (contract.Consumer, error) {
	return c.join(group, topic)
}

func (c *client) join(group, topic string) (*consumer, error) {
	joined, err := sarama.NewConsumerGroup(c.bootstrap, group, settings())
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	made := &consumer{
		group: joined, cancel: cancel, ended: make(chan struct{}), arrived: make(chan *sarama.ConsumerMessage), topic: topic,
	}
	go func() {
		defer close(made.ended)
		for ctx.Err() == nil {
			if joined.Consume(ctx, []string{topic}, made) != nil {
				time.Sleep(100 * time.Millisecond)
			}
		}
	}()
	return made, nil
}

func (c *consumer) Setup(session sarama.ConsumerGroupSession) error {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.session, c.assigned = session, len(session.Claims()[c.topic])
	return nil
}

func (c *consumer) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (c *consumer) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for {
		select {
		case message, open := <-claim.Messages():
			if !open {
				return nil
			}
			select {
			case c.arrived <- message:
			case <-session.Context().Done():
				return nil
			}
		case <-session.Context().Done():
			return nil
		}
	}
}

func (c *consumer) messages() []*sarama.ConsumerMessage {
	found, late := []*sarama.ConsumerMessage{}, time.After(500*time.Millisecond)
	for len(found) < 100 {
		select {
		case message := <-c.arrived:
			found = append(found, message)
			c.session.MarkMessage(message, "")
		case <-late:
			return found
		}
	}
	return found
}

func record(message *sarama.ConsumerMessage) contract.Record {
	return contract.Record{
		Partition: int(message.Partition), Key: string(message.Key), Value: string(message.Value),
		Header: string(message.Headers[0].Value),
	}
}

func (c *consumer) Poll() ([]contract.Record, error) {
	messages := c.messages()
	found := make([]contract.Record, len(messages))
	for number, message := range messages {
		found[number] = record(message)
	}
	return found, nil
}

func (c *consumer) Commit() error {
	c.session.Commit()
	return nil
}

func (c *consumer) Assigned() int {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.assigned
}

func (c *consumer) Close() error {
	c.cancel()
	<-c.ended
	return c.group.Close()
}

type producer struct{ sarama.SyncProducer }

func (c *client) Producer(id string) (contract.Producer, error) {
	config := settings()
	config.Producer.Transaction.ID = id
	opened, err := sarama.NewSyncProducer(c.bootstrap, config)
	return producer{opened}, err
}

func (p producer) Begin() error { return p.BeginTxn() }

func (p producer) Send(topic string, records []contract.Record) error {
	return send(p.SyncProducer, topic, records)
}

func (p producer) Commit() error { return p.CommitTxn() }

func (p producer) Abort() error { return p.AbortTxn() }

func (c *client) Transform(id, group, source, target string, count int) (int, error) {
	made, err := c.Producer(id)
	if err != nil {
		return 0, err
	}
	defer made.Close()
	writer := made.(producer)
	reader, err := c.join(group, source)
	if err != nil {
		return 0, err
	}
	defer reader.Close()
	copied := 0
	for deadline := time.Now().Add(30 * time.Second); copied < count && time.Now().Before(deadline); {
		messages := reader.messages()
		if len(messages) == 0 {
			continue
		}
		records := make([]contract.Record, len(messages))
		for number, message := range messages {
			records[number] = record(message)
		}
		err := errors.Join(writer.Begin(), writer.Send(target, records))
		for _, message := range messages {
			err = errors.Join(err, writer.AddMessageToTxn(message, group, nil))
		}
		if err := errors.Join(err, writer.Commit()); err != nil {
			return copied, err
		}
		copied += len(messages)
	}
	return copied, nil
}

func (c *client) Name(err error) string {
	var many sarama.ProducerErrors
	if errors.As(err, &many) && len(many) > 0 {
		err = many[0].Err
	}
	var topic *sarama.TopicError
	if errors.As(err, &topic) {
		err = topic.Err
	}
	var known sarama.KError
	if errors.As(err, &known) {
		return known.Error()
	}
	return err.Error()
}
