// Package contract does the same with each Go client and prints one line per step: its name, a tab, its outcome.
package contract

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
)

const (
	partitions     = 4
	copies         = 2
	recordsOfCodec = 200
	timeout        = 120 * time.Second
)

// Codecs are the compressions of Kafka.
var Codecs = []string{"none", "gzip", "snappy", "lz4", "zstd"}

// ErrNotInClient says that the client cannot do it.
var ErrNotInClient = errors.New("not in this client")

// A Record of a topic.
type Record struct {
	Partition          int
	Key, Value, Header string
}

// A Consumer is a member of a group that starts at the first record.
type Consumer interface {
	// Poll returns what came within a short time.
	Poll() ([]Record, error)
	// Commit stores the positions behind all that Poll returned.
	Commit() error
	// Assigned is how many partitions the member has.
	Assigned() int
	Close() error
}

// A Producer with a transactional id.
type Producer interface {
	Begin() error
	Send(topic string, records []Record) error
	Commit() error
	Abort() error
	Close() error
}

// A Client is what each of the programs adapts.
type Client interface {
	Create(topic string, partitions, copies int) error
	// Describe returns how many partitions a topic has, and how many replicas its first one has.
	Describe(topic string) (int, int, error)
	Delete(topic string) error
	// Produce returns once all records are acknowledged.
	Produce(topic, codec string, records []Record) error
	Consumer(group, topic string) (Consumer, error)
	// Producer returns one that has fenced its predecessors.
	Producer(id string) (Producer, error)
	// Transform copies at least count records of source to target, with the group's positions in the same transactions.
	// It returns how many it copied.
	Transform(id, group, source, target string, count int) (int, error)
	// Name returns Kafka's name of an error.
	Name(err error) string
}

// Run runs all steps. The arguments of the program are the bootstrap address and a prefix of all names.
func Run(newClient func(bootstrap string) Client) {
	client, prefix := newClient(os.Args[1]), os.Args[2]
	step := func(name string, action func() (string, error)) {
		outcome, err := action()
		if err != nil {
			outcome = client.Name(err)
		}
		fmt.Printf("%s\t%s\n", name, outcome)
	}
	topic := prefix + "-records"
	step("create a topic", func() (string, error) { return "done", client.Create(topic, partitions, copies) })
	step("create it again", func() (string, error) { return "done", client.Create(topic, partitions, copies) })
	step("describe it", func() (string, error) {
		found, replicas, err := described(client, topic)
		return fmt.Sprintf("%d partitions, %d replicas", found, replicas), err
	})
	for _, codec := range Codecs {
		step("produce, "+codec, func() (string, error) { return "acknowledged", client.Produce(topic, codec, records(codec)) })
	}
	step("consume", func() (string, error) { return consume(client, prefix+"-all", topic) })
	step("join and leave a group", func() (string, error) { return rebalance(client, prefix+"-pair", topic) })
	step("commit and resume", func() (string, error) { return resume(client, prefix+"-resumed", topic) })
	step("commit and abort transactions", func() (string, error) { return transact(client, prefix) })
	step("consume, transform, produce", func() (string, error) { return transform(client, prefix, topic) })
	step("commit when fenced", func() (string, error) { return "done", fenced(client, prefix, topic) })
	step("produce 2 MB", func() (string, error) {
		large := []Record{{Key: "large", Value: strings.Repeat("l", 2_000_000)}}
		return "acknowledged", client.Produce(topic, "none", large)
	})
	step("delete the topic", func() (string, error) { return "done", client.Delete(topic) })
	step("describe it then", func() (string, error) { return "found", deleted(client, topic) })
}

func records(codec string) []Record {
	made := make([]Record, recordsOfCodec)
	for number := range made {
		text := fmt.Sprintf("%s %d ", codec, number)
		made[number] = Record{Partition: number % partitions, Key: text, Value: strings.Repeat(text, 20), Header: codec}
	}
	return made
}

// inOrder compares what was found with all records of all codecs, partition by partition.
func inOrder(found []Record) string {
	expected := map[int][]Record{}
	for _, codec := range Codecs {
		for _, each := range records(codec) {
			expected[each.Partition] = append(expected[each.Partition], each)
		}
	}
	for _, each := range found {
		rest := expected[each.Partition]
		if len(rest) == 0 || rest[0] != each {
			return fmt.Sprintf("%d records, out of order at %q", len(found), each.Key)
		}
		expected[each.Partition] = rest[1:]
	}
	return fmt.Sprintf("%d records in order", len(found))
}

