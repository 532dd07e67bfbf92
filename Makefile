# `make` lists the targets. Every target does its own set-up: a fresh machine needs Python 3.11+, Java 17+, Go and make.

PYTHON ?= python3
STORE ?= file
KAFKA ?= 127.0.0.1:9092
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/stratalog/tools
MINIO_VERSION := v0.0.0-20260212201848-7aac2a2c5b7c
VERSITYGW_VERSION := v1.8.0
COMPOSE_VERSION := v2.16.2
AZURITE_VERSION := 3.37.0
FAKE_GCS_VERSION := v1.56.1
MINIO := $(CACHE)/minio/$(MINIO_VERSION)/minio
VERSITYGW := $(CACHE)/versitygw/$(VERSITYGW_VERSION)/versitygw
COMPOSE := $(CACHE)/compose/$(COMPOSE_VERSION)/cmd
FAKE_GCS := $(CACHE)/fake-gcs/$(FAKE_GCS_VERSION)/fake-gcs-server
AZURITE := $(CACHE)/azurite/$(AZURITE_VERSION)/node_modules/.bin/azurite-blob

# pip installs exactly what is pinned and resolves nothing: seconds instead of minutes, and the same everywhere.
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile
SOURCES := core metadata bookies tiering broker pipeline cli loadgen demo tests benchmarks

# Tests start thousands of processes. Without bytecode files, each takes half a second to a second more of a core to start.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/pycache

export STRATALOG_MINIO := $(MINIO)
export STRATALOG_VERSITYGW := $(VERSITYGW)
export STRATALOG_COMPOSE := $(COMPOSE)
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: run
run: .venv/.run  ## start everything in one process, Kafka on 127.0.0.1:9092 (or KAFKA=HOST:PORT), data in ./data
	$(BIN)/stratalog up --data data --kafka $(KAFKA)

.PHONY: demo
demo: .venv/.demo $(if $(filter minio,$(STORE)),$(MINIO))  ## the main job on real flights, broker killed half way (STORE=minio: on MinIO)
	PYTHONPATH=demo $(BIN)/python -m stratalog_demo --store $(STORE)

# Tests of the first part wait for sockets and disks for more than half of their time.
UNIT_WORKERS := 5
CLUSTER_WORKERS := 3
COMPUTE_WORKERS := 2
BY_FILE := --dist loadfile --no-loadscope-reorder
DURATIONS := --durations=50 --durations-min=1

.PHONY: test
test: .venv/.test tools  ## everything: unit and contract tests in five processes, then those that start clusters in three, then one by one those that measure; what only computes beside them
	output=$$(mktemp); \
	$(BIN)/python tests/spare_time.py $(BIN)/python -m pytest tests -m computes --timeout 3000 --numprocesses $(COMPUTE_WORKERS) --dist worksteal $(DURATIONS) > $$output 2>&1 & \
	computing=$$!; trap "kill -- -$$computing 2> /dev/null || kill $$computing 2> /dev/null" EXIT INT TERM; status=0; \
	[ .venv/.spark.jsa -nt .venv/.test ] || $(BIN)/python tests/spark_classes.py .venv/.spark.jsa > /dev/null 2>&1 & \
	$(BIN)/python -m pytest tests -m "not alone and not clusters and not computes" --numprocesses $(UNIT_WORKERS) $(BY_FILE) $(DURATIONS) || status=$$?; \
	$(BIN)/python -m pytest tests -m clusters --numprocesses $(CLUSTER_WORKERS) $(BY_FILE) $(DURATIONS) || status=$$?; \
	$(BIN)/python -m pytest tests -m alone $(DURATIONS) || status=$$?; \
	wait $$computing || status=$$?; \
	cat $$output; rm $$output; \
	exit $$status

.PHONY: unit
unit: .venv/.test  ## unit, property and golden tests only
	$(BIN)/python -m pytest tests/unit

.PHONY: integration
integration: .venv/.test  ## unmodified Kafka clients against a real cluster of processes
	$(BIN)/python -m pytest tests/integration

.PHONY: venv
venv: .venv/.test  ## virtual environment in .venv with everything pinned

.PHONY: tools
tools: $(MINIO) $(VERSITYGW) $(COMPOSE)  ## build the programs that tests use, once, into the cache: two S3 servers, Compose's own file check

.PHONY: fmt
fmt: .venv/.test  ## format the code
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix --quiet $(SOURCES)

.PHONY: lint
lint: .venv/.test  ## style, and which module may import which
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/lint-imports --config loadgen/pyproject.toml

.PHONY: types
types: .venv/.test  ## strict type check of code and tests
	$(BIN)/mypy $(SOURCES)

.PHONY: bench
bench: .venv/.test  ## measure against Apache Kafka in turns; PROFILE=quick|grid|size|full|smoke CELLS='produce*' RUN=name ROUNDS=3; writes docs/lab/benchmarks.md
	$(BIN)/python -m benchmarks.compare --profile $(or $(PROFILE),quick) --cells '$(or $(CELLS),*)' \
		$(if $(RUN),--run $(RUN)) $(if $(ROUNDS),--rounds $(ROUNDS))

