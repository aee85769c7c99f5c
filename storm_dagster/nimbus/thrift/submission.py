"""Submissions of Storm clients, which become an upload and a Dagster run.

All checks are made before any part is stored. The conf keys of JStorm turn a submission over a
running topology into a hot deploy or a gray upgrade.
"""

import logging
import time
import uuid
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from storm_dagster.core.authorization import LIMITED_USER
from storm_dagster.core.submission.setters import check_setters
from storm_dagster.core.submission.validation import check_confs, normalize_submission
from storm_dagster.core.upgrade.selection import selection_of_conf
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.dagster_names import TOKEN_TAG
from storm_dagster.model.errors import InvalidTopology, KeyNotFound, StormDagsterError
from storm_dagster.model.names import check_topology_name
from storm_dagster.model.operation_record import TokenRecord
from storm_dagster.model.topology import TopologySpec
from storm_dagster.nimbus.blobs.replicated_store import WriteTerms
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests
from storm_dagster.nimbus.thrift.idl import load_idl
from storm_dagster.nimbus.thrift.pending import PendingSubmission, PendingSubmissions, within
from storm_dagster.nimbus.thrift.structures import read_conf, read_topology_struct
from storm_dagster.operations.context import check_name_free, encode_json
from storm_dagster.operations.submit.staging import read_client_token, refuse_cancelled

_log = logging.getLogger(__name__)

_MARGIN_SECS = 0.5
"""Part of the time of a response that is left for the response after the wait."""
_POLL_SECS = 0.1
"""Interval at which a submission polls its record for the publication."""
_RUN_SECS = 1.0
"""Interval at which it also looks up its run, which may have failed."""
_GZIP = b"\x1f\x8b"
"""First bytes of a gzip file."""


def answer_deadline(conf: ClusterConf) -> float:
    """Monotonic time up to which a call that begins now may wait for its work.

    The conf key ``nimbus.submit.wait.secs`` is the time in which it must respond: streamparse's
    client gives up after 7 s, Storm's own waits for minutes.
    """
    return time.monotonic() + float(conf["nimbus.submit.wait.secs"]) - _MARGIN_SECS


@dataclass(frozen=True)
class _Checked:
    """Submission whose parts have passed the checks."""

    name: str
    conf: dict[str, Any]
    """Conf of the submission."""
    spec: TopologySpec
    archive_sha256: str
    """Hash of the uploaded archive."""
    inactive: bool
    """True if the topology starts inactive."""
    deploy: tuple[str, Mapping[str, Any]] | None
    """Verb and body of the change that it requests; ``None`` for a plain submission."""