// poll reads until there are count records, and whatever comes at once after them.
func poll(consumer Consumer, count int) ([]Record, error) {
	found, deadline := []Record{}, time.Now().Add(timeout)
	for time.Now().Before(deadline) {
		some, err := consumer.Poll()
		if err != nil {
			return found, err
		}
		found = append(found, some...)
		if len(found) >= count && len(some) == 0 {
			break
		}
	}
	return found, nil
}

func consume(client Client, group, topic string) (string, error) {
	consumer, err := client.Consumer(group, topic)
	if err != nil {
		return "", err
	}
	defer consumer.Close()
	found, err := poll(consumer, len(Codecs)*recordsOfCodec)
	return inOrder(found), err
}

func rebalance(client Client, group, topic string) (string, error) {
	first, err := client.Consumer(group, topic)
	if err != nil {
		return "", err
	}
	defer first.Close()
	if err := until([]Consumer{first}, partitions); err != nil {
		return "", err
	}
	second, err := client.Consumer(group, topic)
	if err != nil {
		return "", err
	}
	if err := until([]Consumer{first, second}, partitions/2); err != nil {
		return "", err
	}
	if err := second.Close(); err != nil {
		return "", err
	}
	return "4 partitions, 2 and 2, 4", until([]Consumer{first}, partitions)
}

// until polls until each consumer has count partitions.
func until(consumers []Consumer, count int) error {
	for deadline := time.Now().Add(timeout); time.Now().Before(deadline); {
		reached := true
		for _, consumer := range consumers {
			if _, err := consumer.Poll(); err != nil {
				return err
			}
			reached = reached && consumer.Assigned() == count
		}
		if reached {
			return nil
		}
	}
	return fmt.Errorf("no member got its %d partitions", count)
}

func resume(client Client, group, topic string) (string, error) {
	all, found := len(Codecs)*recordsOfCodec, []Record{}
	for _, count := range []int{all / 3, all} {
		consumer, err := client.Consumer(group, topic)
		if err != nil {
			return "", err
		}
		for deadline := time.Now().Add(timeout); len(found) < count && time.Now().Before(deadline); {
			some, err := consumer.Poll()
			if err != nil {
				return "", err
			}
			found = append(found, some...)
		}
		if err := consumer.Commit(); err != nil {
			return "", err
		}
		if err := consumer.Close(); err != nil {
			return "", err
		}
	}
	return inOrder(found), nil
}

func transact(client Client, prefix string) (string, error) {
	topic := prefix + "-transactions"
	producer, err := client.Producer(prefix + "-writer")
	if err != nil {
		return "", err
	}
	defer producer.Close()
	if err := client.Create(topic, partitions, copies); err != nil {
		return "", err
	}
	for _, name := range []string{"first", "aborted", "second"} {
		end := producer.Commit
		if name == "aborted" {
			end = producer.Abort
		}
		if err := errors.Join(producer.Begin(), producer.Send(topic, records(name)), end()); err != nil {
			return "", err
		}
	}
	consumer, err := client.Consumer(prefix+"-committed", topic)
	if err != nil {
		return "", err
	}
	defer consumer.Close()
	found, err := poll(consumer, 2*recordsOfCodec)
	aborted := 0
	for _, each := range found {
		if each.Header == "aborted" {
			aborted++
		}
	}
	return fmt.Sprintf("%d records, %d of them aborted", len(found), aborted), err
}

func transform(client Client, prefix, topic string) (string, error) {
	target, group, all := prefix+"-target", prefix+"-transformed", len(Codecs)*recordsOfCodec
	if err := client.Create(target, partitions, copies); err != nil {
		return "", err
	}
	copied, err := client.Transform(prefix+"-transformer", group, topic, target, all/3)
	if err != nil {
		return "", err
	}
	if _, err := client.Transform(prefix+"-transformer", group, topic, target, all-copied); err != nil {
		return "", err
	}
	return consume(client, prefix+"-check", target)
}

func fenced(client Client, prefix, topic string) error {
	first, err := client.Producer(prefix + "-fenced")
	if err != nil {
		return err
	}
	defer first.Close()
	if err := errors.Join(first.Begin(), first.Send(topic, records("none")[:1])); err != nil {
		return err
	}
	second, err := client.Producer(prefix + "-fenced")
	if err != nil {
		return err
	}
	defer second.Close()
	return first.Commit()
}

// described waits until the broker that is asked knows the topic: another one may have created it.
func described(client Client, topic string) (found, replicas int, err error) {
	for deadline := time.Now().Add(timeout); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if found, replicas, err = client.Describe(topic); err == nil {
			break
		}
	}
	return found, replicas, err
}

func deleted(client Client, topic string) error {
	for deadline := time.Now().Add(timeout); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if _, _, err := client.Describe(topic); err != nil {
			return err
		}
	}
	return nil
}