.PHONY: bench-spark
bench-spark: .venv/.test  ## measure the data pipeline on Spark against its controls, one figure per line, seven minutes: RECORDS=1400000
	$(BIN)/python -m benchmarks.spark $(RECORDS)

.PHONY: bench-compaction
bench-compaction: .venv/.test  ## measure compaction beside the log cleaner of Apache Kafka, in turns: MB of records per second of a core, three minutes
	@PYTHONPATH=.:tests $(BIN)/python -m benchmarks.compaction_beside_kafka

.PHONY: bench-members
bench-members: .venv/.test  ## measure 10,000 connections of group members beside Apache Kafka: they join, some leave, a broker is killed: GROUPS=100 MEMBERS=100
	@PYTHONPATH=.:tests $(BIN)/python -m benchmarks.many_members $(if $(GROUPS),--groups $(GROUPS)) $(if $(MEMBERS),--members $(MEMBERS))

.PHONY: bench-cold
bench-cold: .venv/.test $(MINIO)  ## measure cold replay, seeks and offload over MinIO beside controls, one figure per line: ONLY='cold_seek_p99_ms …' JSON=file SMOKE=1 OPTIONS='--rounds 5'
	@PYTHONPATH=.:tests $(BIN)/python -m benchmarks.cold $(if $(ONLY),--only $(ONLY)) $(if $(JSON),--json "$(JSON)") $(if $(SMOKE),--smoke) $(OPTIONS)

.PHONY: reference
reference: .venv/.test  ## write the generated pages of docs/: reference, index of decisions
	$(BIN)/python -m stratalog.reference docs/reference
	PYTHONPATH=tests $(BIN)/python -m integration.kafka_tools > docs/reference/kafka-tools.md
	PYTHONPATH=tests $(BIN)/python -m decision_index

.PHONY: compatibility
compatibility: .venv/.test  ## run Java's Admin client, bad batches, DescribeConfigs, EndTxn and reads from replicas against Apache Kafka and against a cluster, and write the table of differences
	PYTHONPATH=tests:. $(BIN)/python -m integration.compatibility
	PYTHONPATH=tests $(BIN)/python -m integration.compatibility --page > docs/reference/compatibility.md

.PHONY: ecosystem
ecosystem: .venv/.test  ## run clients of others against Apache Kafka and against a cluster, and write the page of outcomes: ONLY=kafkajs,sarama
	PYTHONPATH=tests:. $(BIN)/python -m ecosystem $(if $(ONLY),--only $(ONLY))

.PHONY: site
site: .venv/.test  ## build docs/ as a site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.PHONY: sim
sim: .venv/.test  ## simulate whole clusters from seeds: SEEDS=20 FIRST_SEED=1 [PROGRESS=directory RESULT=file.md], or SEED=7 [SHRINK=1] for one with its trace; SCENARIO=log
	PYTHONHASHSEED=0 PYTHONPATH=tests $(BIN)/python -W ignore -m simulation --scenario $(or $(SCENARIO),all) \
		$(if $(SEED),--seed $(SEED) $(if $(SHRINK),--shrink) $(if $(KEEP),--keep "$(KEEP)"),--seeds $(or $(SEEDS),20) --first-seed $(or $(FIRST_SEED),1) \
		$(if $(FRESH),--fresh $(FRESH)) $(if $(PROGRESS),--progress "$(PROGRESS)") $(if $(RESULT),--result "$(RESULT)"))

.PHONY: mutants
mutants: .venv/.test  ## plant faults in the simulated product and see each found: MUTANT=name, SEEDS=30, RECORD=1
	PYTHONHASHSEED=0 PYTHONPATH=tests $(BIN)/python -W ignore -m simulation.mutants.hunt --seeds $(or $(SEEDS),30) $(if $(MUTANT),--mutant $(MUTANT)) $(if $(RECORD),--record)

.PHONY: chaos
chaos: .venv/.test $(MINIO)  ## real processes, real faults, histories checked: SECONDS=300, SEED=7 for the same faults again, ONLY=stop,drain for some
	PYTHONPATH=tests $(BIN)/python -m chaos --seconds $(or $(SECONDS),300) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY)) $(if $(RESULTS),--results $(RESULTS))

.PHONY: contract-all
contract-all: .venv/.test $(MINIO) $(VERSITYGW)  ## the contract of object stores, also over servers whose answers fail in bursts: SEEDS=1
	STRATALOG_CONTRACT_SEEDS=$(or $(SEEDS),1) $(BIN)/python -m pytest -q tests/contract

.PHONY: contract-azure
contract-azure: .venv/.test $(AZURITE)  ## the contract of object stores, a drill and Spark over Azurite, which needs Node: SEEDS=1
	STRATALOG_AZURITE=$(AZURITE) STRATALOG_CONTRACT_SEEDS=$(or $(SEEDS),1) $(BIN)/python -m pytest -q tests/contract tests/integration/test_restore.py tests/integration/test_cloud_history.py -k azur

