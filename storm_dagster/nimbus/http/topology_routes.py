"""Handlers of submissions, runs, topologies, the cluster, health and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Any, Literal

from storm_dagster.core.diagnosis import FindingKind
from storm_dagster.http.description import HttpApi
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.verbs import VERBS, BlacklistRequest, SubmitRequest, check_request
from storm_dagster.nimbus.http.blob_routes import BlobEndpoints
from storm_dagster.nimbus.http.event_route import event_endpoint
from storm_dagster.nimbus.http.metrics import Metrics
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.submitting import Submissions
from storm_dagster.operations.live.blacklist import change_blacklist


def add_routes(api: HttpApi, nimbus: Nimbus, reader: ClusterReader, submissions: Submissions, metrics: Metrics) -> None:
    """Add the routes of this package."""
    lifecycle = LifecycleRequests(nimbus)

    def act(name: str, verb: str, document: Mapping[str, Any]) -> dict[str, Any]:
        answer = lifecycle.act(name, verb, document)
        reader.forget()
        return answer

    def blacklist(document: Mapping[str, Any]) -> dict[str, Any]:
        epoch = nimbus.status.require()
        asked = check_request(BlacklistRequest, document, "a change of the blacklist")
        return {"hosts": list(change_blacklist(nimbus.operations(epoch), **asked.fields()))}

    handlers = {
        "blobs": BlobEndpoints(nimbus),
        "events": event_endpoint(nimbus),
        "reader": reader,
        "dagster": nimbus.dagster,
        "submissions": submissions,
        "metrics": metrics,
        "act": act,
        "replay": lambda name, _, **asked: reader.dead_letters(name, replay=True, **asked),
        "read_blacklist": lambda: {"hosts": sorted(nimbus.cluster.blacklist())},
        "blacklist": blacklist,
    }
    types = {
        "finding": FindingKind,
        "verb": Literal[tuple(VERBS)],
        "verb request": reduce(or_, dict.fromkeys(row.request for row in VERBS.values())),
        "SubmitRequest": SubmitRequest,
        "BlacklistRequest": BlacklistRequest,
    }
    api.add("storm_dagster.nimbus.http", handlers, types, {"task": _task_of})


def _task_of(text: str | None) -> int | None:
    """The query parameter ``task``."""
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 10:
        raise InvalidRequest(f"task {text!r:.40} is not a task id: give a number")
    return int(text)
