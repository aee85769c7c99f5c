"""Submission of topologies, for the command line, Dagster and users' programs."""

import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from storm_dagster.client.changes import Change
from storm_dagster.client.http import NimbusClient
from storm_dagster.client.repeating import SentRequest, send_request
from storm_dagster.client.uploads import Uploaded, upload, upload_target
from storm_dagster.client.waiting import Progress, wait_for_run, wait_for_tasks
from storm_dagster.host.endpoints import cluster_conf, home_dir
from storm_dagster.model.errors import InvalidRequest, InvalidTopology
from storm_dagster.model.names import check_topology_name
from storm_dagster.model.run_result import RunResult
from storm_dagster.model.topology import TopologySpec
from storm_dagster.packaging.archive import Archive, build_archive, collect_files, hash_file
from storm_dagster.packaging.describe import topology_spec_of
from storm_dagster.packaging.target import DESCRIBING

STORM_JAR = "STORM_JAR"
"""Environment variable with the archive of the running program, by Storm's name.

``storm-dagster jar`` sets it.
"""


def submit_uploaded(
    nimbus: NimbusClient,
    uploaded: Uploaded,
    *,
    name: str,
    wait: bool = True,
    timeout: float = 300.0,
    started: float | None = None,
    progress: Progress | None = None,
    on_document: Callable[[dict[str, Any]], None] = lambda _: None,
    **fields: Any,
) -> Change:
    """Submit an upload; with ``wait`` return when all tasks run.

    ``fields`` are those of the request of a submission; those that are ``None`` are left out. A
    repeated call with the same ``token`` gives the same topology, and the request is repeated with
    it if the leader changes (:mod:`storm_dagster.client.repeating`). ``timeout`` (seconds) bounds
    the wait from ``started`` (``time.monotonic()``, by default now); ``on_document`` is that of
    :func:`wait_for_run`.
    """
    if started is None:
        started = time.monotonic()
    body: dict[str, Any] = {
        "name": name,
        "handle": uploaded.handle,
        "token": uuid.uuid4().hex,
    }
    body.update({field: value for field, value in fields.items() if value is not None})
    token = str(body["token"])
    deadline = started + timeout

    def attempt(on_failure: Callable[[], None]) -> SentRequest:
        answer = nimbus.post("/v1/submit", body, launches=True)
        if not wait:
            return SentRequest(answer, {}, {})
        done: Mapping[str, Any] = {}
        if answer.get("run_id"):
            done = wait_for_run(
                nimbus,
                answer["run_id"],
                deadline=deadline,
                progress=progress,
                on_document=on_document,
                on_failure=on_failure,
            )
        topology = wait_for_tasks(nimbus, name, deadline=deadline, progress=progress)
        return SentRequest(answer, done, topology)

    sent = send_request(nimbus, attempt, token=token, handle=uploaded.handle, progress=progress)
    return Change(
        name=name,
        id=sent.topology.get("id"),
        status=sent.topology.get("status"),
        run_id=sent.answer.get("run_id"),
        seconds=time.monotonic() - started,
        token=token,
        sent=uploaded.sent,
        result=RunResult.of_document(sent.done),
    )


