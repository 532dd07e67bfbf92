// segmentio/kafka-go, which has no transactions.
package main

import (
	"context"
	"errors"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"ecosystem/contract"

	"github.com/segmentio/kafka-go"
)

var codecs = map[string]kafka.Compression{
	"none": 0, "gzip": kafka.Gzip, "snappy": kafka.Snappy, "lz4": kafka.Lz4, "zstd": kafka.Zstd,
}

type client struct {
	bootstrap []string
	requests  *kafka.Client
}

func main() {
	contract.Run(func(bootstrap string) contract.Client {
		addresses := strings.Split(bootstrap, ",")
		return &client{addresses, &kafka.Client{Addr: kafka.TCP(addresses...), Timeout: 30 * time.Second}}
	})
}

func (c *client) Create(topic string, partitions, copies int) error {
	config := kafka.TopicConfig{Topic: topic, NumPartitions: partitions, ReplicationFactor: copies}
	answer, err := c.requests.CreateTopics(context.Background(), &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{config}})
	if err != nil {
		return err
	}
	return answer.Errors[topic]
}

func (c *client) Describe(topic string) (int, int, error) {
	answer, err := c.requests.Metadata(context.Background(), &kafka.MetadataRequest{Topics: []string{topic}})
	if err != nil {
		return 0, 0, err
	}
	found := answer.Topics[0]
	if found.Error != nil {
		return 0, 0, found.Error
	}
	return len(found.Partitions), len(found.Partitions[0].Replicas), nil
}

func (c *client) Delete(topic string) error {
	answer, err := c.requests.DeleteTopics(context.Background(), &kafka.DeleteTopicsRequest{Topics: []string{topic}})
	if err != nil {
		return err
	}
	return answer.Errors[topic]
}

func (c *client) Produce(topic, codec string, records []contract.Record) error {
	place := kafka.BalancerFunc(func(message kafka.Message, _ ...int) int {
		partition, _ := strconv.Atoi(string(message.Headers[1].Value))
		return partition
	})
	writer := &kafka.Writer{
		Addr: c.requests.Addr, Topic: topic, Balancer: place, Compression: codecs[codec], RequiredAcks: kafka.RequireAll,
		BatchTimeout: 10 * time.Millisecond, BatchBytes: 4_000_000, MaxAttempts: 3,
	}
	defer writer.Close()
	messages := make([]kafka.Message, len(records))
	for number, each := range records {
		messages[number] = kafka.Message{Key: []byte(each.Key), Value: []byte(each.Value), Headers: []kafka.Header{
			{Key: "codec", Value: []byte(each.Header)}, {Key: "partition", Value: []byte(strconv.Itoa(each.Partition))},
		}}
	}
	return writer.WriteMessages(context.Background(), messages...)
}

// A consumer joins the group itself: the package's Reader does not tell which partitions it has.
type consumer struct {
	client     *client
	topic      string
	group      *kafka.ConsumerGroup
	ended      chan struct{}
	mutex      sync.Mutex
	generation *kafka.Generation
	assigned   int
	positions  map[int]int64
	messages   []kafka.Message
}

func (c *client) Consumer(group, topic string) (contract.Consumer, error) {
	joined, err := kafka.NewConsumerGroup(kafka.ConsumerGroupConfig{
		ID: group, Brokers: c.bootstrap, Topics: []string{topic}, StartOffset: kafka.FirstOffset, Timeout: 30 * time.Second,
		HeartbeatInterval: 500 * time.Millisecond,
	})
	if err != nil {
		return nil, err
	}
	made := &consumer{client: c, topic: topic, group: joined, ended: make(chan struct{}), positions: map[int]int64{}}
	go made.follow()
	return made, nil
}

func (c *consumer) follow() {
	defer close(c.ended)
	for {
		generation, err := c.group.Next(context.Background())
		if errors.Is(err, kafka.ErrGroupClosed) {
			return
		}
		if err != nil {
			continue
		}
		c.mutex.Lock()
		c.generation, c.assigned = generation, len(generation.Assignments[c.topic])
		c.mutex.Unlock()
		for _, partition := range generation.Assignments[c.topic] {
			generation.Start(func(ctx context.Context) { c.read(ctx, partition.ID, partition.Offset) })
		}
	}
}

func (c *consumer) read(ctx context.Context, partition int, offset int64) {
	reader := kafka.NewReader(kafka.ReaderConfig{
		Brokers: c.client.bootstrap, Topic: c.topic, Partition: partition, MaxWait: 100 * time.Millisecond,
	})
	defer reader.Close()
	if err := reader.SetOffset(offset); err != nil {
		return
	}
	for {
		message, err := reader.ReadMessage(ctx)
		if err != nil {
			return
		}
		c.mutex.Lock()
		c.messages = append(c.messages, message)
		c.mutex.Unlock()
	}
}

func (c *consumer) Poll() ([]contract.Record, error) {
	time.Sleep(500 * time.Millisecond)
	c.mutex.Lock()
	defer c.mutex.Unlock()
	some := c.messages[:min(100, len(c.messages))]
	c.messages = c.messages[len(some):]
	found := make([]contract.Record, len(some))
	for number, message := range some {
		found[number] = contract.Record{
			Partition: message.Partition, Key: string(message.Key), Value: string(message.Value),
			Header: string(message.Headers[0].Value),
		}
		c.positions[message.Partition] = message.Offset + 1
	}
	return found, nil
}

func (c *consumer) Commit() error {
	return c.generation.CommitOffsets(map[string]map[int]int64{c.topic: c.positions})
}

func (c *consumer) Assigned() int {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.assigned
}

func (c *consumer) Close() error {
	err := c.group.Close()
	<-c.ended
	return err
}

func (c *client) Producer(string) (contract.Producer, error) { return nil, contract.ErrNotInClient }

func (c *client) Transform(string, string, string, string, int) (int, error) {
	return 0, contract.ErrNotInClient
}

func (c *client) Name(err error) string {
	var many kafka.WriteErrors
	if errors.As(err, &many) {
		for _, each := range many {
			if each != nil {
				err = each
			}
		}
	}
	var tooLarge kafka.MessageTooLargeError
	if errors.As(err, &tooLarge) {
		return "refused by the client: too large"
	}
	var known kafka.Error
	if errors.As(err, &known) {
		return known.Title()
	}
	var unreachable net.Error
	if errors.As(err, &unreachable) && unreachable.Timeout() {
		return "no answer"
	}
	return err.Error()
}
