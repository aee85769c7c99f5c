"""The Arrow groups of the assignment, which run in Spark's Python workers.

Requests and tasks are computed per topology, in parallel, many small topologies in one part: a
group costs about as much as two hundred tasks. Only the allocation of slots is not parallel,
because every topology narrows the choice of the next: there is one group for each cluster, which
reads supervisors, slots and workers, never tasks.
"""

from collections.abc import Iterator

import pyarrow as pa

from storm_dagster.core.scheduling.requested_workers import SlotRequest
from storm_dagster.core.scheduling.slot_allocation import FreePorts
from storm_dagster.core.scheduling.strategy import (
    TopologyEvent,
    allocate,
    request_without_history,
)
from storm_dagster.core.scheduling.units import TopologySummary
from storm_dagster.model.slot import Slot
from storm_dagster.spark.assignment import exchange
from storm_dagster.spark.assignment.executor_runs import executors_of_runs

_Key = tuple[pa.Scalar, ...]
"""Values of the columns that a group has in common; the first is the cluster's number."""
_Values = dict[str, bytes]
"""Kind -> value of one topology."""


def request_in_part(key: _Key, values: pa.Table) -> pa.Table:
    """Slot requests of the topologies of one part."""
    cluster = key[0].as_py()
    requests: list[exchange.Value] = []
    for topology, by_kind in _by_topology(values).items():
        request = _event(by_kind).request()
        requests.append((cluster, topology, exchange.REQUEST, exchange.encode(request)))
    return exchange.values_table(requests)


def allocate_in_cluster(key: _Key, slots: pa.Table, values: pa.Table) -> pa.Table:
    """Allocated slots of each topology of one cluster, or its refusal.

    ``slots`` are the rows of ``pipeline._ranked_slots``, ``values`` the summaries and requests of
    the topologies, and the value of the cluster.
    """
    cluster = key[0].as_py()
    values_of = _by_topology(values)
    cluster_values = values_of.pop(exchange.CLUSTER)
    supervisors = exchange.decode_supervisors(cluster_values[exchange.SUPERVISOR_RECORDS])
    summaries = {
        topology: exchange.decode_summary(by_kind[exchange.SUMMARY])
        for topology, by_kind in values_of.items()
    }
    isolated_hosts: set[str] = set()
    for summary in summaries.values():
        isolated_hosts.update(summary.isolation)
    ports = FreePorts(supervisors, _ranked_slots(slots), isolated_hosts)
    allocations: list[exchange.Value] = []
    # In the order of service, which the numbers of the topologies are: what one takes from
    # ``ports`` is not free for the next.
    for topology, summary in sorted(summaries.items()):
        allocated = allocate(summary, _request(summary, values_of[topology]), ports)
        allocations.append((cluster, topology, exchange.ALLOCATED, exchange.encode(allocated)))
    return exchange.values_table(allocations)


def assign_in_part(key: _Key, values: pa.Table) -> pa.Table:
    """Rows of all workers of the topologies of one part, unchanged ones included."""
    cluster = key[0].as_py()
    placed: list[exchange.Value] = []
    for topology, by_kind in _by_topology(values).items():
        allocated = exchange.decode_allocated(by_kind[exchange.ALLOCATED])
        rows = _event(by_kind).assign(allocated)
        placed.append((cluster, topology, exchange.PLACED, exchange.encode(rows)))
    return exchange.values_table(placed)


def _by_topology(values: pa.Table) -> dict[int, _Values]:
    """Place of a topology in the order of service, or ``CLUSTER`` -> its values."""
    by_topology: dict[int, _Values] = {}
    for _, topology, kind, value in exchange.read_values(values):
        by_topology.setdefault(topology, {})[kind] = value
    return by_topology


def _event(by_kind: _Values) -> TopologyEvent:
    """The event of a topology from its values; without a history it has no rows."""
    history = by_kind.get(exchange.HISTORY)
    return TopologyEvent(
        exchange.decode_summary(by_kind[exchange.SUMMARY]),
        executors_of_runs(exchange.decode(by_kind[exchange.EXECUTORS])),
        () if history is None else exchange.decode(history),
    )


def _request(summary: TopologySummary, by_kind: _Values) -> SlotRequest:
    """The request of :func:`request_in_part`; without a history it follows from the summary."""
    request = by_kind.get(exchange.REQUEST)
    if request is None:
        return request_without_history(summary)
    return exchange.decode_request(request)


def _ranked_slots(slots: pa.Table) -> Iterator[tuple[Slot, int]]:
    """(slot, number of topologies that hold it), by supervisor and rank."""
    columns = [slots.column(name).to_pylist() for name in ("node", "rank", "port", "holders")]
    for node, _, port, holders in sorted(zip(*columns, strict=True)):
        yield Slot(node, port), holders