def submit_target(
    nimbus: NimbusClient,
    target: str,
    args: Sequence[str] = (),
    *,
    name: str | None = None,
    conf: Mapping[str, Any] | None = None,
    home: Path | None = None,
    requirements: Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Change:
    """Describe, pack, upload and submit TARGET, as ``storm-dagster submit``.

    ``options`` are those of :func:`submit_uploaded`.
    """
    started = time.monotonic()
    nimbus = nimbus.accepting_fewer(bool(options.get("allow_degraded")))
    if name is not None:
        check_topology_name(name)
    uploaded = upload_target(
        nimbus, target, args, conf=conf, home=home, requirements=requirements, progress=progress
    )
    chosen = check_topology_name(name or uploaded.name)
    return submit_uploaded(
        nimbus, uploaded, name=chosen, started=started, progress=progress, **options
    )


def _program_archive(spec: TopologySpec, folder: Path, home: Path) -> Archive:
    """Archive of the running program.

    It is the one that ``STORM_JAR`` names, else it is built in ``folder``, of the topology's own
    modules: of the package, or the folder of the module, of the first component that is not of this
    package. ``home`` is left out. Raises :class:`InvalidRequest` without either.
    """
    jar = os.environ.get(STORM_JAR)
    if jar:
        path = Path(jar)
        if not path.is_file():
            raise InvalidRequest(
                f"{STORM_JAR}={jar} does not exist: run the program as `storm-dagster jar`"
            )
        return Archive(path, hash_file(path), path.stat().st_size, 0)
    for _, _, component in spec.components():
        # "package.module:Class"; empty for a multilang program.
        module_name, _, _ = (component.object.python or "").partition(":")
        top_level_name, _, _ = module_name.partition(".")
        module = sys.modules.get(top_level_name)
        file = getattr(module, "__file__", None)
        if module is None or file is None or module.__name__ == "storm_dagster":
            continue
        module_path = Path(file).absolute()
        if module_path.name == "__init__.py":
            package = module_path.parent
            files = collect_files(package.parent, [package.name], leave_out=[home])
        else:
            files = collect_files(module_path.parent, None, leave_out=[home])
        return build_archive(folder / "archive.zip", files)
    raise InvalidRequest(
        f"no archive is known for topology {spec.name!r}: run the program as "
        f"`storm-dagster jar ARCHIVE MODULE`, which sets {STORM_JAR}"
    )


def submit_topology(
    name: str,
    conf: Mapping[str, Any] | None,
    topology: Any,
    *,
    inactive: bool = False,
    token: str | None = None,
    wait: bool = True,
    home: str | os.PathLike[str] | None = None,
    timeout: float = 300.0,
    allow_degraded: bool = False,
    progress: Progress | None = None,
) -> Change:
    """Submit ``topology`` under ``name`` to the cluster of ``home``.

    Without ``home`` the folder is ``STORM_DAGSTER_HOME``; the seeds of its conf name the cluster if
    the folder has none. ``topology`` is a ``Topology`` class, a ``TopologyBuilder`` or a
    ``TopologySpec``. The program's archive is the one that ``STORM_JAR`` names (``storm-dagster
    jar`` sets it), else the folder of the topology's modules; it is uploaded once per process, and
    not at all if its hash is stored already. With ``wait`` the call returns when all tasks run, at
    most ``timeout`` seconds later. The same ``token`` gives the same topology id, however often it
    is submitted. Raises the class of :class:`StormDagsterError` that fits the failure.
    """
    if os.environ.get(DESCRIBING):
        raise InvalidTopology(
            "submit_topology was called while the module was being described: submit such a "
            'program with `storm-dagster jar`, or put the call under if __name__ == "__main__"'
        )
    started = time.monotonic()
    check_topology_name(name)
    spec = topology_spec_of(topology)
    if spec is None:
        raise InvalidTopology(
            f"{topology!r:.80} is not a topology: give a Topology class, a TopologyBuilder or a "
            "TopologySpec"
        )
    folder = home_dir(home)
    cluster = cluster_conf(folder)
    with NimbusClient.of_cluster(cluster, folder) as nimbus:
        with tempfile.TemporaryDirectory(prefix="storm-dagster-submit-") as scratch:
            archive = _program_archive(spec, Path(scratch), folder)
            uploaded = upload(
                nimbus.accepting_fewer(allow_degraded),
                archive=archive,
                conf=conf or {},
                topology=spec,
                name=name,
            )
        return submit_uploaded(
            nimbus,
            uploaded,
            name=name,
            token=token or None,
            inactive=inactive,
            allow_degraded=allow_degraded,
            wait=wait,
            timeout=timeout,
            started=started,
            progress=progress,
        )
