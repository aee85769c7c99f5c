"""Changes of running topologies, and draining of hosts."""

import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storm_dagster.client.http import NimbusClient
from storm_dagster.client.repeating import SentRequest, drop_upload, send_request
from storm_dagster.client.uploads import upload_target
from storm_dagster.client.waiting import (
    Progress,
    find_topology,
    wait_for_run,
    wait_for_status,
    wait_for_tasks,
)
from storm_dagster.model.errors import NotAlive, StormDagsterError, Unavailable
from storm_dagster.model.names import check_topology_reference
from storm_dagster.model.requests import check_request
from storm_dagster.model.run_result import RunResult
from storm_dagster.model.verbs import VERBS, Verb

_AT_ONCE = 8
"""Number of topologies that ``drain_hosts`` moves at the same time."""


@dataclass(frozen=True)
class Change:
    """An accepted submission or change, and its result after a wait."""

    name: str
    id: str | None = None
    """Topology id; ``None`` for a submission without a wait."""
    status: str | None = None
    """Status of the topology, after a wait the one that it then has."""
    run_id: str | None = None
    """Dagster run of the change; ``None`` if it has none."""
    seconds: float = 0.0
    """Duration of the call."""
    upgrade: Mapping[str, Any] | None = None
    """State of the upgrade (as in ``show --json``); ``None`` if none is under way."""
    conf: Mapping[str, Any] | None = None
    """Changes of the conf by new code: key -> ``{"old", "new"}``."""
    cancelled: str = ""
    """Submissions that a kill cancelled, for people; empty if the topology was published."""
    planned: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a dry run: ``dry_run``, ``would`` and, for a rebalance, its ``plan``."""
    token: str = ""
    """Client token of a submission."""
    sent: bool = False
    """True if the archive of a submission was transferred."""
    result: RunResult = field(default_factory=RunResult)
    """Outcome, moved tasks and warnings; empty without a wait, and of an earlier release."""

    def to_document(self) -> dict[str, Any]:
        """The document that changing verbs print."""
        document: dict[str, Any] = {
            "id": self.id,
            "name": self.name,
            "status": self.status,
            "run_id": self.run_id,
            "seconds": round(self.seconds, 3),
            **self.result.to_document(),
        }
        if self.upgrade is not None:
            document["upgrade"] = dict(self.upgrade)
        if self.conf is not None:
            document["conf"] = dict(self.conf)
        if self.cancelled:
            document["cancelled"] = self.cancelled
        document.update(self.planned)
        return document


def change_topology(
    nimbus: NimbusClient,
    name: str,
    target: str | None = None,
    args: Sequence[str] = (),
    *,
    verb: str,
    conf: Mapping[str, Any] | None = None,
    home: Path | None = None,
    requirements: Path | None = None,
    wait: bool = True,
    timeout: float = 300.0,
    progress: Progress | None = None,
    **fields: Any,
) -> Change:
    """Execute the verb ``verb``; with ``wait`` return when it has its effect.

    ``fields`` are those of the verb's request (:mod:`storm_dagster.model.verbs`). New code is that
    of TARGET with ``args``, ``conf`` and ``requirements``, as for a submission. Conf of earlier
    submissions that is not in ``conf`` is kept (``topology.update.keep.conf``). An error of new
    code is raised as the error of its kind, and the old code continues to run. A verb that brings
    code has a token, with which it is repeated if the leader changes
    (:mod:`storm_dagster.client.repeating`); other verbs are continued by their run, or executed by
    the next leader. ``timeout`` (seconds) bounds the wait after ``wait_secs``; ``dry_run`` only
    returns the changes that it would make.
    """
    started = time.monotonic()
    row = VERBS[verb]
    path = f"/v1/topologies/{check_topology_reference(name)}"
    set_fields = {key: value for key, value in fields.items() if not _is_left_out(value)}
    request = check_request(row.request, set_fields, verb)
    body = request.model_dump(mode="json", exclude_unset=True)
    token: str | None = None
    if row.brings_code:
        nimbus = nimbus.accepting_fewer(body.get("allow_degraded", False))
        # Raises NotAlive before the code is packed and uploaded.
        nimbus.get(path)
        token = body.setdefault("token", uuid.uuid4().hex)
        if target is not None:
            uploaded = upload_target(
                nimbus,
                target,
                args,
                conf=conf,
                home=home,
                requirements=requirements,
                progress=progress,
            )
            body["handle"] = uploaded.handle
    handle: str | None = body.get("handle")
    change = _ChangeRequest(
        nimbus,
        row,
        name,
        body,
        # A dry run has no effect to wait for.
        wait=wait and not request.dry_run,
        deadline=started + timeout + body.get("wait_secs", 0),
        progress=progress,
    )
    if request.dry_run:
        token = None
    try:
        sent = send_request(nimbus, change.send, token=token, handle=handle, progress=progress)
    finally:
        if request.dry_run and handle is not None:
            # Nothing uses the upload after a dry run.
            drop_upload(nimbus, handle)
    return _change_of(sent, name, seconds=time.monotonic() - started)


@dataclass(frozen=True)
class _ChangeRequest:
    """Request of a change, which may be sent more than once."""

    nimbus: NimbusClient
    verb: Verb
    name: str
    """Name or id of the topology."""
    body: Mapping[str, Any]
    wait: bool
    deadline: float
    """End of the wait for the effect, of the monotonic clock."""
    progress: Progress | None

    def send(self, on_failure: Callable[[], None]) -> SentRequest:
        """Send the request; with ``wait`` return when the change has its effect.

        ``on_failure`` is called when the run of the change has failed.
        """
        path = f"/v1/topologies/{self.name}/{self.verb.name}"
        # Not repeated after a broken connection: the change may have been made.
        answer = self.nimbus.post(path, self.body, repeat=False, launches=True)
        # A cancelled submission has no topology to wait for.
        if not self.wait or answer.get("cancelled"):
            return SentRequest(answer, answer, {})
        done: Mapping[str, Any] = answer
        if answer.get("run_id"):
            done = wait_for_run(
                self.nimbus,
                answer["run_id"],
                deadline=self.deadline,
                progress=self.progress,
                on_failure=on_failure,
            )
        topology = _wait_for_effect(
            self.nimbus,
            self.verb,
            self.name,
            answer,
            deadline=self.deadline,
            progress=self.progress,
        )
        return SentRequest(answer, done, topology)


def _change_of(sent: SentRequest, name: str, *, seconds: float) -> Change:
    """The change of a request that was sent; ``seconds`` is the duration of the call."""
    answer = sent.answer
    topology = sent.topology
    return Change(
        name=str(answer.get("name") or name),
        id=topology.get("id") or answer.get("id"),
        status=topology.get("status") or answer.get("status"),
        run_id=answer.get("run_id"),
        seconds=seconds,
        upgrade=topology.get("upgrade"),
        conf=answer.get("conf"),
        cancelled=str(answer.get("cancelled") or ""),
        planned={key: answer[key] for key in ("dry_run", "would", "plan") if key in answer},
        result=RunResult.of_document(sent.done),
    )


def _is_left_out(value: object) -> bool:
    """True for values that mean "not given"; 0 is a given value."""
    return value is False or value in (None, "", [], (), {})


def _wait_for_effect(
    nimbus: NimbusClient,
    verb: Verb,
    name: str,
    answer: Mapping[str, Any],
    *,
    deadline: float,
    progress: Progress | None,
) -> Mapping[str, Any]:
    """Wait for the effect of an accepted change, whose run has ended.

    ``answer`` is the response to the change, ``name`` the topology's name or id. Return the
    document of the topology, which has only the status ``KILLED`` if the topology is gone.
    :class:`Unavailable` at the deadline.
    """
    topology: Mapping[str, Any] | None = None
    if verb.until:
        # After a kill, another topology may have the name.
        reference = answer["id"] if verb.until == (None,) else name
        topology = wait_for_status(
            nimbus,
            reference,
            lambda document: _status_of(document) in verb.until,
            deadline=deadline,
            what=f"the end of the {verb.name}",
        )
    if verb.tasks:
        return wait_for_tasks(nimbus, name, deadline=deadline, progress=progress)
    if not verb.until:
        return nimbus.get(f"/v1/topologies/{name}")
    return topology or {"status": "KILLED"}


def _status_of(topology: Mapping[str, Any] | None) -> str | None:
    """Status of a topology; ``None`` if it is gone."""
    return None if topology is None else topology["status"]


def topologies_on(nimbus: NimbusClient, hosts: Collection[str]) -> list[str]:
    """Names of the topologies that have workers on one of the hosts, sorted.

    A topology that ends while the list is read has none.
    """
    names: list[str] = []
    for row in nimbus.get("/v1/topologies")["topologies"]:
        topology = find_topology(nimbus, row["name"]) or {}
        worker_hosts = {worker["host"] for worker in topology.get("workers", ())}
        if not worker_hosts.isdisjoint(hosts):
            names.append(row["name"])
    return sorted(names)


def drain_hosts(
    nimbus: NimbusClient, hosts: Collection[str], *, wait: bool = True, **options: Any
) -> list[str]:
    """Rebalance every topology that has workers on these hosts; return the names.

    The hosts are on the blacklist. The fewest tasks move. With ``wait`` it returns when the hosts
    are empty and all moved tasks run. A topology that cannot be moved does not prevent the others:
    :class:`Unavailable` then lists each with the reason. ``options`` are those of
    :func:`change_topology`: ``wait_secs``, ``timeout``, ``progress``.
    """

    def move(name: str) -> str | None:
        """Rebalance a topology; return the reason if that failed, or ``None``."""
        try:
            change_topology(nimbus, name, verb="rebalance", wait=wait, **options)
        except NotAlive:
            pass
        except StormDagsterError as error:
            return error.message
        return None

    names = topologies_on(nimbus, hosts)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        errors = list(pool.map(move, names))
    reasons = {name: error for name, error in zip(names, errors, strict=True) if error}
    if wait:
        for name in topologies_on(nimbus, hosts):
            reasons.setdefault(
                name, "it has workers that their supervisor cannot stop, or that were just added"
            )
    if reasons:
        texts = [f"{name}: {reason}" for name, reason in sorted(reasons.items())]
        raise Unavailable(
            f"not empty, {', '.join(sorted(hosts))} stay blacklisted, and their workers keep "
            f"running: {'; '.join(texts)}"
        )
    return names
