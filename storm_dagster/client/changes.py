"""New code for a topology that runs: what its changes answer, and hot deploy, which changes all of it at once."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storm_dagster.client.http import NimbusClient
from storm_dagster.client.uploads import upload_target
from storm_dagster.client.waiting import Progress, wait_for_run, wait_for_tasks
from storm_dagster.model.names import check_topology_reference


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


def ask(nimbus: NimbusClient, name: str, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a change of the topology of that name. Arguments that are empty are left out."""
    given = {key: value for key, value in body.items() if value not in (None, "", [], ())}
    answer = nimbus.post(f"/v1/topologies/{check_topology_reference(name)}/{verb}", given, repeat=False)
    if given.get("dry_run") and "handle" in given:
        nimbus.request("DELETE", f"/v1/uploads/{given['handle']}")
    return answer


def ask_for_code(
    nimbus: NimbusClient,
    name: str,
    verb: str,
    target: str | None,
    args: Sequence[str],
    *,
    conf: Mapping[str, Any] | None,
    home: Path | None,
    requirements: Path | None,
    token: str | None,
    allow_degraded: bool,
    dry_run: bool,
    progress: Progress | None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The answer to a change that brings new code (none without ``target``), which is uploaded first."""
    nimbus = nimbus.accepting_fewer(allow_degraded)
    nimbus.get(f"/v1/topologies/{check_topology_reference(name)}")
    handle = None
    if target is not None:
        uploaded = upload_target(
            nimbus, target, args, conf=conf, home=home, requirements=requirements, progress=progress
        )
        handle = uploaded.handle
    body = {
        "handle": handle,
        "token": token or uuid.uuid4().hex,
        "allow_degraded": allow_degraded or None,
        "dry_run": dry_run or None,
        **(more or {}),
    }
    return ask(nimbus, name, verb, body)


def change_of(answer: Mapping[str, Any], name: str, started: float, document: Mapping[str, Any] | None) -> Change:
    """The change that nimbus answered; ``document``: the topology as it is now, when it was waited for."""
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
    answer = ask_for_code(
        nimbus,
        name,
        "update",
        target,
        args,
        conf=conf,
        home=home,
        requirements=requirements,
        token=token,
        allow_degraded=allow_degraded,
        dry_run=dry_run,
        progress=progress,
    )
    document = None
    if wait and not dry_run:
        deadline = started + timeout
        if answer.get("run_id"):
            wait_for_run(nimbus, answer["run_id"], deadline=deadline, progress=progress)
        document = wait_for_tasks(nimbus, name, deadline=deadline, progress=progress)
    return change_of(answer, name, started, document)
