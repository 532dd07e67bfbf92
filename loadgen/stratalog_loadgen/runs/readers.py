"""Consumers of a measurement: their loads, and the wait until all partitions are assigned."""

from __future__ import annotations

import secrets

from stratalog_core.errors import Invalid
from stratalog_loadgen.processes.loads import ConsumerLoad
from stratalog_loadgen.processes.workers import Workers
from stratalog_loadgen.runs.produce import split
from stratalog_loadgen.settings import Readers, consumer_options
from stratalog_loadgen.topics import Prepared

ASSIGN_TIMEOUT_S = 300.0


def consumer_loads(
    place: Prepared, readers: Readers, *, earliest: bool = True, stamps: bool = False, leavers: int = 0
) -> list[ConsumerLoad]:
    """Return one load per process. With more processes than groups, members are spread over several. Raises ``Invalid``."""
    if readers.light and (len(place.names) > 1 or not earliest):
        raise Invalid("--light reads one new topic from its beginning: leave out --topic or --light")
    processes = readers.processes or readers.groups
    members = readers.groups * readers.consumers
    if processes > members:
        raise Invalid(f"--consumer-processes is {processes}; maximum is the number of consumers, {members}")
    groups = [f"bench-{secrets.token_hex(4)}-{number}" for number in range(readers.groups)]
    options = consumer_options(place.bootstrap, readers, earliest=earliest)
    if processes <= readers.groups:
        shares = [(groups[number::processes], readers.consumers) for number in range(processes)]
    else:
        spread = split(processes, readers.groups)
        shares = [
            ([group], share) for group, parts in zip(groups, spread, strict=True) for share in split(readers.consumers, parts)
        ]
    leavers_max = min(shares[0][1], readers.consumers - 1)
    if leavers > leavers_max:
        raise Invalid(
            f"--leave is {leavers}; maximum is {leavers_max}: members of one group in one process leave, and one member stays"
        )
    return [
        ConsumerLoad(
            client=options,
            topics=place.names,
            groups=names,
            consumers=consumers,
            stamps=stamps,
            light=readers.light,
            protocol=readers.protocol,
            members=readers.consumers,
            leavers=leavers,
        )
        for names, consumers in shares
    ]


def wait_until_assigned(workers: Workers, partitions: int, *, after_leaving: bool = False) -> None:
    """Wait until ``partitions`` (times groups) are assigned. ``after_leaving``: and assignments changed after members left."""

    def done() -> bool:
        return workers.assigned(ConsumerLoad) == partitions and (not after_leaving or workers.rebalanced(ConsumerLoad))

    workers.follow_until(done, ASSIGN_TIMEOUT_S, f"get all {partitions} partitions assigned")
