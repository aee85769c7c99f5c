"""Launcher of workers: folder, spec, environment, log and process."""

import logging
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storm_dagster.core.slots.model import Work, Worker
from storm_dagster.host.cgroups import JOIN
from storm_dagster.host.clock import boot_clock, boot_id
from storm_dagster.host.descendants import MARK
from storm_dagster.host.files import read_json_object, write_atomically
from storm_dagster.host.processes import RunFile, start_ticks
from storm_dagster.host.worker_spec import SPARE, WORKER_MODULE, WorkerSpec
from storm_dagster.model.conf_layers import merge_conf
from storm_dagster.model.errors import InvalidTopology, Unavailable
from storm_dagster.operations.live.worker_requests import link_key_of
from storm_dagster.security.authority import (
    AUTHORITY_FILE,
    CLIENT_FILE,
    Authority,
    CertificateFolder,
    utc_now,
)
from storm_dagster.security.server_identity import DAEMON_USER, NEEDS_PROOF
from storm_dagster.security.settings import Security
from storm_dagster.security.zookeeper_access import ZooKeeperUsers
from storm_dagster.supervisor.handed_conf import handed_conf, handed_environment
from storm_dagster.supervisor.housekeeping import LOG_BACKUPS, rotate
from storm_dagster.supervisor.localizer import LocalCode
from storm_dagster.supervisor.processes import LiveWorker, WorkerProcess
from storm_dagster.supervisor.spares import Spares, end, start
from storm_dagster.supervisor.worker_cgroups import (
    WorkerCgroup,
    WorkerCgroups,
    record_cgroup,
)
from storm_dagster.supervisor.worker_user import OWN, WorkerUser, link_code, open_home, worker_user

_log = logging.getLogger(__name__)

_SPARE_CONF_KEYS = ("topology.environment", "topology.python")
"""Keys that a spare has from the supervisor's conf. A topology with other values gets another
process.
"""
SPEC = "SPEC.json"
"""File of a worker's specification in its working folder."""
HEARTBEAT = "heartbeat.json"
"""File of a worker's heartbeat in the folder that it can write."""


def heartbeat_path(folder: Path) -> Path:
    """Heartbeat of the worker of that working folder."""
    own = folder / OWN
    if own.is_dir():
        return own / HEARTBEAT
    return folder / HEARTBEAT


def log_path(home: Path, topology_id: str, port: int) -> Path:
    """Log of the worker of that slot, including standard output and error."""
    return home / "logs" / "workers" / topology_id / str(port) / "worker.log"


def worker_command(conf: Mapping[str, Any], spec: Path) -> list[str]:
    """Command line of a worker.

    It is an argument list without a shell, since it contains conf values.
    """
    interpreter = str(conf.get("topology.python") or sys.executable)
    return [interpreter, "-m", WORKER_MODULE, str(spec)]


def worker_environment(
    base: Mapping[str, str],
    conf: Mapping[str, Any],
    archive_root: Path | None,
    home: Path,
    allowed: Sequence[str] = (),
    *,
    other_user: bool = False,
) -> dict[str, str]:
    """Environment of a worker.

    It has the variables of ``base`` that :func:`handed_environment` selects by ``allowed``
    (``supervisor.worker.environment``) and ``other_user``, those of ``topology.environment``,
    which win, the import path, and ``home`` as STORM_DAGSTER_HOME. First on the path is
    ``archive_root`` (``None`` for a spare, which adds it itself), then the user's PYTHONPATH, then
    this package. Raises :class:`InvalidTopology` for a key of ``topology.environment`` that cannot
    name a variable.
    """
    topology_environment = conf.get("topology.environment") or {}
    for name, value in topology_environment.items():
        if not name or "=" in name or "\0" in name or "\0" in str(value):
            raise InvalidTopology(
                f"topology.environment: {name!r:.80} cannot name a variable: rename it"
            )
    environment = handed_environment(base, allowed, other_user)
    environment["PYTHONUNBUFFERED"] = "1"
    for name, value in topology_environment.items():
        environment[name] = str(value)
    user_path = environment.get("PYTHONPATH", "").split(os.pathsep)
    package_root = str(Path(__file__).parents[2])
    path = [str(archive_root or ""), *user_path, package_root]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(part for part in path if part))
    environment["STORM_DAGSTER_HOME"] = str(home)
    return environment


