"""Changes of topologies that run: one function for every verb, and the draining of hosts."""

import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storm_dagster.client.http import NimbusClient
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
from storm_dagster.model.verbs import VERBS

_AT_ONCE = 8


@dataclass(frozen=True)
class Change:
    """An accepted submission or change, and its outcome when it was waited for."""

    name: str
    id: str | None = None
    status: str | None = None
    run_id: str | None = None
    seconds: float = 0.0
    upgrade: Mapping[str, Any] | None = None
    """What the upgrade has come to (``show --json``); ``None`` when none is under way."""
    conf: Mapping[str, Any] | None = None
    """What new code changes in the conf: key -> ``{"old", "new"}``."""
    planned: Mapping[str, Any] = field(default_factory=dict)
    """Of a dry run: ``dry_run``, ``would`` and, for a rebalance, its ``plan``."""
    token: str = ""
    """Client token of a submission."""
    sent: bool = False
    """Whether a submission's archive traveled."""

    def to_document(self) -> dict[str, Any]:
        """The document that changing verbs print."""
        more = {"upgrade": self.upgrade, "conf": self.conf}
        return {
            "id": self.id,
            "name": self.name,
            "status": self.status,
            "run_id": self.run_id,
            "seconds": round(self.seconds, 3),
            **{key: dict(value) for key, value in more.items() if value is not None},
            **self.planned,
        }


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
    """Ask for a verb, whose request has ``fields`` (:mod:`storm_dagster.model.verbs`); with
    ``wait`` until its effect.

    New code is that of TARGET with ``args``, ``conf`` and ``requirements``, as of a submission.
    Conf that was given at earlier submissions and not in ``conf`` is kept
    (``topology.update.keep.conf``). Whatever is wrong with new code is raised, as the error of its
    kind, and the old code runs on. ``timeout`` (seconds) bounds the waiting after ``wait_secs``;
    ``dry_run`` only returns what would change.
    """
    started = time.monotonic()
    row, path = VERBS[verb], f"/v1/topologies/{check_topology_reference(name)}"
    given = {
        key: value
        for key, value in fields.items()
        if value is not False and value not in (None, "", [], (), {})
    }
    asked = check_request(row.request, given, verb)
    body = asked.model_dump(mode="json", exclude_unset=True)
    if row.brings_code:
        nimbus = nimbus.accepting_fewer(body.get("allow_degraded", False))
        nimbus.get(path)
        body.setdefault("token", uuid.uuid4().hex)
        if target is not None:
            body["handle"] = upload_target(
                nimbus,
                target,
                args,
                conf=conf,
                home=home,
                requirements=requirements,
                progress=progress,
            ).handle
    answer = nimbus.post(f"{path}/{verb}", body, repeat=False, launches=True)
    found: dict[str, Any] = {}
    if asked.dry_run:
        if "handle" in body:
            nimbus.request("DELETE", f"/v1/uploads/{body['handle']}")
    elif wait:
        deadline = started + timeout + body.get("wait_secs", 0)
        if answer.get("run_id"):
            wait_for_run(nimbus, answer["run_id"], deadline=deadline, progress=progress)
        if row.until:
            found = wait_for_status(
                nimbus,
                # Its name may be another topology's by then.
                answer["id"] if row.until == (None,) else name,
                lambda now: (None if now is None else now["status"]) in row.until,
                deadline=deadline,
                what=f"the end of the {verb}",
            ) or {"status": "KILLED"}
        if row.tasks:
            found = wait_for_tasks(nimbus, name, deadline=deadline, progress=progress)
        elif not row.until:
            found = nimbus.get(path)
    return Change(
        name=str(answer.get("name") or name),
        id=found.get("id") or answer.get("id"),
        status=found.get("status") or answer.get("status"),
        run_id=answer.get("run_id"),
        seconds=time.monotonic() - started,
        upgrade=found.get("upgrade"),
        conf=answer.get("conf"),
        planned={key: answer[key] for key in ("dry_run", "would", "plan") if key in answer},
    )


def topologies_on(nimbus: NimbusClient, hosts: Collection[str]) -> list[str]:
    """Names of the topologies that have workers on one of the hosts."""
    names = [row["name"] for row in nimbus.get("/v1/topologies")["topologies"]]
    found = {name: find_topology(nimbus, name) or {} for name in names}
    return sorted(
        name
        for name in names
        if any(each["host"] in hosts for each in found[name].get("workers", ()))
    )


def drain_hosts(
    nimbus: NimbusClient, hosts: Collection[str], *, wait: bool = True, **options: Any
) -> list[str]:
    """Rebalance every topology that has workers on these hosts, which are on the blacklist; their
    names.

    The fewest tasks move. With ``wait`` it returns when the hosts are empty and all moved tasks
    run. A topology that cannot be moved keeps no other one: :class:`Unavailable` then lists each
    with the reason. ``options`` are those of :func:`change_topology`: ``wait_secs``, ``timeout``,
    ``progress``.
    """

    def move(name: str) -> str | None:
        try:
            change_topology(nimbus, name, verb="rebalance", wait=wait, **options)
        except NotAlive:
            pass
        except StormDagsterError as error:
            return error.message
        return None

    names = topologies_on(nimbus, hosts)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        failed = {name: why for name, why in zip(names, pool.map(move, names), strict=True) if why}
    for name in topologies_on(nimbus, hosts) if wait else ():
        failed.setdefault(
            name, "workers are there whose supervisor cannot stop them, or which came meanwhile"
        )
    if failed:
        why = "; ".join(f"{name}: {reason}" for name, reason in sorted(failed.items()))
        raise Unavailable(
            f"not empty, {', '.join(sorted(hosts))} stay blacklisted, and what is there runs on: {why}"
        )
    return names