class TopologySubmission:
    """Acceptance of submissions at the leader."""

    def __init__(
        self, nimbus: Nimbus, pending: PendingSubmissions, lifecycle: LifecycleRequests
    ) -> None:
        self._nimbus = nimbus
        self._pending = pending
        self._lifecycle = lifecycle

    def submit(
        self,
        name: str | None,
        location: str | None,
        json_conf: str | None,
        topology: Any,
        options: Any,
    ) -> None:
        """Accept a topology: store it, launch its run, and wait until it is published.

        If that takes longer than ``nimbus.submit.wait.secs``, it continues in the background, and
        the topology is listed as one that is being submitted. ``location`` is the session of the
        uploaded archive. Raises :class:`AlreadyAlive`, :class:`InvalidTopology`, and
        :class:`Unavailable` at a follower or without Dagster; :class:`NotAlive` if a kill cancels
        the submission, and for a hot deploy or gray upgrade if the name does not run.
        """
        deadline = answer_deadline(self._nimbus.conf)
        self._nimbus.status.require()
        checked = self._check(name, location, json_conf, topology, options)
        if checked.deploy is not None:
            verb, body = checked.deploy
            self._deploy(checked, verb, body, self._store(checked), deadline)
            return
        with self._pending.reserve(checked.name):
            handle = self._store(checked)
            pending = PendingSubmission(checked.name, handle, _new_token(), checked.inactive)
            with self._nimbus.launches.hold(pending.token):
                try:
                    self._pending.add(pending)
                except BaseException:
                    self._pending.drop(pending)
                    raise
                is_launched = self._pending.launch(pending, deadline)
        if not is_launched:
            _log.info(
                "topology %s is taken; its run is launched when Dagster answers", checked.name
            )
            return
        # A client that lists topologies after its submission expects to see this one with its
        # tasks; the run continues in any case.
        record: TokenRecord | None = None
        try:
            record = self._await_publication(pending.token, deadline)
        except StormDagsterError as error:
            _log.info("the publication of %s is not waited for: %s", checked.name, error)
        if record is not None:
            refuse_cancelled(pending.token, record)

    def _check(
        self,
        name: str | None,
        location: str | None,
        json_conf: str | None,
        topology: Any,
        options: Any,
    ) -> _Checked:
        """Check every part of a submission; nothing is stored.

        Raises the errors of :meth:`submit`. Unknown keys of the conf are only logged.
        """
        checked_name = check_topology_name(name, is_new=False)
        document = read_conf(json_conf, f"topology {checked_name!r}")
        spec = read_topology_struct(topology, checked_name)
        conf, spec, warnings = check_confs(
            document, spec, f"the conf of topology {checked_name!r}", unknown="warn"
        )
        deploy: tuple[str, Mapping[str, Any]] | None = None
        if conf.get("topology.upgrade"):  # It takes precedence over a hot deploy, as in JStorm.
            deploy = ("gray-upgrade", selection_of_conf(conf).to_document())
        elif conf.get("topology.hot.deploy.enable"):
            deploy = ("update", {})
        if deploy is None:
            check_topology_name(checked_name)
            remedy = "kill it first, choose another name, or set topology.hot.deploy.enable=true"
            check_name_free(
                self._nimbus.cluster.load_view(),
                checked_name,
                remedy=remedy,
                secs_until_removal=self._nimbus.secs_until_removal,
            )
        user = LIMITED_USER.get()
        if user is not None and deploy is None:
            # A replacement is compared with the running topology, by the run.
            conf, spec, ignored = check_setters(
                user, conf, spec, self._nimbus.conf.values, ignores_cluster_keys=True
            )
            warnings.extend(ignored)
        # Errors are returned to the client, not only raised by the run's first stage.
        normalize_submission(self._nimbus.conf.values, conf, spec)
        for warning in warnings:
            _log.warning("topology %s: %s", checked_name, warning)
        return _Checked(
            name=checked_name,
            conf=conf,
            spec=spec,
            archive_sha256=self._archive(location),
            inactive=_inactive(options),
            deploy=deploy,
        )

    def _archive(self, location: str | None) -> str:
        """Hash of the archive at a location that finishFileUpload ended.

        :class:`InvalidTopology` for any other location.
        """
        if not isinstance(location, str) or not location.isalnum() or len(location) > 64:
            raise InvalidTopology(_no_archive(location))
        key = f"upload.{location}.archive"
        try:
            self._nimbus.uploads.check(location)
            with self._nimbus.blobs.open(key) as stream:
                if stream.read(2) != _GZIP and not zipfile.is_zipfile(stream):
                    raise InvalidTopology(
                        "the uploaded archive is neither zip (jar) nor tar.gz: "
                        "pack the code as one of those"
                    )
            return self._nimbus.blobs.meta(key).sha256
        except KeyNotFound:
            raise InvalidTopology(_no_archive(location)) from None

    def _store(self, checked: _Checked) -> str:
        """Store the parts as a new upload; return its handle.

        The archive keeps its own upload as well: the client may use its location for another
        submission. After an error the new upload is cancelled.
        """
        handle = self._nimbus.uploads.begin()
        blobs = self._nimbus.blobs
        try:
            archive = blobs.put_content(
                f"upload.{handle}.archive", checked.archive_sha256, WriteTerms()
            )
            if archive is None:
                raise InvalidTopology(_no_archive(None))
            # Not a part of clients: the run only warns of unknown conf keys, as this does.
            blobs.put(f"upload.{handle}.source", b"thrift")
            blobs.put(f"upload.{handle}.conf", encode_json(checked.conf))
            blobs.put(f"upload.{handle}.topology", checked.spec.to_json())
            self._nimbus.uploads.finish(handle)
        except BaseException:
            self._nimbus.uploads.cancel(handle)
            raise
        return handle

    def _await_publication(self, token: str, deadline: float) -> TokenRecord | None:
        """Return the record when the topology is published, or the submission cancelled.

        ``None`` when its run has ended, or at the deadline.
        """
        next_lookup = time.monotonic() + _RUN_SECS
        while time.monotonic() < deadline:
            operations = self._nimbus.operations(self._nimbus.status.require())
            stored = read_client_token(operations, token)
            if stored is not None:
                record, _ = stored
                if record.published:
                    return record
            if time.monotonic() >= next_lookup:
                run = self._nimbus.dagster.find_run(TOKEN_TAG, token)
                if run is not None and run.finished:
                    return None
                next_lookup = time.monotonic() + _RUN_SECS
            time.sleep(_POLL_SECS)
        return None

    def _deploy(
        self, checked: _Checked, verb: str, body: Mapping[str, Any], handle: str, deadline: float
    ) -> None:
        """Launch the run of a change with the uploaded code, and wait for the launch.

        The upload is cancelled if the launch fails. :class:`Late` if it has not ended at
        ``deadline``: it continues in the background.
        """

        def launch() -> None:
            try:
                document = {"handle": handle, "token": _new_token(), **body}
                self._lifecycle.act(checked.name, verb, document)
            except BaseException:
                self._nimbus.uploads.cancel(handle)
                raise

        within(deadline, launch, f"the deployment of {checked.name!r}")


def _new_token() -> str:
    return f"thrift-{uuid.uuid4().hex}"


def _inactive(options: Any) -> bool:
    """True if SubmitOptions ask for an inactive topology; ``None`` is an active one.

    :class:`InvalidTopology` for credentials and for an unknown status.
    """
    if options is None:
        return False
    if options.creds is not None and options.creds.creds:
        raise InvalidTopology(
            "credentials are not taken: put them where the workers find them "
            "(files, or topology.environment)"
        )
    status = load_idl().TopologyInitialStatus
    if options.initial_status not in (None, status.ACTIVE, status.INACTIVE):
        raise InvalidTopology(
            f"initial status {options.initial_status!r} is none: use ACTIVE (1) or INACTIVE (2)"
        )
    return options.initial_status == status.INACTIVE


def _no_archive(location: str | None) -> str:
    return (
        f"no uploaded archive {location!r:.80}: upload it (beginFileUpload, uploadChunk, "
        "finishFileUpload) to this nimbus, and submit with the location that it gave"
    )
