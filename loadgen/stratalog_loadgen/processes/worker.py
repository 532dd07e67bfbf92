"""One load process, ``python -m stratalog_loadgen.processes.worker``, controlled by :mod:`.workers` over two pipes."""

from __future__ import annotations

import os
import sys
import traceback

import msgspec
from confluent_kafka import KafkaError, KafkaException

from stratalog_core.errors import Invalid, StratalogError
from stratalog_loadgen.clients.connecting import run_connections
from stratalog_loadgen.clients.consumer_protocol import ConsumerProtocolMember
from stratalog_loadgen.clients.consuming import run_consumers
from stratalog_loadgen.clients.copying import run_copier
from stratalog_loadgen.clients.due_batches import DueBatches
from stratalog_loadgen.clients.due_records import DueRecords
from stratalog_loadgen.clients.group_members import Member, run_members
from stratalog_loadgen.clients.producing import ProducerRun
from stratalog_loadgen.clients.whole_batches import WholeBatches
from stratalog_loadgen.processes.control import Control, standard_control
from stratalog_loadgen.processes.loads import ConnectionLoad, CopierLoad, Counted, Failed, Load, ProducerLoad

_METADATA_TIMEOUT_S = 60


def main() -> None:
    """Read one load, run it, and report its counts or its failure."""
    control = standard_control()
    load = msgspec.json.decode(sys.stdin.buffer.readline(), type=Load)
    try:
        control.report(_run(load, control))
    except (StratalogError, KafkaException, OSError) as failure:
        control.report(Failed(message=_text(failure), wrong=_is_wrong(failure)))
    except Exception:  # outermost: the parent must learn why there is no result
        control.report(Failed(message=traceback.format_exc()))
    # Joining librdkafka's threads of a thousand clients takes minutes, and everything is reported.
    sys.stdout.flush()
    os._exit(0)


def _run(load: Load, control: Control) -> Counted:
    if isinstance(load, ProducerLoad):
        return _run_producers(load, control)
    if isinstance(load, ConnectionLoad):
        return run_connections(load, control)
    if isinstance(load, CopierLoad):
        return run_copier(load, control)
    if not load.light:
        return run_consumers(load, control)
    return run_members(ConsumerProtocolMember if load.protocol == "consumer" else Member, load, control)


def _run_producers(load: ProducerLoad, control: Control) -> Counted:
    """Run producers; return when every record is acknowledged or has failed."""
    run = _kind_of(load)(load, control)
    for producer in run.producers:
        producer.list_topics(load.topics[0], timeout=_METADATA_TIMEOUT_S)
    control.wait_for_go()
    return run.run()


def _kind_of(load: ProducerLoad) -> type[ProducerRun]:
    if load.whole_batches or not load.records_per_s:
        return WholeBatches
    return DueRecords if load.each_partition or load.keys != "none" else DueBatches


def _is_wrong(failure: BaseException) -> bool:
    """Return whether a setting is invalid: one of ours, or one of the client's."""
    if isinstance(failure, KafkaException):
        return bool(failure.args[0].code() == KafkaError._INVALID_ARG)
    return isinstance(failure, Invalid)


def _text(failure: BaseException) -> str:
    if isinstance(failure, KafkaException):
        return str(failure.args[0].str())
    return str(failure)


if __name__ == "__main__":
    main()
