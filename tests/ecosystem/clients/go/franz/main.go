// franz-go.
package main

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"time"

	"ecosystem/contract"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

var codecs = map[string]kgo.CompressionCodec{
	"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(),
	"lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
}

type client struct {
	bootstrap []string
	admin     *kadm.Client
}

func main() {
	contract.Run(func(bootstrap string) contract.Client {
		addresses := strings.Split(bootstrap, ",")
		admin, err := kadm.NewOptClient(kgo.SeedBrokers(addresses...))
		if err != nil {
			panic(err)
		}
		return &client{addresses, admin}
	})
}

func within() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), 120*time.Second)
}

func (c *client) Create(topic string, partitions, copies int) error {
	ctx, cancel := within()
	defer cancel()
	_, err := c.admin.CreateTopic(ctx, int32(partitions), int16(copies), nil, topic)
	return err
}

func (c *client) Describe(topic string) (int, int, error) {
	ctx, cancel := within()
	defer cancel()
	found, err := c.admin.ListTopics(ctx, topic)
	if err != nil {
		return 0, 0, err
	}
	return len(found[topic].Partitions), found[topic].Partitions.NumReplicas(), found[topic].Err
}

func (c *client) Delete(topic string) error {
	ctx, cancel := within()
	defer cancel()
	_, err := c.admin.DeleteTopic(ctx, topic)
	return err
}

func (c *client) open(options ...kgo.Opt) (*kgo.Client, error) {
	fixed := []kgo.Opt{
		kgo.SeedBrokers(c.bootstrap...), kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerBatchMaxBytes(4_000_000), kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
	}
	return kgo.NewClient(append(fixed, options...)...)
}

func send(opened *kgo.Client, topic string, records []contract.Record) error {
	made := make([]*kgo.Record, len(records))
	for number, each := range records {
		made[number] = &kgo.Record{
			Topic: topic, Partition: int32(each.Partition), Key: []byte(each.Key), Value: []byte(each.Value),
			Headers: []kgo.RecordHeader{{Key: "codec", Value: []byte(each.Header)}},
		}
	}
	ctx, cancel := within()
	defer cancel()
	return opened.ProduceSync(ctx, made...).FirstErr()
}

func (c *client) Produce(topic, codec string, records []contract.Record) error {
	opened, err := c.open(kgo.ProducerBatchCompression(codecs[codec]))
	if err != nil {
		return err
	}
	defer opened.Close()
	return send(opened, topic, records)
}

type consumer struct {
	*kgo.Client
	assigned atomic.Int64
}

func (c *client) Consumer(group, topic string) (contract.Consumer, error) {
	made := &consumer{}
	count := func(sign int64) func(context.Context, *kgo.Client, map[string][]int32) {
		return func(_ context.Context, _ *kgo.Client, changed map[string][]int32) {
			made.assigned.Add(sign * int64(len(changed[topic])))
		}
	}
	opened, err := c.open(
		kgo.ConsumerGroup(group), kgo.ConsumeTopics(topic), kgo.DisableAutoCommit(),
		kgo.OnPartitionsAssigned(count(1)), kgo.OnPartitionsRevoked(count(-1)), kgo.OnPartitionsLost(count(-1)),
	)
	made.Client = opened
	return made, err
}

func (c *consumer) Poll() ([]contract.Record, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	return found(c.PollRecords(ctx, 100))
}

func found(fetches kgo.Fetches) ([]contract.Record, error) {
	made := []contract.Record{}
	fetches.EachRecord(func(each *kgo.Record) {
		made = append(made, contract.Record{
			Partition: int(each.Partition), Key: string(each.Key), Value: string(each.Value), Header: string(each.Headers[0].Value),
		})
	})
	err := fetches.Err0()
	if errors.Is(err, context.DeadlineExceeded) {
		err = nil
	}
	return made, err
}

func (c *consumer) Commit() error {
	ctx, cancel := within()
	defer cancel()
	return c.CommitUncommittedOffsets(ctx)
}

func (c *consumer) Assigned() int { return int(c.assigned.Load()) }

func (c *consumer) Close() error {
	c.Client.Close()
	return nil
}

type producer struct{ *kgo.Client }

func (c *client) Producer(id string) (contract.Producer, error) {
	opened, err := c.open(kgo.TransactionalID(id))
	if err != nil {
		return nil, err
	}
	ctx, cancel := within()
	defer cancel()
	_, _, err = opened.ProducerID(ctx)
	return producer{opened}, err
}

func (p producer) Begin() error { return p.BeginTransaction() }

func (p producer) Send(topic string, records []contract.Record) error {
	return send(p.Client, topic, records)
}

func (p producer) end(how kgo.TransactionEndTry) error {
	ctx, cancel := within()
	defer cancel()
	return p.EndTransaction(ctx, how)
}

func (p producer) Commit() error { return p.end(kgo.TryCommit) }

func (p producer) Abort() error { return p.end(kgo.TryAbort) }

func (p producer) Close() error {
	p.Client.Close()
	return nil
}

func (c *client) Transform(id, group, source, target string, count int) (int, error) {
	session, err := kgo.NewGroupTransactSession(
		kgo.SeedBrokers(c.bootstrap...), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.TransactionalID(id),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.ConsumerGroup(group), kgo.ConsumeTopics(source), kgo.RequireStableFetchOffsets(),
	)
	if err != nil {
		return 0, err
	}
	defer session.Close()
	ctx, cancel := within()
	defer cancel()
	copied := 0
	for copied < count {
		fetches := session.PollRecords(ctx, 100)
		if ctx.Err() != nil {
			return copied, ctx.Err()
		}
		records, err := found(fetches)
		if err == nil {
			err = session.Begin()
		}
		if err == nil {
			err = send(session.Client(), target, records)
		}
		if err == nil {
			_, err = session.End(ctx, kgo.TryCommit)
		}
		if err != nil {
			return copied, err
		}
		copied += len(records)
	}
	return copied, nil
}

func (c *client) Name(err error) string {
	var known *kerr.Error
	if errors.As(err, &known) {
		return known.Message
	}
	return err.Error()
}