@dataclass(frozen=True)
class _Start:
    """Values of the start of one worker, before a file is written."""

    port: int
    worker: Worker
    folder: Path
    """Working folder."""
    own: Path
    """Folder that the worker can write: the working folder, or another user's folder in it."""
    log: Path
    spec: WorkerSpec
    """Spec in the working folder, which the supervisor reads when it starts."""
    worker_spec: WorkerSpec
    """Spec that the worker reads. That of another user is never believed by the supervisor."""
    environment: dict[str, str]
    command: list[str]
    user: WorkerUser | None
    """Another user of the worker; ``None`` for the user of the supervisor."""


class Launcher:
    """Launcher of one supervisor's workers.

    It blocks on the disk, and must not run in a loop.
    """

    def __init__(
        self, home: Path, supervisor_id: str, host: str, cluster_conf: Mapping[str, Any]
    ) -> None:
        self._home = home
        self._id = supervisor_id
        self._host = host
        self._conf = dict(cluster_conf)
        self._security = Security.of(self._conf)
        self._worker_conf = handed_conf(
            self._conf, other_user=bool(self._conf["supervisor.run.worker.as.user"])
        )
        """Conf of all workers. User code runs in them: they get their own link key and ZooKeeper
        user, never the cluster's secrets.
        """
        self._worker_conf[DAEMON_USER] = os.geteuid()
        # A worker lacks the secret by which others know it.
        self._worker_conf[NEEDS_PROOF] = self._security.secret is not None
        self._users = ZooKeeperUsers.of(self._conf)
        self.cgroups = WorkerCgroups(self._conf)
        self.cgroups.remove_forgotten()
        if not self.cgroups.parents:
            _log.info(
                "no cgroup (v2) can be made here: what a worker leaves is found by its mark, its "
                "session and its parents"
            )
        self._authority: Authority | None = None
        """Issues the certificates of workers of other users."""
        self.spares = Spares(self._conf["supervisor.worker.spares"], self._spawn_spare)
        if self._conf["supervisor.run.worker.as.user"]:
            self.spares.number = 0  # The user of a worker is not known before its launch.
            open_home(home)
            # The keystore of the supervisor is not for the workers' users.
            self._worker_conf["storm.zookeeper.ssl.keystore.path"] = self._conf[
                "supervisor.worker.zookeeper.keystore.path"
            ]
            self._worker_conf["storm.zookeeper.ssl.keystore.password"] = None
            folder = self._conf["supervisor.worker.zookeeper.authority"]
            if folder:
                self._authority = CertificateFolder(Path(folder).expanduser()).authority()

    def launch(self, port: int, work: Work, code: LocalCode) -> LiveWorker:
        """Start a worker of ``work`` in slot ``port``.

        Raises :class:`Corrupt` if the local code is damaged, :class:`InvalidTopology` for an
        environment that is not valid, :class:`Unavailable` if the interpreter cannot be started.
        """
        stored = read_json_object(code.path / "stormconf.ser", "it is fetched again")
        conf = merge_conf({"cluster": self._conf, "stored": stored})
        # The stored conf alone: no conf of this host chooses the submitter.
        user = worker_user(self._conf, stored)
        spare_fits = user is None and all(
            conf.get(key) == self._conf.get(key) for key in _SPARE_CONF_KEYS
        )
        worker_id, spare = self.spares.take(spare_fits)
        try:
            return self._launch(self._prepare(port, work, code, conf, user, worker_id), code, spare)
        except BaseException:
            if spare is not None:
                # No other launch can have it: it waits for the spec of this worker.
                end(spare)
            raise

    def _prepare(
        self,
        port: int,
        work: Work,
        code: LocalCode,
        conf: Mapping[str, Any],
        user: WorkerUser | None,
        worker_id: str,
    ) -> _Start:
        """Values of the start of the worker of that id as ``user``; no file is written.

        ``conf`` is that of its topology.
        """
        folder = self._home / "workers" / worker_id
        own = folder / OWN if user is not None else folder
        log = log_path(self._home, work.topology_id, port)
        spec = self._make_spec(port, work, code, worker_id, own, log)
        worker_spec = spec
        base_environment = dict(os.environ)
        if user is not None:
            user_home = user.home(self._home)
            worker_spec = self._spec_of_other_user(spec, code, own, user_home)
            base_environment = user.environment(base_environment, user_home)
        environment = worker_environment(
            base_environment,
            conf,
            worker_spec.archive_root,
            Path(worker_spec.home),
            self._conf["supervisor.worker.environment"],
            other_user=user is not None,
        )
        return _Start(
            port=port,
            worker=Worker(worker_id, work),
            folder=folder,
            own=own,
            log=log,
            spec=spec,
            worker_spec=worker_spec,
            # First, where it is found whatever else the environment has.
            environment={MARK: worker_id, **environment},
            command=worker_command(conf, own / SPEC),
            user=user,
        )

    def _spec_of_other_user(
        self, spec: WorkerSpec, code: LocalCode, own: Path, user_home: Path
    ) -> WorkerSpec:
        """Spec that a worker of another user reads, whose paths that user can reach."""
        return spec.model_copy(
            update={
                "home": str(user_home),
                "code_dir": str(own / code.path.name),
                # The folder of the log is closed to the worker.
                "log_path": "/dev/stdout",
                "conf": {**spec.conf, **self._certificate_conf(own)},
            }
        )

    def _launch(
        self, start: _Start, code: LocalCode, spare: subprocess.Popen[bytes] | None
    ) -> LiveWorker:
        """Start a worker, in ``spare`` if there is one. If that fails, its folder is removed."""
        cgroup: WorkerCgroup | None = None
        try:
            start.folder.mkdir(parents=True)
            _prepare_log(start.log, int(self._conf["worker.log.max.bytes"]))
            cgroup = self.cgroups.make(start.worker.id)
            record_cgroup(start.folder, cgroup)
            self._write_specs(start, code)
            # A spare that died in the meantime is replaced by an ordinary process.
            if spare is not None and _start_in(spare, cgroup):
                child = spare
            else:
                child = self._spawn(
                    start.command,
                    start.own,
                    start.environment,
                    start.log,
                    start.user,
                    cgroup=cgroup,
                )
        except BaseException:
            if cgroup is not None:
                cgroup.close()
            shutil.rmtree(start.folder, ignore_errors=True)
            raise
        worker = start.worker
        process = self._note_start(start.port, worker.work, worker.id, child, cgroup)
        heartbeat = Path(start.spec.heartbeat_path)
        return LiveWorker(start.port, worker, process, heartbeat, start.log, start.spec.started)

    def _write_specs(self, start: _Start, code: LocalCode) -> None:
        """Write the spec, and the own folder of a worker of another user."""
        start.spec.write(start.folder / SPEC)
        user = start.user
        if user is None:
            return
        start.folder.chmod(0o711)
        start.own.mkdir(mode=0o700)
        if self._authority is not None:
            _issue_certificate(self._authority, start.own, user)
        start.worker_spec.write(start.own / SPEC)
        link_code(code.path, start.own / code.path.name)
        user.give(start.own)

    def _certificate_conf(self, own: Path) -> dict[str, str]:
        """Conf keys of a worker of another user, which has certificates in its own folder."""
        if self._authority is None:
            return {}
        return {
            "storm.zookeeper.ssl.truststore.path": str(own / AUTHORITY_FILE),
            "storm.zookeeper.ssl.keystore.path": str(own / CLIENT_FILE),
        }

    def _note_start(
        self,
        port: int,
        work: Work,
        worker_id: str,
        child: subprocess.Popen[bytes],
        cgroup: WorkerCgroup | None,
    ) -> WorkerProcess:
        """Write the run file of a started worker and a log line; return its exact process.

        The process runs: the launch must not fail from here on.
        """
        ticks = start_ticks(child.pid)
        # A child that died at once has no start time; ProcessWatch finds it dead.
        start = -1 if ticks is None else ticks
        process = WorkerProcess(child.pid, start, boot_id(), child, worker_id, cgroup)
        with suppress(OSError):
            # The worker writes the same file when it is up; `stop` must find the process before.
            RunFile.write(self._home, "worker", f"{self._id}-{port}", {"data": port}, pid=child.pid)
        _log.info(
            "started worker %s of %s in slot %d, pid %d",
            worker_id,
            work.topology_id,
            port,
            child.pid,
            extra={"topology": work.topology_id},
        )
        return process

    def _make_spec(
        self, port: int, work: Work, code: LocalCode, worker_id: str, own: Path, log: Path
    ) -> WorkerSpec:
        """Spec of a new worker; ``own`` is the folder that the worker can write."""
        worker_conf = dict(self._worker_conf)
        if self._users is not None:
            worker_conf.update(self._users.worker_conf(work.topology_id))
        return WorkerSpec(
            worker_id=worker_id,
            token=secrets.token_hex(16),
            topology_id=work.topology_id,
            node=self._id,
            host=self._host,
            port=port,
            home=str(self._home),
            conf=worker_conf,
            link_key=link_key_of(self._security, work.topology_id),
            code_dir=str(code.path),
            code=code.sha256[:16],
            restarts=work.restarts,
            started=boot_clock(),
            heartbeat_path=str(own / HEARTBEAT),
            log_path=str(log),
        )

    def _spawn_spare(self, worker_id: str) -> subprocess.Popen[bytes]:
        """Start a process that reads its spec once a line comes from standard input."""
        spec_path = self._home / "workers" / worker_id / SPEC
        command = [*worker_command(self._conf, spec_path), SPARE]
        allowed = self._conf["supervisor.worker.environment"]
        environment = worker_environment(dict(os.environ), self._conf, None, self._home, allowed)
        # First, where it is found whatever else the environment has.
        environment = {MARK: worker_id, **environment}
        return self._spawn(
            command, self._home, environment, Path(os.devnull), None, subprocess.PIPE
        )

    def _spawn(
        self,
        command: list[str],
        folder: Path,
        environment: dict[str, str],
        log: Path,
        user: WorkerUser | None,
        stdin: int = subprocess.DEVNULL,
        cgroup: WorkerCgroup | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process in ``folder``, in its own session, with its output in ``log``.

        It is in ``cgroup`` before its program begins. ``user`` is ``None`` for the user of this
        process. Raises :class:`Unavailable` if the command cannot be started.
        """
        # Appending keeps the output of the slot's last worker, and leaves no hole after a
        # truncation.
        with log.open("ab") as output:
            if user is not None:
                os.fchown(output.fileno(), user.uid, user.gid)
            members = -1 if cgroup is None else cgroup.group.open_members()
            try:
                child = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environment,
                    stdin=stdin,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    # After the change of the user: from outside, root may lack the capability for
                    # it.
                    preexec_fn=_before_exec(self._conf, members),
                    user=user.uid if user is not None else None,
                    group=user.gid if user is not None else None,
                    extra_groups=() if user is not None else None,
                )
            except OSError as error:
                raise Unavailable(
                    f"{command[0]} cannot be started ({error.strerror or error}): "
                    "set topology.python to an interpreter that exists on every supervisor, and "
                    "that the worker's user may run"
                ) from None
            finally:
                if members >= 0:
                    os.close(members)
        if cgroup is not None:
            _ensure_in(cgroup, child.pid)
        return child


def _prepare_log(log: Path, max_bytes: int) -> None:
    """Make the folder of a worker's log, and rotate a log of more than ``max_bytes``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # The worker starts even if the disk has no room for a copy of the log.
    with suppress(OSError):
        # Also here, since the regular rotation may miss a worker that always dies soon.
        rotate(log, max_bytes, LOG_BACKUPS)


def _start_in(spare: subprocess.Popen[bytes], cgroup: WorkerCgroup | None) -> bool:
    """Move a spare, which has no child yet, into the cgroup and start it; false if it is dead."""
    if cgroup is not None:
        _ensure_in(cgroup, spare.pid)
    return start(spare)


def _issue_certificate(authority: Authority, own: Path, user: WorkerUser) -> None:
    """Write the worker's key and certificate, and the authority's, into its own folder.

    The user can read them when the folder is given to it, and no other user can.
    """
    certificate = authority.issue_client(f"worker of user {user.uid}", utc_now())
    write_atomically(own / CLIENT_FILE, certificate, mode=0o600)
    write_atomically(own / AUTHORITY_FILE, authority.pem, mode=0o600)


def _ensure_in(cgroup: WorkerCgroup, pid: int) -> None:
    """Move a process into the cgroup if it is not there: kernels before 5.16 ask the child."""
    if cgroup.group.holds(pid):
        return
    try:
        cgroup.group.add(pid)
    except ProcessLookupError:
        return  # It has ended.
    except OSError as error:
        _log.warning("process %d stays outside %s: %s", pid, cgroup.group.path, error)


def _before_exec(conf: Mapping[str, Any], members: int) -> Callable[[], None]:
    """Function that sets the resource limits of a new process, which becomes a worker.

    It first joins the cgroup of that open file; -1 without one. The function runs between fork and
    exec, and so imports no module.
    """
    # Not at the top: the command line says on every system that a supervisor needs Linux.
    import resource

    # A core dump would hold conf values, and fill the disk.
    limits = {resource.RLIMIT_CORE: 0}
    configured = {
        resource.RLIMIT_NOFILE: conf["supervisor.worker.max.files"],
        resource.RLIMIT_NPROC: conf["supervisor.worker.max.processes"],
    }
    for limit, value in configured.items():
        if value is None:
            continue
        _, hard_limit = resource.getrlimit(limit)
        if hard_limit == resource.RLIM_INFINITY:
            limits[limit] = value
        else:
            limits[limit] = min(value, hard_limit)

    def apply() -> None:
        if members >= 0:
            with suppress(OSError):
                os.write(members, JOIN)
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))

    return apply