.PHONY: contract-gcs
contract-gcs: .venv/.test $(FAKE_GCS)  ## the contract of object stores, a drill and Spark over an emulator of Google Cloud Storage: SEEDS=1
	STRATALOG_FAKE_GCS=$(FAKE_GCS) STRATALOG_CONTRACT_SEEDS=$(or $(SEEDS),1) $(BIN)/python -m pytest -q tests/contract tests/integration/test_restore.py tests/integration/test_cloud_history.py -k gcs

.PHONY: store-faults
store-faults: .venv/.test $(MINIO)  ## offload, retention and cold reads over a MinIO whose answers fail in bursts: SEEDS=20
	STRATALOG_STORE_FAULT_SEEDS=$(or $(SEEDS),20) $(BIN)/python -m pytest -q tests/unit/tiering/worker/test_faulty_store.py

.PHONY: power
power: .venv/.test  ## all bookies and metadata nodes lose power at once, three times, under load: RECORDS=1000000
	STRATALOG_POWER_RECORDS=$(or $(RECORDS),1000000) $(BIN)/python -m pytest -q tests/integration/test_power_loss.py

.PHONY: spark-cluster
spark-cluster: .venv/.test  ## the doctor and a job on a standalone Spark cluster of processes
	STRATALOG_SPARK_CLUSTER=1 $(BIN)/python -m pytest -q tests/integration/test_spark_cluster.py

.PHONY: spark-connector
spark-connector: .venv/.test  ## all queries by Spark's Kafka connector and by ours, of which make test runs a sample
	STRATALOG_SPARK_CONNECTOR=1 $(BIN)/python -m pytest -q tests/integration/test_spark_kafka_connector.py

.PHONY: erase-minio
erase-minio: .venv/.test $(MINIO)  ## an erasure on a MinIO that keeps versions and locks: no version of any object has the records
	STRATALOG_ERASE_MINIO=1 $(BIN)/python -m pytest -q tests/integration/test_locked_history.py -k erased

.PHONY: exactly-once
exactly-once: .venv/.test  ## streams, replays, sinks and exports of Spark whose drivers and tasks are killed at random points, each record is written once: POINTS=100; and at each step of a commit
	STRATALOG_EXACTLY_ONCE_POINTS=$(or $(POINTS),100) $(BIN)/python -m pytest -q -s tests/integration/test_exactly_once*.py

.PHONY: spark-at-size
spark-at-size: .venv/.test  ## every job of the pipeline over flight events, repeated with shifted times, each result compared with an independent computation: GB=5
	STRATALOG_SPARK_GB=$(or $(GB),5) $(BIN)/python -m pytest -q --durations=0 tests/integration/test_spark_at_size.py

.PHONY: fuzz
fuzz: .venv/.fuzz  ## search by coverage for bytes that break a port, a format or an object: TARGET=name SECONDS=60; keeps what it finds
	PYTHONPATH=.:tests $(BIN)/python -m fuzz --seconds $(or $(SECONDS),60) $(if $(TARGET),--target $(TARGET))

.PHONY: requests
requests: .venv/.test  ## ask a broker everything that makes sense, seed after seed: SECONDS=300, or SEED=7 for one
	PYTHONPATH=.:tests $(BIN)/python -m valid_requests --seconds $(or $(SECONDS),300) $(if $(SEED),--seed $(SEED))

.PHONY: clean
clean:  ## delete what the other targets made here (the tools' cache stays)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage htmlcov dist site data spark-warehouse
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Serving, the demo and the tests need more and more: three stamps, each on top of the one before.
.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Stratalog needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

.venv/.run: constraints/run.txt pyproject.toml | .venv/bin/python
	$(INSTALL) -r $<
	$(INSTALL) --no-build-isolation --editable .
	@touch $@

.venv/.demo: constraints/demo.txt .venv/.run
	$(INSTALL) -r $<
	@touch $@

.venv/.test: constraints/test.txt constraints/minio.txt loadgen/pyproject.toml .venv/.demo
	$(INSTALL) -r $<
	$(INSTALL) --no-build-isolation --editable loadgen
	@touch $@

.venv/.fuzz: constraints/fuzz.txt .venv/.test
	$(INSTALL) -r $<
	@touch $@

$(MINIO):
	GOBIN=$(@D) go install github.com/minio/minio@$(MINIO_VERSION)

$(VERSITYGW):
	GOBIN=$(@D) go install github.com/versity/versitygw/cmd/versitygw@$(VERSITYGW_VERSION)

$(FAKE_GCS):
	GOBIN=$(@D) go install github.com/fsouza/fake-gcs-server@$(FAKE_GCS_VERSION)

$(COMPOSE):
	GOBIN=$(@D) go install github.com/compose-spec/compose-go/v2/cmd@$(COMPOSE_VERSION)

$(AZURITE):
	@command -v node > /dev/null && command -v npm > /dev/null || { echo "Azurite needs Node.js and npm: install them"; exit 1; }
	npm install --prefix $(CACHE)/azurite/$(AZURITE_VERSION) --no-save --no-package-lock --no-audit --no-fund --loglevel error azurite@$(AZURITE_VERSION)
