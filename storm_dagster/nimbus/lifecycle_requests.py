"""Activate, deactivate, kill, rebalance and restart at the leader: as Dagster runs, or by itself in an emergency."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.operations import lifecycle
from storm_dagster.operations.context import OperationsContext, topology_by_name
from storm_dagster.operations.reports import LifecycleReport

__all__ = ["VERBS", "LifecycleRequests"]

_log = logging.getLogger(__name__)

VERBS = ("activate", "deactivate", "kill", "rebalance", "restart")
_FIELDS: Mapping[str, frozenset[str]] = {
    "activate": frozenset(),
    "deactivate": frozenset(),
    "restart": frozenset(),
    "kill": frozenset({"wait_secs"}),
    "rebalance": frozenset({"wait_secs", "workers", "executors", "reassign"}),
}
_LONGEST_WAIT_SECS = 10 * 366 * 86400


class LifecycleRequests:
    """Changes of running topologies."""

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus

    def act(self, name: str, verb: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Start the change: ``{"run_id", "id", "name", "status"}``.

        ``run_id`` is ``None`` when Dagster did not answer within 5 s and the leader did it itself (kill,
        activate, deactivate); rebalance and restart are then :class:`Unavailable`. :class:`NotAlive` for an
        unknown topology.
        """
        if verb not in VERBS:
            raise InvalidRequest(f"{verb!r:.40} is no change of a topology: use {', '.join(VERBS)}")
        fields = _checked(verb, document)
        epoch = self._nimbus.status.require()
        topology = topology_by_name(self._nimbus.cluster.load_view(), name)
        answer = {"id": topology.id, "name": topology.base.name, "status": topology.base.status}
        try:
            return {"run_id": self._launch(topology.base.name, verb, fields), **answer}
        except Unavailable as error:
            by_hand = self._by_hand(verb, fields)
            if by_hand is None:
                raise
            _log.warning("%s of %s is done by the leader: %s", verb, topology.id, error)
        report = by_hand(self._nimbus.operations(epoch), topology.id)
        self._nimbus.unreported.add(
            report.name, f"{verb} of {report.topology_id}, done by the leader because Dagster did not answer"
        )
        return {"run_id": None, **answer, "status": report.status or "KILLED"}

    def _launch(self, name: str, verb: str, fields: Mapping[str, Any]) -> str:
        dagster = self._nimbus.dagster
        tags = {"storm/topology": name}
        if verb == "rebalance":
            dagster.add_partition(name)
            return dagster.launch(
                "rebalance_topology",
                {"ops": {"storm__assignment": {"config": dict(fields)}}},
                {**tags, "dagster/partition": name},
            )
        config = {"ops": {f"{verb}_topology_op": {"config": {"name": name, **fields}}}}
        return dagster.launch(f"{verb}_topology", config, tags)

    def _by_hand(
        self, verb: str, fields: Mapping[str, Any]
    ) -> Callable[[OperationsContext, str], LifecycleReport] | None:
        if verb == "kill":
            return lambda ctx, name: lifecycle.kill(ctx, name, fields.get("wait_secs"))
        return {"activate": lifecycle.activate, "deactivate": lifecycle.deactivate}.get(verb)


def _checked(verb: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the request, those that are null left out; :class:`InvalidRequest` for anything wrong."""
    unknown = sorted(set(document) - _FIELDS[verb])
    if unknown:
        known = ", ".join(sorted(_FIELDS[verb])) or "no fields"
        raise InvalidRequest(f"{verb} has no field {unknown[0]!r:.40}: it has {known}")
    fields = {key: value for key, value in document.items() if value is not None}
    _check_int(fields, "wait_secs", 0, _LONGEST_WAIT_SECS)
    _check_int(fields, "workers", 1, 100_000)
    executors = fields.get("executors", {})
    if not isinstance(executors, dict):
        raise InvalidRequest("'executors' must map component ids to numbers, such as {\"count\": 4}")
    for component in executors:
        _check_int(executors, component, 0, 10_000_000)
    if not isinstance(fields.get("reassign", False), bool):
        raise InvalidRequest("'reassign' must be true or false")
    return fields


def _check_int(fields: Mapping[str, Any], key: str, low: int, high: int) -> None:
    value = fields.get(key, low)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(f"{key!r:.80} must be a whole number from {low} to {high}, got {value!r:.40}")
