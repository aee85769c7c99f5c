"""New code for a topology that runs: hot deploy, and gray upgrade worker by worker."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storm_dagster.client.http import NimbusClient
from storm_dagster.client.uploads import upload_target
from storm_dagster.client.waiting import Progress, wait_for_run, wait_for_status, wait_for_tasks
from storm_dagster.model.names import check_topology_name


@dataclass(frozen=True)
class Change:
    """An accepted change, and its outcome when it was waited for."""

    id: str | None
    name: str
    status: str | None
    run_id: str | None
    seconds: float = 0.0
    upgrade: Mapping[str, Any] | None = None
    """What the upgrade has come to (``show --json``); ``None`` when none is under way."""
    conf: Mapping[str, Any] | None = None
    """What the new code changes in the conf: key -> ``{"old", "new"}``."""

    def to_document(self) -> dict[str, Any]:
        """The document that changing verbs print."""
        document: dict[str, Any] = {
            "id": self.id,
            "name": self.name,
            "status": self.status,
            "run_id": self.run_id,
            "seconds": round(self.seconds, 3),
        }
        if self.upgrade is not None:
            document["upgrade"] = dict(self.upgrade)
        if self.conf is not None:
            document["conf"] = dict(self.conf)
        return document


def _upload(
    nimbus: NimbusClient,
    target: str,
    args: Sequence[str],
    conf: Mapping[str, Any] | None,
    home: Path | None,
    requirements: Path | None,
    progress: Progress | None,
) -> str:
    uploaded = upload_target(nimbus, target, args, conf=conf, home=home, requirements=requirements, progress=progress)
    return uploaded.handle


def _ask(nimbus: NimbusClient, name: str, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in body.items() if value not in (None, "", [], ())}
    answer = nimbus.post(f"/v1/topologies/{check_topology_name(name)}/{verb}", given, repeat=False)
    if given.get("dry_run") and "handle" in given:
        nimbus.request("DELETE", f"/v1/uploads/{given['handle']}")
    return answer


def _change(answer: Mapping[str, Any], name: str, started: float, document: Mapping[str, Any] | None) -> Change:
    """``document``: the topology as it is now, when it was waited for."""
    now = document or {}
    return Change(
        id=now.get("id") or answer.get("id"),
        name=str(answer.get("name") or name),
        status=now.get("status") or answer.get("status"),
        run_id=answer.get("run_id"),
        seconds=time.monotonic() - started,
        upgrade=now.get("upgrade"),
        conf=answer.get("conf"),
    )


def update_topology(
    nimbus: NimbusClient,
    name: str,
    target: str,
    args: Sequence[str] = (),
    *,
    conf: Mapping[str, Any] | None = None,
    home: Path | None = None,
    requirements: Path | None = None,
    token: str | None = None,
    allow_degraded: bool = False,
    wait: bool = True,
    timeout: float = 300.0,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Change:
    """Hot deploy: TARGET runs in the place of the topology of that name, under a new id.

    With ``wait`` it returns when all tasks of the new one run. Whatever is wrong with the new code is raised, as the
    error of its kind, and the old topology runs on. Conf that was given at earlier submissions and not in ``conf``
    is kept (``topology.update.keep.conf``). ``dry_run`` only returns the changes to the conf.
    """
    started = time.monotonic()
    nimbus.get(f"/v1/topologies/{check_topology_name(name)}")
    handle = _upload(nimbus, target, args, conf, home, requirements, progress)
    body = {
        "handle": handle,
        "token": token or uuid.uuid4().hex,
        "allow_degraded": allow_degraded or None,
        "dry_run": dry_run or None,
    }
    answer = _ask(nimbus, name, "update", body)
    document = None
    if wait and not dry_run:
        deadline = started + timeout
        if answer.get("run_id"):
            wait_for_run(nimbus, answer["run_id"], deadline=deadline, progress=progress)
        document = wait_for_tasks(nimbus, name, deadline=deadline, progress=progress)
    return _change(answer, name, started, document)


def gray_upgrade(
    nimbus: NimbusClient,
    name: str,
    target: str | None = None,
    args: Sequence[str] = (),
    *,
    number: int = 0,
    component: str | None = None,
    workers: Iterable[str] = (),
    conf: Mapping[str, Any] | None = None,
    home: Path | None = None,
    requirements: Path | None = None,
    token: str | None = None,
    allow_degraded: bool = False,
    wait: bool = True,
    timeout: float = 300.0,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Change:
    """Run the new code of TARGET on some workers first; without TARGET, take the next batch of workers.

    ``workers`` (``host:port``) count before ``component``, that before ``number``. With ``wait`` it returns when the
    batch runs the new code; when that code ends a worker meanwhile the upgrade is rolled back and the reason raised.
    ``conf`` and ``dry_run`` as of :func:`update_topology`.
    """
    started = time.monotonic()
    nimbus.get(f"/v1/topologies/{check_topology_name(name)}")
    handle = None if target is None else _upload(nimbus, target, args, conf, home, requirements, progress)
    body = {
        "handle": handle,
        "token": token or uuid.uuid4().hex,
        "number": number,
        "component": component,
        "workers": list(workers),
        "allow_degraded": allow_degraded or None,
        "dry_run": dry_run or None,
    }
    answer = _ask(nimbus, name, "gray-upgrade", body)
    document = None
    if wait and not dry_run:
        if answer.get("run_id"):
            wait_for_run(nimbus, answer["run_id"], deadline=started + timeout, progress=progress)
        document = nimbus.get(f"/v1/topologies/{name}")
    return _change(answer, name, started, document)


def complete_upgrade(
    nimbus: NimbusClient,
    name: str,
    *,
    wait: bool = True,
    timeout: float = 300.0,
    progress: Progress | None = None,
) -> Change:
    """End the upgrade in its present state: its code is the topology's. Other workers get it at their next start."""
    return _end(nimbus, name, "complete-upgrade", wait, timeout, progress)


def roll_back(
    nimbus: NimbusClient,
    name: str,
    *,
    wait: bool = True,
    timeout: float = 300.0,
    progress: Progress | None = None,
) -> Change:
    """Take every upgraded worker back to the former code; with ``wait`` until all of them run it."""
    return _end(nimbus, name, "rollback", wait, timeout, progress)


def _end(nimbus: NimbusClient, name: str, verb: str, wait: bool, timeout: float, progress: Progress | None) -> Change:
    started = time.monotonic()
    answer = _ask(nimbus, name, verb, {})
    document = None
    if wait:
        deadline = started + timeout
        if answer.get("run_id"):
            wait_for_run(nimbus, answer["run_id"], deadline=deadline, progress=progress)
        document = wait_for_status(
            nimbus,
            name,
            lambda found: found is None or found["status"] not in ("UPGRADING", "ROLLBACK"),
            deadline=deadline,
            what="the end of the upgrade",
        )
    return _change(answer, name, started, document)
